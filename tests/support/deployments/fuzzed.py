"""Lets schemathesis ask whatever /openapi.json allows, and more, of the API over a toy target.

    python -m tests.support.deployments.fuzzed ST [--examples N]

ST is schemathesis's own command, which has an environment of its own.  It asks twice: of a server
without keys, and of one with keys, by an operator's key.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.config.doors import AccessConfig, digest_of
from cluster.config.schema import Config
from tests.support.deployments.scripted import scripted
from tests.support.text.tokenizers_for_tests import byte_level_folder

# What a schema cannot say decides too: whether the model is known, a prompt fits, a regular
# expression compiles.  So neither "valid" bodies must be served, nor all others be refused.
_NOT_MEANT = "positive_data_acceptance,negative_data_rejection"
# Most requests name the model that is served: others end there.
_HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) < 9:
        body["model"] = "toy"
    return body
"""


def _asked(arguments: argparse.Namespace, config: Config, folder: Path, headers: list[str]) -> int:
    (folder / "hooks.py").write_text(_HOOKS, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "SCHEMATHESIS_HOOKS": "hooks"}
    with scripted(byte_level_folder(folder), config) as server:
        command = (
            f"run {server.url}/openapi.json --exclude-checks {_NOT_MEANT} "
            f"--max-examples {arguments.examples} --seed 0 --no-shrink --phases {arguments.phases} "
            "--exclude-path /health"  # its coordinator is no process, so it is said to have none
        )
        words = [arguments.st, *command.split()]
        words += [word for each in headers for word in ("--header", each)]
        return subprocess.run(words, check=False, env=environment, cwd=folder).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.support.deployments.fuzzed")
    parser.add_argument("st")
    parser.add_argument("--examples", type=int, default=100, help="of each operation")
    parser.add_argument("--phases", default="coverage,fuzzing")
    arguments = parser.parse_args()
    key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys.yaml"
        keys.write_text(f"keys: {{fuzz: {{sha256: {digest_of(key)}, admin: true}}}}\n", "utf-8")
        keys.chmod(0o600)
        guarded = Config(model_name="toy", access=AccessConfig(keys_file=str(keys)))
        codes = [
            _asked(arguments, Config(model_name="toy"), folder, []),
            _asked(arguments, guarded, folder, [f"Authorization: Bearer {key}"]),
        ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
