"""The number of replicas that a deployment should have, by what its replicas say of themselves.

A pure function of numbers.  Ray Serve applies bounds and delays (`deployments.autoscaling`);
docs/autoscaling.md gives the rules and the reasons of the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cluster.records import frozen

# Of one replica, by the names below; one that does not know a number leaves it out.
Statistics = Mapping[str, float]

# Texts that the replica has, those that it takes at most, and those for which there was no place at
# any replica, which each of them is told.
TEXTS, PLACES, WAITING = "texts", "places", "waiting"
# Tokens per second that the trees of all replicas bring, and those that one must bring, 0 = any.
WORTH, PRICE = "worth", "price"
# Shares: of one core, of the KV pages, of the commits that came before the tree for the one before.
CPU, KV_USE, LATE = "cpu", "kv_use", "late"

# The mean of each share at which the replicas have as much to do as they should, and how one is
# told.
_SHARES = {
    CPU: (0.7, "{:.0%} of a core in use"),
    KV_USE: (0.9, "{:.0%} of the KV pages in use"),
    LATE: (0.5, "{:.0%} of the trees late"),
}
# A share says that there is too much, not how much: at most so many times the replicas follow.
_MOST = 2.0
# More replicas begin above so many times the fair load, fewer below this share of it with one less.
_TOLERANCE, _SPARE = 1.1, 0.7
# One more replica must bring so many times its price.
_MARGIN = 1.25


@frozen
class Decision:
    """How many replicas there should be, and why."""

    num: int
    why: str


def decide(num: int, replicas: Sequence[Statistics]) -> Decision:
    """Return the decision for `num` replicas, which have said this."""
    load, why = max(_loads(replicas), key=lambda each: each[0], default=(0.0, "nothing is known"))
    wanted = num
    if load > _TOLERANCE:
        wanted = math.ceil(num * load)
    elif math.ceil(num * load / _SPARE) < num:
        wanted = num - 1
    price, worths = max(_said(replicas, PRICE), default=0.0), _said(replicas, WORTH)
    if price and worths:  # else no coordinator is there, and nothing is known
        worth = max(worths)
        paid = f"they bring {worth:.1f} tokens/s, and the price of one is {price:g}"
        if worth < price * num:
            wanted, why = num - 1, paid
        elif wanted > num and worth < _MARGIN * price * wanted:
            wanted, why = max(num, int(worth / (_MARGIN * price))), f"{why}, but {paid}"
    return Decision(max(wanted, 1), why)


def _loads(replicas: Sequence[Statistics]) -> list[tuple[float, str]]:
    """Return how many times the fair load there is, by every statistic, each in words."""
    found = []
    places = sum(each.get(PLACES, 0.0) for each in replicas)
    if places:
        texts = sum(each.get(TEXTS, 0.0) for each in replicas)
        waiting = max(each.get(WAITING, 0.0) for each in replicas)
        said = f"{texts:g} texts in {places:g} places, {waiting:g} waiting"
        found.append(((texts + waiting) / places, said))
    for name, (fair, told) in _SHARES.items():
        if values := _said(replicas, name):
            mean = sum(values) / len(values)
            found.append((min(mean / fair, _MOST), told.format(mean)))
    return found


def _said(replicas: Sequence[Statistics], name: str) -> list[float]:
    return [each[name] for each in replicas if name in each]
