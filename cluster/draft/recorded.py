"""Served answers on disk, one file each: the recorder writes them, `drafthouse train` reads them.

Token ids are text: whoever may read these files may read what was asked and answered.

A file is an uncompressed npz without pickles.  Its name says when it was written and how many
tokens it holds, so that bounds are kept without opening it:

    FOLDER/TENANT/NANOSECONDS-TOKENS-RANDOM.npz
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.core import TokenArray
from cluster.errors import ConfigError
from cluster.models.made_for import checkpoint_of
from cluster.records import frozen, record
from cluster.requests.fields import DEFAULT_TENANT

log = logging.getLogger(__name__)

FORMAT = "drafthouse-answer-1"

# The name of the requests without a salt or key among the tenants' digests.
UNSALTED = "unsalted"
_TENANT = re.compile(rf"{UNSALTED}|[0-9a-f]{{32}}")
_NAME = re.compile(r"(\d{20})-(\d+)-[0-9a-f]{8}\.npz(\.unfinished)?")


@frozen
class Origin:
    """The target that wrote the answers.  model_hash: as it is served."""

    model_hash: str
    tokenizer_hash: str
    vocab_size: int


@record
class RecordedAnswer:
    """One answer with the laws by which it was drawn.

    prompt: all tokens before the first recorded law.  token_ids: int32[n], a stop token included.
    candidates: int32[n, k], the most probable tokens at each place, best first.  log_probs:
    float16[n, k], at temperature 1.  is_accepted: bool[n], those that were drafts.
    law, temperature: the request's; 0 = greedy.

    rejected_*: drafts that were wrong, with the target's law behind each.  places: int32[m], the
    index of the answer's token that a node was a guess for.  parents: int32[m], a node among these,
    or -1 = the answer up to the place.  token_ids: int32[m].  candidates, log_probs: [m, k].
    """

    prompt: TokenArray
    token_ids: TokenArray
    candidates: TokenArray
    log_probs: NDArray[np.float16]
    is_accepted: NDArray[np.bool_]
    rejected_places: TokenArray
    rejected_parents: TokenArray
    rejected_token_ids: TokenArray
    rejected_candidates: TokenArray
    rejected_log_probs: NDArray[np.float16]
    law: str
    temperature: float

    @property
    def num_tokens(self) -> int:
        """All ids that are kept."""
        return sum(map(len, (self.prompt, self.token_ids, self.rejected_token_ids)))

    @property
    def first_rejected(self) -> TokenArray:
        """The places where a step's drafts ended because the target drew another token: int32[n]"""
        hanging = self.rejected_places[self.rejected_parents < 0]
        places = np.unique(hanging[hanging < len(self.token_ids)])
        return places[~self.is_accepted[places]]


# Of each array of an answer the numbers, and its shape: p and n tokens, m nodes, k candidates.
ARRAYS: Mapping[str, tuple[type[np.generic], str]] = {
    "prompt": (np.int32, "p"),
    "token_ids": (np.int32, "n"),
    "candidates": (np.int32, "nk"),
    "log_probs": (np.float16, "nk"),
    "is_accepted": (np.bool_, "n"),
    "rejected_places": (np.int32, "m"),
    "rejected_parents": (np.int32, "m"),
    "rejected_token_ids": (np.int32, "m"),
    "rejected_candidates": (np.int32, "mk"),
    "rejected_log_probs": (np.float16, "mk"),
}


def tenant_name(tenant: bytes) -> str:
    """The name of a tenant's folder."""
    return UNSALTED if tenant == DEFAULT_TENANT else tenant.hex()


def new_name(now_s: float, num_tokens: int) -> str:
    """The name of a file that is written now; those of several targets do not meet."""
    return f"{int(now_s * 1e9):020}-{num_tokens}-{secrets.token_hex(4)}.npz"


def written_s(name: str) -> float:
    """The time when a file of this name was written."""
    return int(name.partition("-")[0]) / 1e9


def tokens_in(name: str) -> int:
    """The tokens in a file of this name."""
    return int(name.split("-")[1])


class Folder:
    """The files of all tenants, each tenant's in a folder of its own that only its owner reads.

    Nothing is touched here whose name is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tenants(self) -> list[str]:
        return _names(self.path, _TENANT)

    def names(self, tenant: str) -> list[str]:
        return _names(self.path / tenant, _NAME)

    def put(self, tenant: str, name: str, data: bytes) -> None:
        folder = self.path / tenant
        for each in (self.path, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # it may have been there already
        unfinished = folder / f"{name}.unfinished"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as f:
            f.write(data)
        unfinished.replace(folder / name)

    def drop(self, tenant: str, names: Sequence[str]) -> None:
        """Delete these files, and the tenant's folder where it is empty then."""
        folder = self.path / tenant
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if pattern.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def encode(answer: RecordedAnswer, origin: Origin) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    said = {each.name: getattr(of, each.name) for of in (origin, answer) for each in fields(of)}
    np.savez(buffer, format=np.str_(FORMAT), **said)
    return buffer.getvalue()


def read_folder(folder: Path, origin: Origin) -> list[RecordedAnswer]:
    """All answers below `folder`, the oldest first: the recorder's folder, or one tenant's.

    Raises ConfigError for a file that is damaged, or not of this target, by its name.
    """
    paths = [path for path in folder.rglob("*.npz") if _NAME.fullmatch(path.name)]
    if not paths:
        raise ConfigError(f"{folder}: no recorded answers are here; see docs/learning.md")
    answers = []
    for path in sorted(paths, key=lambda path: path.name):
        try:
            answers.append(read_answer(path, origin))
        except FileNotFoundError:
            log.info("a recorded answer was deleted meanwhile path=%s", path)
    return answers


def read_answer(path: Path, origin: Origin) -> RecordedAnswer:
    """The answer in a file; raises ConfigError as `read_folder` does, and FileNotFoundError where a
    recorder has deleted it."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise _refused(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    if str(found.get("format")) != FORMAT:
        raise _refused(path, f"it is no {FORMAT}")
    try:
        answer = _answer(found)
        theirs = Origin(
            str(found["model_hash"]), str(found["tokenizer_hash"]), int(found["vocab_size"])
        )
    except (KeyError, ValueError, TypeError) as error:
        raise _refused(path, f"a part of it is missing or malformed ({error})") from error
    ours = (checkpoint_of(origin.model_hash), origin.tokenizer_hash, origin.vocab_size)
    if (checkpoint_of(theirs.model_hash), theirs.tokenizer_hash, theirs.vocab_size) != ours:
        shown = [each.model_hash.partition("|")[0][:12] for each in (theirs, origin)]
        reason = (
            "another target wrote it (hash {}, this one's is {}), whose laws teach nothing here"
        )
        raise _refused(path, reason.format(*shown), "name that target")
    if problem := _problem(answer, origin.vocab_size):
        raise _refused(path, problem)
    return answer


def _refused(path: Path, reason: str, remedy: str = "remove the file") -> ConfigError:
    return ConfigError(f"{path}: {reason}; {remedy}, or record anew")


def _answer(found: dict[str, NDArray[np.generic]]) -> RecordedAnswer:
    arrays: dict[str, Any] = {
        name: found[name].astype(dtype, casting="same_kind") for name, (dtype, _) in ARRAYS.items()
    }
    return RecordedAnswer(law=str(found["law"]), temperature=float(found["temperature"]), **arrays)


def _problem(answer: RecordedAnswer, vocab_size: int) -> str:
    """Why an answer cannot be learned from, "" where it can."""
    length, parents = len(answer.token_ids), answer.rejected_parents
    sizes = {
        "p": len(answer.prompt),
        "n": length,
        "m": len(answer.rejected_token_ids),
        "k": answer.candidates.shape[-1],
    }
    for name, (_, letters) in ARRAYS.items():
        shape, expected = getattr(answer, name).shape, tuple(sizes[each] for each in letters)
        if shape != expected:
            return f"{name} has the shape {shape}, where {expected} is needed"
    if not length or not len(answer.prompt):
        return "it has no prompt or no answer"
    ids = (answer.prompt, answer.token_ids, answer.candidates, answer.rejected_token_ids)
    if any(each.size and not 0 <= each.min() <= each.max() < vocab_size for each in ids):
        return f"a token is outside the vocabulary 0..{vocab_size - 1}"
    if np.isnan(answer.log_probs).any() or (answer.log_probs > 0.1).any():
        return "log_probs has what is no log-probability"
    if (parents >= np.arange(len(parents))).any():
        return "a rejected node stands before its parent"
    return ""
