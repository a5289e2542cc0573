"""Rules of thumb for draft models, as warnings: none of them is a law, and a measurement stands
above all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.records import frozen
from deployments.memory_plan import Sized

_GUIDES = "guides to speculative decoding in production"
# The target's parameters, as a multiple of a drafter's.
_SMALLER = (5, 20)
_LEAST_PARAMETERS = 50_000_000
_MEMORY_SHARE = 0.3
_FASTER = 5.0


@frozen
class Warned:
    """A rule that a drafter does not meet.  found: what is so instead.  source: of the rule."""

    drafter: str
    rule: str
    found: str
    source: str


def warnings(
    models: Sequence[Sized], total_bytes: int, draft_token_cost: float | None
) -> list[Warned]:
    """Return the rules that draft models do not meet.

    models: of known size.  total_bytes: of its process.  draft_token_cost: the measured time
    of a draft token as a share of a step's; None = not measured, so bytes of weights stand for it.
    """
    return [
        Warned(drafter.name, rule, found, source)
        for target in models
        if not target.name
        for drafter in models
        if drafter.name
        for rule, found, source in _broken(target, drafter, total_bytes, draft_token_cost)
    ]


def _broken(
    target: Sized, drafter: Sized, total_bytes: int, draft_token_cost: float | None
) -> Iterator[tuple[str, str, str]]:
    smaller = target.num_parameters / drafter.num_parameters
    if not _SMALLER[0] <= smaller <= _SMALLER[1]:
        yield "{} to {} times smaller than the target".format(*_SMALLER), f"{smaller:.3g}", _GUIDES
    if drafter.num_parameters < _LEAST_PARAMETERS:
        found = f"{drafter.num_parameters / 1e6:.3g} M"
        yield f"at least {_LEAST_PARAMETERS / 1e6:.0f} M parameters", found, _GUIDES
    if drafter.memory > _MEMORY_SHARE * total_bytes:
        found = f"{drafter.memory / total_bytes:.0%}"
        yield f"at most {_MEMORY_SHARE:.0%} of the memory, its KV cache included", found, _GUIDES
    cost = drafter.weights / target.weights if draft_token_cost is None else draft_token_cost
    if cost * _FASTER > 1.0:
        by = "by bytes of weights" if draft_token_cost is None else "measured"
        yield f"at least {_FASTER:g} times faster", f"{1 / cost:.2g} times ({by})", _GUIDES
    if drafter.architecture != target.architecture:
        found = f"{drafter.architecture} for {target.architecture}"
        yield "of the target's family", found, _GUIDES
