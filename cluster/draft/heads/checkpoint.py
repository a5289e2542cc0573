"""A draft head's folder: its configuration, its tensors, and what may be said against them.

Tensors are read from safetensors, or by `torch.load(weights_only=True)`: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cluster.errors import ConfigError
from cluster.records import frozen

# A head's keys stand in these in some folders.
_TABLES = ("dflash_config", "dspark_config", "eagle_config")
CPU, META = torch.device("cpu"), torch.device("meta")
# So many names in one message; a wrong file would name hundreds.
_MAX_NAMED = 6


@frozen
class HeadTarget:
    """The target that a head is read for: its sizes, which the head must fit.

    weight: gives its "embedding" or "output" weights, [vocab, hidden], for what a folder leaves
    out.  device: META to see whether a head would fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    weight: Callable[[str], torch.Tensor]
    device: torch.device = CPU


@dataclass(slots=True)
class Tensors:
    """The tensors of a folder, taken one by one; what nobody has taken is left over.

    target: whose head it is; on META, only their shapes were read."""

    folder: Path
    held: dict[str, torch.Tensor]
    target: HeadTarget
    missing: list[str] = field(default_factory=list)

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of that name and shape.

        A missing one is noted for `fill`, which names them all; raises ConfigError for another
        shape.
        """
        tensor = self.held.pop(name, None)
        if tensor is None:
            self.missing.append(name)
            return torch.zeros(*shape, device=self.target.device)
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

    def take_or_share(
        self, name: str, ids: torch.Tensor, hidden_size: int, shared: str
    ) -> torch.Tensor:
        """The tensor of that name, a row for each of these ids of the target, or these rows of the
        target's `shared` weight where the file has none."""
        own = self.take_if_there(name, (len(ids), hidden_size))
        if own is not None:
            return own
        found = self.target.weight(shared)
        if found.shape[1] != hidden_size:
            raise refused(
                self.folder,
                f"it has no {shared} weights, and its hidden size {hidden_size} is not the "
                f"target's {found.shape[1]}",
            )
        # All of them are the target's own memory.
        return found if torch.equal(ids, torch.arange(len(found))) else found[ids]

    def fill(
        self,
        head: nn.Module,
        given: Mapping[str, torch.Tensor],
        kept: Collection[str] = (),
        name_of: Callable[[str], str] = str,
    ) -> None:
        """Give a head its tensors, if they were read; raises ConfigError that names those missing
        and left over, if there are any.

        given: by the head's names, what is not taken as it stands.  kept: names of what the head
        has already.  name_of: what the folder calls a tensor of the head.
        """
        state = {
            name: self.take(name_of(name), tuple(tensor.shape))
            for name, tensor in head.state_dict().items()
            if name not in given and name not in kept
        }
        problems = []
        if self.missing:
            problems.append(f"it lacks {_names(self.missing)}")
        if self.held:
            problems.append(f"nothing is known of {_names(self.held)}")
        if problems:
            raise refused(self.folder, "; ".join(problems))
        if self.target.device != META:
            # What was made without memory is given that of the file's tensors.
            is_made = not any(each.is_meta for each in head.state_dict().values())
            head.load_state_dict({**state, **given}, strict=False, assign=not is_made)

    def token_map(self, size: int) -> torch.Tensor:
        """Target ids of a head's `size` outputs: `d2t` holds offsets, target id = i + d2t[i]."""
        offsets, vocab_size = self.take_if_there("d2t", (size,)), self.target.vocab_size
        self.take_if_there("t2d", (vocab_size,))  # says the same the other way round
        ids = torch.arange(size)
        if offsets is None:
            if size != vocab_size:
                raise refused(
                    self.folder,
                    f"its {size} tokens are not the target's {vocab_size}, and it has no "
                    "d2t to tell which they are",
                )
            return ids
        ids = ids + offsets.to(torch.int64)
        found = ids.tolist()
        if min(found) < 0 or max(found) >= vocab_size or len(set(found)) != size:
            raise refused(
                self.folder,
                "d2t does not lead to as many different tokens of the target; it must hold "
                "offsets: target id = i + d2t[i]",
            )
        return ids


class HeadConfig:
    """config.json of a head's folder; raises ConfigError where there is none.

    data: all of it.  words: lower-case architectures and speculators' kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = _read_json(folder)
        self.architectures = " ".join(map(str, self.data.get("architectures") or ()))
        self.is_speculators = "speculators_model_type" in self.data
        kind = self.data.get("speculators_model_type", "")
        self.words = f"{self.architectures} {kind}".lower()

    @property
    def layers(self) -> Mapping[str, Any]:
        """The part that is about the layers, in the authors' or speculators' form."""
        own = self.data.get("transformer_layer_config") if self.is_speculators else self.data
        if not isinstance(own, Mapping):
            raise self.refused("config.json has no transformer_layer_config")
        return own

    def said(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that has one, at the top or in a table."""
        tables = (self.data, *(self.data.get(name) for name in _TABLES))
        for key, table in product(keys, tables):
            if isinstance(table, Mapping) and table.get(key) is not None:
                return table[key]
        return default

    def sizes(self, layers: Any, target: HeadTarget) -> tuple[int, int]:
        """The target's hidden size and the tokens that the head writes; raises ConfigError where
        the folder is of another target.  layers: what it says of its own layers."""
        vocab_size = self.layers.get("vocab_size", target.vocab_size)
        hidden_size = self.said("target_hidden_size") or layers.hidden_size
        self.size("vocab_size", vocab_size, target.vocab_size)
        hidden_size = self.size("target_hidden_size", hidden_size, target.hidden_size)
        return hidden_size, int(self.said("draft_vocab_size") or vocab_size)

    def size(self, name: str, value: Any, target_value: int) -> int:
        """A size, as a number; raises ConfigError where it differs from the target's."""
        if int(value) != target_value:
            raise self.refused(f"its {name} is {int(value)}, the target's {target_value}")
        return target_value

    def taps(self, found: Iterable[Any], target: HeadTarget) -> tuple[int, ...]:
        """Raises ConfigError for taps that the target has not."""
        taps = tuple(map(int, found))
        outside = [tap for tap in taps if not 0 <= tap <= target.num_layers]
        if outside:
            raise self.refused(
                f"it taps layers {outside}; the target has {target.num_layers} layers"
            )
        return taps

    @property
    def proposed(self) -> int | None:
        """The number of tokens that speculators' default method, or the first, proposes."""
        said = self.data.get("speculators_config") or {}
        methods = said.get("proposal_methods") or [{}]
        default = said.get("default_proposal_method")
        chosen = [each for each in methods if each.get("proposal_type") == default] or methods
        return chosen[0].get("speculative_tokens")

    def refused(self, reason: str) -> ConfigError:
        """The error that says why a folder is no head for this target."""
        return refused(self.folder, reason)


def _read_json(folder: Path) -> dict[str, Any]:
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


def read_tensors(folder: Path, rename: Callable[[str], str], target: HeadTarget) -> Tensors:
    """Every tensor of a folder's weights, under the names that `rename` gives them.

    target: on META only the vocabulary maps hold values; the others are shapes, for which of
    safetensors the files' headers are enough."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found.update(held_in(file, target.device))
        except (OSError, SafetensorError) as error:
            raise refused(folder, f"{file.name} is damaged ({error})") from error
    for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]) if not found else ():
        for name, tensor in _load_torch(folder, file).items():
            found[name] = tensor if _is_map(name) else tensor.to(target.device)
    if not found:
        raise refused(folder, "it has no weights (*.safetensors, *.bin or *.pt)")
    return Tensors(folder, {rename(name): each for name, each in found.items()}, target)


def held_in(file: Path, device: torch.device, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a file whose names begin so; on another device than the CPU shapes alone."""
    with safe_open(file, framework="pt") as held:
        return {
            name: held.get_tensor(name)
            if _is_map(name) or device == CPU
            else torch.empty(held.get_slice(name).get_shape(), device=device)
            for name in held.keys()  # noqa: SIM118 - the file is no mapping
            if name.startswith(prefix)
        }


def _is_map(name: str) -> bool:
    """True if a tensor says which tokens a head writes: those values are checked too."""
    return name.rpartition(".")[2] in ("d2t", "t2d", "token_map")


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


def refused(folder: Path, reason: str) -> ConfigError:
    """The error that says why a folder is no head for this target."""
    return ConfigError(f"draft head {folder}: {reason}", param="model")


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
