"""`make vendor`: fetches others' files of the page again, as their list names them.

Each stands there with its package on npm's registry, the version, its licence, the registry's
integrity of that version, and its own digest.  A file that is not what it says stops with its name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from cluster.records import frozen

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "deployments/page/vendor.json"


@frozen
class Package:
    """One version of a package.  files: where each goes, by its name in the package, with its
    SHA-256; places are relative to the repository's root, those that end in .gz compressed."""

    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, tuple[str, str]]


def packages() -> list[Package]:
    """Return what `vendor.json` lists."""
    return [
        Package(
            one["name"],
            one["version"],
            one["licence"],
            one["integrity"],
            {name: (each["to"], each["sha256"]) for name, each in one["files"].items()},
        )
        for one in json.loads(LIST.read_text("utf-8"))
    ]


def fetch(package: Package) -> None:
    """Get a package from npm's registry and write its files; raises ValueError where it differs."""
    with tempfile.TemporaryDirectory() as folder:
        packed = f"{package.name}@{package.version}"
        subprocess.run(["npm", "pack", packed, "--silent"], cwd=folder, check=True)
        (path,) = Path(folder).iterdir()
        digest = hashlib.sha512(path.read_bytes()).digest()
        if f"sha512-{base64.b64encode(digest).decode()}" != package.integrity:
            raise ValueError(f"{packed}: its integrity is not that of vendor.json")
        with tarfile.open(path) as archive:
            for name, (to, sha256) in package.files.items():
                member = archive.extractfile(f"package/{name}")
                body = b"" if member is None else member.read()
                if hashlib.sha256(body).hexdigest() != sha256:
                    raise ValueError(f"{packed}: {name} is not the file of vendor.json")
                (ROOT / to).parent.mkdir(parents=True, exist_ok=True)
                is_packed = to.endswith(".gz")
                (ROOT / to).write_bytes(gzip.compress(body, mtime=0) if is_packed else body)


def main() -> None:
    for package in packages():
        fetch(package)
        sys.stderr.write(f"{package.name} {package.version} ({package.licence})\n")


if __name__ == "__main__":
    main()
