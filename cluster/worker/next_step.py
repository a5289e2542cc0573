"""The step behind the present one, where it begins before the host knows what this one draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.engine.work import Drawn, Output, Work
from cluster.worker.step_rows import Answered
from cluster.worker.target_sequence import BatchDraws
from cluster.worker.texts import TargetText

if TYPE_CHECKING:
    from cluster.engine.target_engine import Finish, TargetEngine


class NextStep:
    """Its texts bring a token each, which goes from the draw to the forward on the device.

    texts: those that have begun it, by their ids; outputs: its answers for them.
    """

    def __init__(self, engine: TargetEngine) -> None:
        self.texts: dict[str, TargetText] = {}
        self.outputs: dict[str, Output] = {}
        self._engine = engine
        self._works: dict[str, Work] = {}
        self._finish: Finish | None = None

    def taken(self) -> list[Output]:
        """Return its answers once, for it is the present one now."""
        outputs = list(self.outputs.values())
        self.texts, self.outputs, self._finish = {}, {}, None
        return outputs

    def begin(self, works: Sequence[Work], drawn: Drawn, taps: Sequence[int]) -> None:
        """Begin it, where the engine can.  works: their tokens are not known yet."""
        self._works = {work.request_id: work for work in works}
        self._finish = self._engine.run_ahead(works, drawn, taps)

    def end(self, answered: Sequence[Answered], draws: BatchDraws) -> None:
        """Tell it what was drawn.  A text has no part in it if another token was drawn on the host
        than on the device."""
        if not self._finish:
            return
        for sequence, _, verdict in answered:
            name, token = sequence.text.id, verdict.token_ids[-1]
            if name in self._works and draws.on_device[sequence.start] == token:
                self._works[name].delta[0] = token
                self.texts[name], sequence.is_pending = sequence.text, True
        outputs = self._finish(self._works.keys() - self.texts)
        self.outputs = {each.request_id: each for each in outputs if each.request_id in self.texts}

    def drop(self, request_id: str) -> None:
        """Forget a text, which the engine has released."""
        self.texts.pop(request_id, None)
        self.outputs.pop(request_id, None)
