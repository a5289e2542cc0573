"""The drafters that a request may have, by its own wish and its task class."""

from __future__ import annotations

from cluster.config.processes import RECORDER
from cluster.config.schema import Config
from cluster.core import Request
from cluster.draft.registry import has_laws


class Eligible:
    """Chooses them by one configuration."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._candidates = {each.replaces: name for name, each in config.rollouts.items()}

    def names(self, request: Request) -> tuple[str, ...]:
        """Return the drafters that the request and its task allow, best first."""
        allowed = request.speculation.drafters
        return self._config.drafters_of(request.task) if allowed is None else allowed

    def helpers(self, request: Request) -> tuple[str, ...]:
        """Return those of them that are to draft for it."""
        names = tuple(name for name in self.names(request) if self._may_help(name, request))
        if not request.params.is_coupled:
            return self._one_of(names)
        # Who may come to replace a drafter is one of the text's wherever that one is.
        candidates = [self._candidates[name] for name in names if name in self._candidates]
        return (*names, *(name for name in candidates if name not in names))

    def _may_help(self, name: str, request: Request) -> bool:
        """True if the drafter has anything to go by: one of a prediction, or of a grammar, costs
        nothing without it."""
        kind = self._config.drafters[name].kind
        params = request.params
        needed = {"prediction": params.prediction, "grammar": params.grammar, RECORDER: None}
        return bool(needed.get(kind, True))

    def _one_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the one drafter of a text under a textbook law: the first whose laws are believed,
        else the first."""
        drafters, residents = self._config.drafters, self._config.residents
        unproven = self._config.shadows.union(self._config.rollouts)
        able = [name for name in names if name not in unproven]
        able.sort(key=lambda name: not (name in residents and has_laws(drafters[name].kind)))
        return tuple(able[:1])
