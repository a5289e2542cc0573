"""Options as vLLM's users type them, and the settings of ours that they stand for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from cluster.config.access import digest_of
from cluster.config.parse import nearest
from cluster.errors import ConfigError

# By option: its settings, all of which get its value, and what stands in `--help`.
SETTINGS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "host": (("http.host",), "the interface to listen on; 0.0.0.0 = all"),
    "port": (("http.port",), "of the HTTP API"),
    "max-model-len": (("target.engine.max_context_len",), "prompt and output together, in tokens"),
    "tensor-parallel-size": (("target.engine.tensor_parallel",), "GPUs that share the layers"),
    "dtype": (("target.engine.dtype",), "number format of weights and KV cache"),
    "gpu-memory-utilization": (("target.engine.memory_fraction",), "share of the GPU's memory"),
    "max-num-seqs": (
        ("target.engine.max_running_sequences", "coordinator.max_running_sequences"),
        "sequences that are decoded at the same time",
    ),
    "max-num-batched-tokens": (("target.engine.max_batch_tokens",), "rows of one forward pass"),
    "chat-template": (("answers.chat_template",), "a file in place of the model's own template"),
    "data-parallel-size": (("target.replicas",), "targets, each with a model of its own"),
    "tool-call-parser": (("answers.tool_parser",), "format of the model's tool calls"),
    "reasoning-parser": (("answers.reasoning_parser",), "how the model marks its reasoning"),
    "generation-config": (("target.generation_config",), "sampling defaults"),
    "ssl-certfile": (("tls.cert_file",), "certificate for HTTPS"),
    "ssl-keyfile": (("tls.key_file",), "its key"),
    "otlp-traces-endpoint": (("ingress.traces_url",), "where spans go"),
    "allowed-origins": (("api.cors_origins",), "whose pages may call the API, as a JSON list"),
    "enable-prefix-caching": (("target.engine.prefix_cache",), "keep prompts' KV pages"),
    "enable-auto-tool-choice": ((), "always so"),
    "enable-chunked-prefill": ((), "always so"),
    "enable-lora": ((), "always so"),
}
_SWITCH = "enable-"
_JSON = "allowed-origins"
# Values that have another name here.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "tool-call-parser": {"llama3_json": "llama3", "deepseek_v3": "deepseek", "openai": "harmony"},
    "reasoning-parser": {"deepseek_r1": "think", "qwen3": "think", "openai_gptoss": "harmony"},
    "generation-config": {"vllm": "none"},
}
# Options without a setting that means the same, and what to write instead.
ANSWERS: Mapping[str, str] = {
    "quantization": "a checkpoint's own format is read, so leave it out; to round at load, set "
    "target.engine.weights (int8, int4; on a CPU) or target.engine.quantization (transformers')",
    "pipeline-parallel-size": "layers are not spread over processes; set target.engine.device_map, "
    "or --tensor-parallel-size",
    "trust-remote-code": "no code of a checkpoint is run; leave it out, where transformers itself "
    "has the architecture",
}
# Options that were ours.
GONE: Mapping[str, str] = {
    "policy": "the control loop prices drafts in every step, so leave it out",
    "out": "`evaluate` prints its table, or with --json its record, and writes no file",
}

# vLLM's methods that have a counterpart: the kind of drafter, and whether that has a model.
METHODS: Mapping[str, tuple[str, bool]] = {
    "ngram": ("prompt_lookup", False),
    "suffix": ("suffix", False),
    "draft_model": ("lm", True),
    "eagle3": ("eagle3", True),
    "medusa": ("medusa", True),
    "mtp": ("mtp", False),
    "dflash": ("block", True),
}
# Keys of vLLM's speculative config beside method and model; {} is the drafter's name.
KEYS: Mapping[str, str] = {
    "num_speculative_tokens": "coordinator.max_draft_tokens",
    "prompt_lookup_max": "drafters.{}.options.max_ngram",
    "prompt_lookup_min": "drafters.{}.options.min_ngram",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that have a setting of ours, and those that say what drafts."""
    add = parser.add_argument
    add(
        "--draft",
        dest="drafts",
        action="append",
        default=[],
        metavar="M",
        help="what drafts for MODEL: a draft model, suffix, prompt_lookup ..., or KIND=MODEL; "
        "may be given several times",
    )
    for option, (settings, about) in SETTINGS.items():
        short = ["-tp"] if option == "tensor-parallel-size" else []
        told = ": ".join(filter(None, (about, ", ".join(settings))))
        if option.startswith(_SWITCH):
            add(f"--{option}", action=argparse.BooleanOptionalAction, help=told)
        else:
            add(f"--{option}", *short, help=told)
    for option, answer in ANSWERS.items():
        add(f"--{option}", nargs="?", const="", help=f"not here: {answer}")
    for option in GONE:
        add(f"--{option}", help=argparse.SUPPRESS)
    add("--lora-modules", nargs="+", metavar="NAME=FOLDER", help="target.engine.adapters")
    add("--served-model-name", nargs="+", metavar="NAME", help="model_name, and further names")
    add("--speculative-config", metavar="JSON", help="vLLM's, where that has a counterpart here")


def _settings_of(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that the options stand for, as overrides of the form key=value."""
    found: list[tuple[str, str]] = []
    for option, (settings, _) in SETTINGS.items():
        value: str | bool | None = getattr(arguments, option.replace("-", "_"))
        if value is False and not settings:
            raise ConfigError.at(f"--no-{option}", "it is always so here; leave it out")
        if isinstance(value, bool):
            found += [(setting, json.dumps(value)) for setting in settings]
        elif value is not None:
            # A number stays one; what else could be YAML for something else is a text.
            is_yaml = option == _JSON or value.replace(".", "", 1).isdigit()
            renamed = _RENAMED.get(option, {}).get(value, value)
            value = value if is_yaml else json.dumps(renamed)
            found += [(setting, value) for setting in settings]
    if arguments.served_model_name:
        name, *others = arguments.served_model_name
        found += [("model_name", json.dumps(name)), ("api.served_model_names", json.dumps(others))]
    if arguments.lora_modules:
        adapters = dict(module.partition("=")[::2] for module in arguments.lora_modules)
        found.append(("target.engine.adapters", json.dumps(adapters)))
    return [f"{setting}={value}" for setting, value in found]


def asked(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return what the options say: drafts, and settings as overrides of the form key=value.

    Those of --set are the last, and so count."""
    for option, answer in {**ANSWERS, **GONE}.items():
        if getattr(arguments, option.replace("-", "_")) is not None:
            raise ConfigError.at(f"--{option}", answer)
    drafts, settings = list(arguments.drafts), _settings_of(arguments)
    if arguments.speculative_config is not None:
        draft, more = speculation(arguments.speculative_config)
        drafts, settings = [*drafts, draft], [*settings, *more]
    if getattr(arguments, "log_format", None):
        settings.append(f"log_format={arguments.log_format}")
    return drafts, [*settings, *arguments.overrides]


def speculation(text: str) -> tuple[str, list[str]]:
    """Return the draft, as `--draft` has it, and the settings of vLLM's speculative config.

    Raises ConfigError for what has no counterpart, with the remedy."""
    option = "--speculative-config"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError.at(option, f"not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError.at(option, "a JSON object is expected")
    model, method = given.pop("model", ""), given.pop("method", "draft_model")
    method = "mtp" if str(method).endswith("_mtp") else method
    if method not in METHODS:
        hint = nearest(str(method), METHODS, "those that are")
        reason = (
            f"the method {method!r} is not served here ({hint}); docs/drafters.md has all kinds"
        )
        raise ConfigError.at(option, reason)
    kind, has_model = METHODS[method]
    if has_model and not model:
        raise ConfigError.at(option, f"the method {method} needs a model; name it as `model`")
    known = [key for key in KEYS if kind == "prompt_lookup" or "{}" not in KEYS[key]]
    for key in given:
        if key not in known:
            reason = f"{key} has no counterpart here ({nearest(key, known, 'keys')}); leave it out"
            raise ConfigError.at(option, reason)
    settings = [f"{KEYS[key].format(kind)}={json.dumps(value)}" for key, value in given.items()]
    return f"{kind}={model}" if has_model else kind, settings


def keys_file(api_keys: Sequence[str]) -> str:
    """Return what `access.keys_file` holds for clients that have one of these keys."""
    keys = {f"key{number}": {"sha256": digest_of(key)} for number, key in enumerate(api_keys, 1)}
    return json.dumps({"keys": keys})
