"""The drafters that a request may have, by its own wish and its task class."""

from __future__ import annotations

from cluster.config.processes import RECORDER
from cluster.config.schema import Config
from cluster.core import Request
from cluster.draft.registry import has_laws


def allowed_drafters(config: Config, request: Request) -> tuple[str, ...]:
    """Return the drafters that the request and its task allow, best first."""
    allowed = request.speculation.drafters
    return config.drafters_of(request.task) if allowed is None else allowed


def helpers(config: Config, request: Request) -> tuple[str, ...]:
    """Return those of them that are to draft for it."""
    drafters, params = config.drafters, request.params
    # One of a prediction, or of a grammar, costs nothing without it.
    needed = {"prediction": params.prediction, "grammar": params.grammar, RECORDER: None}
    names = tuple(
        name for name in allowed_drafters(config, request) if needed.get(drafters[name].kind, True)
    )
    if params.is_coupled:
        # Who may come to replace a drafter is one of the text's wherever that one is.
        followers = {each.replaces: name for name, each in config.rollouts.items()}
        return tuple(dict.fromkeys((*names, *filter(None, map(followers.get, names)))))
    # A text under a textbook law has one: the first whose laws are believed, else the first.
    unproven = config.shadows.union(config.rollouts)
    able = [name for name in names if name not in unproven]
    able.sort(key=lambda name: not (name in config.residents and has_laws(drafters[name].kind)))
    return tuple(able[:1])
