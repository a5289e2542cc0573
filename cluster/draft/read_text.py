"""A text as the draft model reads it: by its tokens, by a part of them, or by another vocabulary's.

Only the end of what was read is ever cut off: a text that goes on is read on.
"""

from __future__ import annotations

from cluster.core import TokenArray, token_array
from cluster.draft.intersection import Reader
from cluster.draft.vocabulary import DraftVocabulary
from cluster.spec.token_log import TokenLog


class ReadText:
    """log: the tokens that the model reads.  Here they are as many as the text's."""

    def __init__(self, vocabulary: DraftVocabulary | None) -> None:
        """vocabulary: the model's, if it is a part of the target's."""
        self.log = TokenLog()
        self._vocabulary = vocabulary

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
        self.log.append(token_ids if own is None else own.read(token_ids))

    def truncate(self, length: int) -> None:
        """Keep the text's first `length` tokens, or less: `num_read` says how many."""
        self.log.truncate(length)


class RewrittenText(ReadText):
    """The tokens of another vocabulary that have the text's bytes.

    What is read first, such as a prompt, is read as one text, and everything later token by token:
    a shared token as that, so that a tree's nodes are read one to one, any other one in as many of
    the model's as it takes.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(None)
        self._reader = reader
        self._forget()

    def _forget(self) -> None:
        self.log.truncate(0)
        self._tokens: list[int] = []
        # After each number of the text's tokens: the model's, and what `Reader.alone` returns.
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
            ids, num_left, state = self._reader.opened(added)
            num_read = len(added) - num_left
            self._tokens, added = added[:num_read], added[num_read:]
            self._lens += [0] * (num_read - 1)
            self._states += [0] * (num_read - 1)
            self._enter(ids, state)
        for token in added:
            self._tokens.append(token)
            waited = self._states[-1]
            if waited > 0:
                self._enter(*self._reader.after(self._tokens[-waited - 1 :]))
            else:
                self._enter(*self._reader.alone(token))

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
