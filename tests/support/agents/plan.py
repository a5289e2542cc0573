"""The coding agents: their packages, how each is pointed at a server, and what its model writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.records import frozen

MODEL = "drafthouse"
KEY = "invented"
TASK = "Let greet.py greet politely, then run check.py."
GREET = 'def greet(name):\n    return "hello " + name\n'
OLD, NEW = '    return "hello " + name', '    return f"Hello, {name}!"'
COMMAND, COMMAND_RAN = "python3 check.py", "checked.txt"
CHECK = (
    "from greet import greet\n\n"
    'assert greet("you") == "Hello, you!"\n'
    f'open("{COMMAND_RAN}", "w").write("fine")\n'
)
FIRST = "I read both files first.\n"
LAST = "greet.py greets politely now, and check.py is content."
TITLE = "Greet politely"
# How the template begins the result of a tool.
_RESULT = "<tool_response>"


@frozen
class Place:
    """url: of the server, without /v1.  folder: where the agent is installed.  home: its own, empty
    at first.  work: the repository."""

    url: str
    folder: Path
    home: Path
    work: Path


@frozen
class Agent:
    """package: with its version, of npm with an @ and of PyPI with ==.  words: its command line.

    steps: what the model writes, by the number of results that it has read, for a repository.
    files: below its home.  task_has: what the prompts of the task have, and no others, say those
    that ask for a title.  heeds_no_proxy: whether it goes to this machine without a proxy.
    asks_anyway: a part of the name of another host that it asks, whatever is set.
    """

    name: str
    package: str
    words: Callable[[Place], list[str]]
    steps: Callable[[Path], Mapping[int, str]]
    environment: Callable[[Place], Mapping[str, str]]
    files: Callable[[Place], Mapping[str, str]] = lambda place: {}
    task_has: str = "<tools>"
    heeds_no_proxy: bool = True
    asks_anyway: str = ""

    @property
    def is_of_npm(self) -> bool:
        return "==" not in self.package

    @property
    def version(self) -> str:
        return self.package.rpartition("=" if "==" in self.package else "@")[2]

    def answer(self, work: Path) -> Callable[[str], str]:
        """What the model writes to a prompt in the format of `configs/templates`."""
        steps = self.steps(work)

        def write(prompt: str) -> str:
            if self.task_has not in prompt:
                return TITLE
            return steps.get(prompt.count(_RESULT), LAST)

        return write


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def calls(*written: str) -> str:
    return FIRST + "\n".join(written)


def _steps(
    read: str,
    path: str,
    edit: str,
    run: str,
    edited: tuple[str, str, str] = ("file_path", "old_string", "new_string"),
    **more: object,
) -> Callable[[Path], Mapping[int, str]]:
    """By calls of tools of these names.  path: of what is read; edited: the arguments of an edit;
    more: arguments of a command."""

    def steps(work: Path) -> Mapping[int, str]:
        greet, check = (str(work / name) for name in ("greet.py", "check.py"))
        change = dict(zip(edited, (greet, OLD, NEW), strict=True))
        return {
            0: calls(*(call(read, **{path: each}) for each in (greet, check))),
            2: call(edit, **change),
            3: call(run, command=COMMAND, **more),
        }

    return steps


def _bin(place: Place, name: str) -> str:
    return str(place.folder / "node_modules" / ".bin" / name)


def _claude(place: Place) -> list[str]:
    # The package's command is put in place by a script of its installation, which is not run.
    wrapper = "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    return [
        "node",
        str(place.folder / wrapper),
        "-p",
        TASK,
        "--permission-mode",
        "acceptEdits",
        "--allowedTools",
        f"Bash({COMMAND})",
    ]


def _claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex_files(place: Place) -> dict[str, str]:
    settings = f"""\
model = "{MODEL}"
model_provider = "drafthouse"
check_for_update_on_startup = false
analytics.enabled = false
features.plugins = false

[model_providers.drafthouse]
name = "Drafthouse"
base_url = "{place.url}/v1"
env_key = "DRAFTHOUSE_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": settings}


def _codex_steps(work: Path) -> dict[int, str]:
    hunk = f"*** Update File: greet.py\n@@\n-{OLD}\n+{NEW}\n"
    patch = f"apply_patch <<'EOF'\n*** Begin Patch\n{hunk}*** End Patch\nEOF"
    read = [call("exec_command", cmd=f"cat {name}") for name in ("greet.py", "check.py")]
    return {
        0: calls(*read),
        2: call("exec_command", cmd=patch),
        3: call("exec_command", cmd=COMMAND),
    }


def _opencode_files(place: Place) -> dict[str, str]:
    model = f"drafthouse/{MODEL}"
    settings = {
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "drafthouse": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Drafthouse",
                "options": {"baseURL": f"{place.url}/v1", "apiKey": KEY},
                "models": {MODEL: {"limit": {"context": 131072, "output": 32000}}},
            }
        },
    }
    return {".config/opencode/opencode.json": json.dumps(settings, indent=2)}


def _opencode(place: Place) -> list[str]:
    # The program for this platform, which a script of the installation would put in place; of two
    # builds the one that asks for less of the processor.
    found = sorted(place.folder.glob("node_modules/opencode-linux-*/bin/opencode"))
    return [str(found[-1]), "run", TASK]


def _qwen_files(place: Place) -> dict[str, str]:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True},
    }
    return {".qwen/settings.json": json.dumps(settings, indent=2)}


def _continue_files(place: Place) -> dict[str, str]:
    settings = f"""\
name: Drafthouse
version: 1.0.0
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {place.url}/v1
    apiKey: {KEY}
    roles: [chat]
    capabilities: [tool_use]
"""
    return {".continue/config.yaml": settings}


def _aider(place: Place) -> list[str]:
    return [
        str(place.folder / "bin" / "aider"),
        "--model",
        f"openai/{MODEL}",
        "--model-metadata-file",
        str(place.home / "models.json"),
        "--edit-format",
        "diff",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-release-notes",
        "--no-gitignore",
        "--no-suggest-shell-commands",
        "--yes-always",
        "--auto-test",
        "--test-cmd",
        COMMAND,
        "--message",
        TASK,
        "greet.py",
    ]


def _aider_files(place: Place) -> dict[str, str]:
    about = {"max_input_tokens": 131072, "max_output_tokens": 8192, "mode": "chat"}
    about |= {"litellm_provider": "openai"}
    return {"models.json": json.dumps({f"openai/{MODEL}": about})}


def _aider_steps(work: Path) -> dict[int, str]:
    block = f"<<<<<<< SEARCH\n{OLD}\n=======\n{NEW}\n>>>>>>> REPLACE"
    return {0: f"greet.py\n```python\n{block}\n```\n"}


def _mini(place: Place) -> list[str]:
    return [
        str(place.folder / "bin" / "mini"),
        "--yolo",
        "--exit-immediately",
        "--task",
        TASK,
        "--model",
        f"openai/{MODEL}",
        "--output",
        str(place.home / "trajectory.json"),
    ]


def _mini_steps(work: Path) -> dict[int, str]:
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    edit = f"sed -i 's/.*hello.*/{NEW}/' greet.py"
    read = [call("bash", command=f"cat {name}") for name in ("greet.py", "check.py")]
    return {0: calls(*read)} | {
        place: call("bash", command=command)
        for place, command in ((2, edit), (3, COMMAND), (4, done))
    }


def _openai(place: Place) -> dict[str, str]:
    return {
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_API_BASE": f"{place.url}/v1",
        "OPENAI_MODEL": MODEL,
        # litellm's prices, of which it would ask for newer ones.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


AGENTS = (
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code@2.1.197",
        _claude,
        _steps("Read", "file_path", "Edit", "Bash", description="Run the check"),
        _claude_environment,
    ),
    Agent(
        "codex",
        "@openai/codex@0.171.0",
        lambda place: [
            _bin(place, "codex"),
            "exec",
            "--dangerously-bypass-approvals-and-sandbox",
            TASK,
        ],
        _codex_steps,
        lambda place: {"DRAFTHOUSE_KEY": KEY},
        _codex_files,
    ),
    Agent(
        "opencode",
        "opencode-ai@1.18.33",
        _opencode,
        _steps(
            "read",
            "filePath",
            "edit",
            "bash",
            ("filePath", "oldString", "newString"),
            description="Run the check",
        ),
        lambda place: {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        _opencode_files,
        # Its plug-ins' library, which it does without.  Nothing switches this off.
        asks_anyway="registry.",
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code@0.15.10",
        lambda place: [_bin(place, "qwen"), "-p", TASK, "--yolo", "--auth-type", "openai"],
        _steps("read_file", "file_path", "edit", "run_shell_command", is_background=False),
        _openai,
        _qwen_files,
        heeds_no_proxy=False,
    ),
    Agent(
        "continue",
        "@continuedev/cli@1.5.47",
        lambda place: [_bin(place, "cn"), "-p", TASK, "--auto"],
        _steps("Read", "filepath", "Edit", "Bash"),
        lambda place: {"CONTINUE_CLI_ENABLE_TELEMETRY": "0"},
        _continue_files,
    ),
    Agent(
        "aider",
        "aider-chat==0.86.2",
        _aider,
        _aider_steps,
        _openai,
        _aider_files,
        task_has="SEARCH/REPLACE",
    ),
    Agent(
        "mini-swe-agent",
        "mini-swe-agent==2.4.6",
        _mini,
        _mini_steps,
        lambda place: {
            **_openai(place),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
)
