"""The tokens that a draft model of another vocabulary shares with the target, found by their bytes.

The model writes these alone (TLI: Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies"), and reads all texts, since any
bytes can be written in its own tokens.  Its tokens are numbered anew: first those that are shared,
in the order of the target's ids, then all others, which it only reads.  So noise, ranking and
growth work as for a draft vocabulary that is a part of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from cluster.core import TokenArray, token_array
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.token_bytes import TokenBytes, unfinished_len
from cluster.spec.token_log import TokenLog

Specials = Literal["text", "drop"]

_REMEDY = "use a draft model with the target's tokenizer"
# So many tokens that together end inside a character are read as broken bytes.
_MAX_WAITING = 4
# In place of a number of tokens that wait: nothing waits, but the last bytes could not be read.
_LOST = -1


def tokenizers(target: Path, draft: Path) -> tuple[TokenBytes, TokenBytes]:
    """Of the models in two folders; raises ConfigError, with the remedy, for one of no use."""
    folder = target
    try:
        theirs = TokenBytes.load(folder)
        folder = draft
        return theirs, TokenBytes.load(folder)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error.message}; {_REMEDY}") from error


def _pairs(target: TokenBytes, draft: TokenBytes) -> dict[int, int]:
    """The draft id of each of the target's ids that means the same, no id twice."""
    drafts, targets = _by_bytes(draft), _by_bytes(target)
    pairs = {targets[data]: drafts[data] for data in targets.keys() & drafts.keys()}
    same = target.marks.keys() & draft.marks.keys()
    marks = {target.marks[each]: draft.marks[each] for each in same}
    for theirs, ours in _ends(target, draft, marks):
        marks = {token: own for token, own in marks.items() if own != ours} | {theirs: ours}
    return pairs | marks


def _ends(target: TokenBytes, draft: TokenBytes, marks: dict[int, int]) -> list[tuple[int, int]]:
    """Pairs of marks that end texts, of those that have no such equal by their spelling.

    Those that the other vocabulary has no mark of that spelling for come first: beside a mark of
    their own for the end of a turn, many vocabularies have a common one for the end of a document.
    """
    paired = {each: marks[each] for each in target.ends if marks.get(each) in draft.ends}
    theirs = [each for each in target.ends if each not in paired]
    ours = [each for each in draft.ends if each not in paired.values()]
    theirs.sort(key=lambda each: each in marks)
    ours.sort(key=lambda each: each in marks.values())
    return list(zip(theirs, ours, strict=False))


def _by_bytes(vocabulary: TokenBytes) -> dict[bytes, int]:
    """The lowest id of each token with bytes."""
    found: dict[bytes, int] = {}
    for index, data in enumerate(vocabulary.bytes_of):
        if data:
            found.setdefault(data, index)
    return found


class Intersection:
    """What two vocabularies share.  Reads texts of the target's tokens in the draft model's, as
    they are numbered anew.

    vocabulary: of the columns that the model writes.  order: int64[draft_size], the model's own id
    of each id in the new numbering."""

    def __init__(
        self,
        target: TokenBytes,
        draft: TokenBytes,
        target_size: int,
        draft_size: int,
        specials: Specials,
    ) -> None:
        """target_size, draft_size: of the models' own, which may be padded.  Raises ConfigError
        where they share nothing."""
        if len(draft.bytes_of) > draft_size:
            told = f"its tokenizer has {len(draft.bytes_of)} tokens, its model {draft_size}"
            raise ConfigError(f"{told}; {_REMEDY}")
        pairs = _pairs(target, draft)
        if not pairs:
            raise ConfigError(f"its tokenizer shares no token with the target's; {_REMEDY}")
        self.target, self.draft = target, draft
        target_ids = np.array(sorted(pairs), np.int32)
        written = np.array([pairs[each] for each in target_ids.tolist()], np.int64)
        self.order = np.concatenate((written, np.setdiff1d(np.arange(draft_size), written)))
        columns = np.zeros(max(target_size, len(target.bytes_of)), np.int32)
        columns[target_ids] = np.arange(len(target_ids))
        self.vocabulary = DraftVocabulary(target_ids, columns, target.hash)
        self._places = np.empty(draft_size, np.int64)
        self._places[self.order] = np.arange(draft_size)
        self._opening = self._numbered(draft.opening)
        shared = {token: [column] for column, token in enumerate(target_ids.tolist())}
        self._marks = {
            token: shared[token] if token in shared else self._spelled(mark, specials)
            for mark, token in target.marks.items()
        }
        # Texts begin and end, whatever the marks of that are called.
        openings = zip(target.opening[-1:], draft.opening[-1:], strict=False)
        for theirs, ours in (*openings, *zip(target.ends, draft.ends[:1], strict=False)):
            if theirs not in shared:
                self._marks[theirs] = self._numbered([ours])
        # Those that are read alike wherever they stand.
        self._alone = self._marks | shared

    @property
    def share(self) -> float:
        """Of the target's tokens, those that the model can write."""
        num_tokens = len(self.target.marks) + sum(map(bool, self.target.bytes_of))
        return len(self.vocabulary.target_ids) / num_tokens

    def _numbered(self, draft_ids: Sequence[int]) -> list[int]:
        return self._places[list(draft_ids)].tolist()

    def _spelled(self, mark: str, specials: Specials) -> list[int]:
        return self._numbered(self.draft.write(mark.encode())[0]) if specials == "text" else []

    def opened(self, token_ids: Sequence[int]) -> tuple[list[int], int, int]:
        """Read the beginning of a text whole, but for the last tokens where they end inside a
        character; returns the draft ids, how many tokens were left out, and 0 or `_LOST`."""
        ends = range(len(token_ids), max(len(token_ids) - _MAX_WAITING, 0), -1)
        end = next((each for each in ends if not self._is_inside(token_ids[:each])), len(token_ids))
        ids, state = self.together(token_ids[:end])
        opening = self._opening
        ids = ids if ids[: len(opening)] == opening else opening + ids
        return ids, len(token_ids) - end, state

    def _is_inside(self, token_ids: Sequence[int]) -> bool:
        """True if these tokens end inside a character."""
        is_over = token_ids[-1] in self._marks
        return not is_over and unfinished_len(self.target.decode(token_ids[-_MAX_WAITING:])) > 0

    def after(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Read tokens that waited, if any, and one more; returns the draft ids, and how many tokens
        wait, or `_LOST`."""
        if len(token_ids) == 1 and token_ids[0] in self._alone:
            return self._alone[token_ids[0]], 0
        if len(token_ids) < _MAX_WAITING and self._is_inside(token_ids):
            return [], len(token_ids)
        return self.together(token_ids)

    def together(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Read tokens, the bytes between marks together; returns the draft ids, and 0, or `_LOST`
        where the last of these bytes are not among them."""
        ids: list[int] = []
        state, start = 0, 0
        marks = [place for place, token in enumerate(token_ids) if token in self._marks]
        for place in (*marks, len(token_ids)):
            data = self.target.decode(token_ids[start:place])
            if data:
                written, is_all = self.draft.write(data)
                ids += self._numbered(written)
                state = 0 if is_all else _LOST
            if place < len(token_ids):
                ids += self._marks[token_ids[place]]
                state = 0
            start = place + 1
        return ids, state


# A text as the draft model reads it: by its tokens, by a part of them, or by another
# vocabulary's.
#
# Only the end of what was read is ever cut off: a text that goes on is read on.


class ReadText:
    """log: the tokens that the model reads.  Here they are as many as the text's."""

    def __init__(self, vocabulary: DraftVocabulary | None = None, vocab_size: int = 0) -> None:
        """vocabulary: the model's, if it is a part of the target's.  vocab_size: the model's; a
        token beyond it, for which nothing is drafted, is read as the last one."""
        self.log = TokenLog()
        self._vocabulary, self._vocab_size = vocabulary, vocab_size

    @property
    def is_behind(self) -> bool:
        """True if the end of the text could not be read yet: nothing can be drafted behind it."""
        return False

    @property
    def num_read(self) -> int:
        """Tokens of the text that were read."""
        return len(self.log)

    def len_at(self, length: int) -> int:
        """The model's tokens of the text's first `length` tokens."""
        return length

    def append(self, token_ids: TokenArray) -> None:
        """Read on."""
        own = self._vocabulary
        held = token_ids.clip(0, self._vocab_size - 1) if own is None else own.read(token_ids)
        self.log.append(held)

    def truncate(self, length: int) -> None:
        """Keep the text's first `length` tokens, or less: `num_read` says how many."""
        self.log.truncate(length)


class RewrittenText(ReadText):
    """The tokens of another vocabulary that have the text's bytes.

    What is read first, such as a prompt, is read as one text, and everything later token by token:
    a shared token as that, so that a tree's nodes are read one to one, any other one in as many of
    the model's as it takes.
    """

    def __init__(self, shared: Intersection) -> None:
        super().__init__()
        self._shared = shared
        self._forget()

    def _forget(self) -> None:
        self.log.truncate(0)
        self._tokens: list[int] = []
        # After each number of the text's tokens: the model's, and the state that was told.
        self._lens, self._states = [0], [0]

    @property
    def is_behind(self) -> bool:
        """True if the last tokens wait for the rest of a character, or could not be read."""
        return self._states[-1] != 0

    @property
    def num_read(self) -> int:
        """See `ReadText`; tokens that wait included."""
        return len(self._tokens)

    def len_at(self, length: int) -> int:
        """See `ReadText`; 0 inside of what was read as one text."""
        return self._lens[length]

    def append(self, token_ids: TokenArray) -> None:
        """See `ReadText`."""
        added = token_ids.tolist()
        if added and not self._tokens:
            ids, num_left, state = self._shared.opened(added)
            num_read = len(added) - num_left
            self._tokens, added = added[:num_read], added[num_read:]
            self._lens += [0] * (num_read - 1)
            self._states += [0] * (num_read - 1)
            self._enter(ids, state)
        for token in added:
            self._tokens.append(token)
            waited = max(self._states[-1], 0)
            self._enter(*self._shared.after(self._tokens[-waited - 1 :]))

    def _enter(self, ids: list[int], state: int) -> None:
        self.log.append(token_array(ids))
        self._lens.append(len(self.log))
        self._states.append(state)

    def truncate(self, length: int) -> None:
        """See `ReadText`: what was read as one text is kept whole or not at all."""
        if length >= len(self._tokens):
            return
        self.log.truncate(self._lens[length])
        del self._tokens[length:], self._lens[length + 1 :], self._states[length + 1 :]
        if not len(self.log):
            self._forget()
