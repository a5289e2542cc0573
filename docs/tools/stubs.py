"""The stubs of protos/.

The stubs that a client of the public service needs are in cluster/client/generated, which is
packaged alone; the others are in cluster/rpc/generated."""

from __future__ import annotations

import re
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
_CLIENT = "cluster/client/generated"
_DATA_PLANE = "cluster/rpc/generated"
FOLDERS = (_CLIENT, _DATA_PLANE)
_OF_CLIENTS = ("common_pb2", "generation_pb2")
# The only service whose stubs are called; between our own parts each side names methods itself.
_SERVICE = "generation_pb2_grpc.py"

# protoc writes imports relative to the proto root, but the stubs are in our packages.
_IMPORT = re.compile(r"^from drafthouse\.[.\w]+ import (\w+_pb2)", re.MULTILINE)


def files(root: Path = ROOT) -> dict[Path, str | None]:
    """Path and text of every stub; None of one that is left over."""
    there = (path for folder in FOLDERS for path in (root / folder).glob("*_pb2*.py*"))
    return dict.fromkeys(there) | {root / name: text for name, text in generate().items()}


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
            path
            for path in Path(folder).rglob("*_pb2*.py*")
            if path.name == _SERVICE or not path.name.endswith("_grpc.py")
        )
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
