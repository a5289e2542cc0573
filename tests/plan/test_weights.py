"""Of several drafters of one token the one whose drafts have been worth most is named first."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import TokenTree, token_array
from cluster.plan.offers import gather, in_flight_of
from cluster.plan.texts import HeldTree, Text
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.credit import owners
from cluster.spec.held_trees import Fate, Seen
from cluster.spec.token_log import TokenLog

GROUP = ("default", False)
TREE = TokenTree.chain([7, 8])


def taught() -> AcceptanceModel:
    """Of two drafters: one has always been right, the other never."""
    acceptance = AcceptanceModel()
    for drafter, followed in (("weak", [1, 2]), ("strong", [7, 8])):
        for _ in range(64):
            seen = Seen(drafter, GROUP, 3, TREE, np.array([0.9, 0.8], np.float32))
            acceptance.learn([Fate(seen, token_array(followed))])
    return acceptance


@pytest.mark.parametrize("names", [("weak", "strong"), ("strong", "weak")])
def test_the_weightier_drafter_comes_first_whoever_sent_first(names: tuple[str, str]) -> None:
    text = Text("r", GROUP, TokenLog(token_array([1, 2, 3])))
    text.names = ("weak", "strong")
    claims = {"strong": [0.9, 0.8], "weak": [0.5, 0.25]}
    for name in names:
        survival = np.array(claims[name], np.float32)
        text.held[name] = HeldTree(3, 3, TREE, survival)
    offers = gather([text], taught())
    assert offers is not None
    (in_flight,) = in_flight_of([text], offers, np.array([0, 1]))
    assert in_flight.sources.tolist() == [0b11, 0b11]
    assert [text.names[place] for place in text.by_weight()] == ["strong", "weak"]
    strong = text.names.index("strong")
    assert owners(in_flight.sources.tolist(), text.by_weight()) == [strong, strong]
