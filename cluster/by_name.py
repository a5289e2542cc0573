"""A configuration without a file: from the name of a model, and of what drafts for it.

`drafthouse serve MODEL --draft M` and `LLM(model, draft=M)` have it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.config import file as config_file
from cluster.config.file import ServeFile
from cluster.draft.registry import drafters_of
from cluster.errors import ConfigError
from cluster.models.names import REPOSITORY

# Named in errors, in the place of a file.
COMMAND_LINE = "the command line"
# Without any `--draft`: it needs no model, and costs next to nothing where texts repeat nothing.
_DEFAULT = ("suffix",)
_OF_FILES = (".yaml", ".yml", ".json")


def read(name: str | Path, drafts: Sequence[str] = (), overrides: Sequence[str] = ()) -> ServeFile:
    """Return the configuration in a file, or that of a model with drafters.

    name: a Serve config file; or a model as `target.engine.model` has it.  drafts: only for a
    model, see `drafters_of`.  overrides: `key.path=value`.  Raises ConfigError.
    """
    if is_file(name):
        if drafts:
            raise ConfigError(f"{name}: the file names its drafters; write {drafts[0]} in there")
        return config_file.load(_place_of(Path(name)), overrides)
    # Shares of a CPU are only Ray's book-keeping here: everything fits a machine with two.  What
    # passes tokens on does it between two steps of the target.
    arguments = {
        "target": {"engine": {"model": str(name)}, "placement": {"num_cpus": 0.3}},
        "drafters": drafters_of(drafts or _DEFAULT, str(name)),
        "coordinator": {"placement": {"num_cpus": 0.1}, "nice": 19},
        "ingress": {"placement": {"num_cpus": 0.1}, "nice": 19},
    }
    application = {"name": "drafthouse", "import_path": "deployments.app:build", "args": arguments}
    document = {"proxy_location": "Disabled", "applications": [application]}
    return config_file.load(COMMAND_LINE, overrides, document)


def is_file(name: str | Path) -> bool:
    """True for the name of a Serve config file, False for that of a model."""
    path = Path(name)
    return path.suffix in _OF_FILES or (path.is_file() and path.suffix != ".gguf")


def _place_of(file: Path) -> Path:
    """Where the file is: below the working directory, or among those that we ship."""
    shipped = REPOSITORY / file
    return shipped if shipped.is_file() and not file.exists() else file
