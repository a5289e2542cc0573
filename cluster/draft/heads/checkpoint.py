"""A draft head's folder: its configuration, its tensors, and what may be said against them.

Tensors are read from safetensors, or by `torch.load(weights_only=True)`: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cluster.errors import ConfigError

# So many names in one message; a wrong file would name hundreds.
_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head must fit.

    name: the target as the configuration names it, or its folder; only its last part is compared.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    name: str = ""


# The target's "embedding" or "output" weights, [vocab, hidden], for what a folder leaves out.
TargetWeight = Callable[[str], torch.Tensor]


@dataclass(slots=True)
class Tensors:
    """The tensors of a folder, taken one by one; what nobody has taken is left over."""

    folder: Path
    held: dict[str, torch.Tensor]
    missing: list[str] = field(default_factory=list)

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of that name and shape.

        A missing one is noted for `check`, which names them all; raises ConfigError for another
        shape.
        """
        tensor = self.held.pop(name, None)
        if tensor is None:
            self.missing.append(name)
            return torch.zeros(*shape)
        if tuple(tensor.shape) != tuple(shape):
            raise refused(
                self.folder,
                f"tensor {name} has the shape {list(tensor.shape)}, its configuration says "
                f"{list(shape)}",
            )
        return tensor

    def take_if_there(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """The tensor of that name, or None where the file has none."""
        return self.take(name, shape) if name in self.held else None

    def check(self) -> None:
        """Raise ConfigError that names the tensors missing and left over, if there are any."""
        problems = []
        if self.missing:
            problems.append(f"it lacks {_names(self.missing)}")
        if self.held:
            problems.append(f"nothing is known of {_names(self.held)}")
        if problems:
            raise refused(self.folder, "; ".join(problems))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; raises ConfigError where there is none."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise refused(folder, f"config.json cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise refused(folder, f"config.json is no JSON ({error})") from error
    if not isinstance(data, dict):
        raise refused(folder, "config.json is no JSON object")
    return data


def read_tensors(folder: Path, rename: Callable[[str], str] = str) -> Tensors:
    """Every tensor of a folder's weights, under the names that `rename` gives them."""
    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    if files:
        from safetensors.torch import load_file

        for file in files:
            found.update(load_file(file))
    else:
        for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
            found.update(_load_torch(folder, file))
    if not found:
        raise refused(folder, "it has no weights (*.safetensors, *.bin or *.pt)")
    return Tensors(folder, {rename(name): tensor for name, tensor in found.items()})


def _load_torch(folder: Path, file: Path) -> Mapping[str, torch.Tensor]:
    import pickle

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise refused(
            folder, f"{file.name} holds more than tensors, or is damaged; convert it to safetensors"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(each, torch.Tensor) for each in loaded.values()
    ):
        raise refused(folder, f"{file.name} is no table of tensors; convert it to safetensors")
    return loaded


def check_verifier(folder: Path, named: str, target: TargetShape) -> None:
    """Raise ConfigError where the head says that it was made for another target."""
    made_for, served = named.rstrip("/").split("/")[-1], target.name.rstrip("/").split("/")[-1]
    if made_for and served and made_for.lower() != served.lower():
        raise refused(
            folder,
            f"it was made for {named!r}, the target is {target.name!r}; its drafts would hardly "
            "ever be accepted",
        )


def check_size(folder: Path, name: str, value: int, target_value: int) -> None:
    """Raise ConfigError where a size differs from the target's."""
    if value != target_value:
        raise refused(folder, f"its {name} is {value}, the target's {target_value}")


def refused(folder: Path, reason: str) -> ConfigError:
    """The error that says why a folder is no head for this target."""
    return ConfigError(f"draft head {folder}: {reason}", param="model")


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
