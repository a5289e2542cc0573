"""Generates the stubs of protos/: `python -m cluster.rpc.generate`.

The stubs that a client of the public service needs are in cluster/client/generated, which is
packaged alone; the others are in cluster/rpc/generated.

--check writes nothing; it names the committed stubs that differ from the generated ones and exits
with 1 if there are any.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
PROTOS = _ROOT / "protos"
_CLIENT = "cluster/client/generated"
_DATA_PLANE = "cluster/rpc/generated"
FOLDERS = (_CLIENT, _DATA_PLANE)
_OF_CLIENTS = ("common_pb2", "generation_pb2")
# The only service whose stubs are called; between our own parts each side names methods itself.
_SERVICE = "generation_pb2_grpc.py"

# protoc writes imports relative to the proto root, but the stubs are in our packages.
_IMPORT = re.compile(r"^from drafthouse\.[.\w]+ import (\w+_pb2)", re.MULTILINE)


def contract(protos: Path = PROTOS) -> list[Path]:
    """The .proto files of all packages."""
    return sorted(protos.glob("drafthouse/**/*.proto"))


def generate(protos: Path = PROTOS) -> dict[str, str]:
    """Maps the path, in the repository, of every stub generated from `protos` to its content."""
    from grpc_tools import protoc  # a development dependency: servers run on committed stubs

    sources = contract(protos)
    if not sources:
        raise FileNotFoundError(f"{protos}: no drafthouse/**/*.proto; run from a source checkout")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc",
            f"-I{protos}",
            f"-I{resources.files('grpc_tools') / '_proto'}",
            *(f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")),
            *(str(source) for source in sources),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc refused {protos}; its message is above")
        written = sorted(
            path for path in Path(folder).rglob("*_pb2*.py*")
            if path.name == _SERVICE or not path.name.endswith("_grpc.py")
        )  # fmt: skip
        return dict(_placed(path.name, path.read_text()) for path in written)


def _placed(name: str, content: str) -> tuple[str, str]:
    """Path and content of one stub; its imports lead to where the others are."""
    home = _home(name.removesuffix("_grpc.py"))

    def imported(match: re.Match[str]) -> str:
        other = _home(match[1])
        # The client is packaged under another name, so its stubs find each other by place.
        package = "." if other == home == _CLIENT else other.replace("/", ".")
        return f"from {package} import {match[1]}"

    return f"{home}/{name}", _IMPORT.sub(imported, content)


def _home(name: str) -> str:
    return _CLIENT if name.startswith(_OF_CLIENTS) else _DATA_PLANE


def stale(stubs: dict[str, str], root: Path = _ROOT) -> list[str]:
    """Paths below `root` of files that are missing, differ from `stubs`, or are left over."""
    committed = {
        path.relative_to(root).as_posix(): path.read_text()
        for folder in FOLDERS
        for path in (root / folder).glob("*_pb2*.py*")
    }
    paths = sorted(committed.keys() | stubs.keys())
    return [path for path in paths if committed.get(path) != stubs.get(path)]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.rpc.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if stale")
    options = parser.parse_args(arguments)
    stubs = generate()
    old = stale(stubs)
    if options.check:
        for path in old:
            sys.stderr.write(f"{path} is stale: run python -m cluster.rpc.generate\n")
        return 1 if old else 0
    for path in old:
        if path in stubs:
            (_ROOT / path).write_text(stubs[path])
        else:
            (_ROOT / path).unlink()
    sys.stdout.write(f"{len(stubs)} stubs, {len(old)} changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
