"""Generates cluster/rpc/generated from protos/: `python -m cluster.rpc.generate`.

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
GENERATED = Path(__file__).resolve().parent / "generated"

# protoc writes imports relative to the proto root, but the stubs are in our package.
_IMPORT = re.compile(r"^from drafthouse\.[.\w]+ import ", re.MULTILINE)


def contract(protos: Path = PROTOS) -> list[Path]:
    """The .proto files of all packages."""
    return sorted(protos.glob("drafthouse/**/*.proto"))


def generate(protos: Path = PROTOS) -> dict[str, str]:
    """Maps the file name of every stub generated from `protos` to its content."""
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
        written = sorted(path for path in Path(folder).rglob("*_pb2*") if path.is_file())
        return {path.name: _IMPORT.sub("from cluster.rpc.generated import ", path.read_text())
                for path in written}  # fmt: skip


def stale(stubs: dict[str, str], folder: Path = GENERATED) -> list[str]:
    """Names of files in `folder` that are missing, differ from `stubs`, or are left over."""
    committed = {path.name: path.read_text() for path in folder.glob("*_pb2*.py*")}
    names = sorted(committed.keys() | stubs.keys())
    return [name for name in names if committed.get(name) != stubs.get(name)]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.rpc.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if stale")
    options = parser.parse_args(arguments)
    stubs = generate()
    old = stale(stubs)
    if options.check:
        for name in old:
            sys.stderr.write(
                f"cluster/rpc/generated/{name} is stale: run python -m cluster.rpc.generate\n"
            )
        return 1 if old else 0
    for name in old:
        if name in stubs:
            (GENERATED / name).write_text(stubs[name])
        else:
            (GENERATED / name).unlink()
    sys.stdout.write(f"{len(stubs)} stubs, {len(old)} changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
