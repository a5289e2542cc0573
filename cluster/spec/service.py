"""Serves texts that are to reach a speed: grants them nodes, and lets them raise the price of time.

Before the nodes of a step are chosen by what they bring, a text that would fall behind its rate
gets its best ones.  While it is behind all the same, seconds cost more: the other nodes of the
step, which make it longer, must bring more.  Everything here is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.spec.budget import Prices
from cluster.spec.forest import Floats, Indices
from cluster.spec.step_cost import NODE_EDGES

# A second costs a text that is behind so many times the tokens of its rate.
_LATE_PRICE = 5.0
# A rate up to so many times plain decoding's is in reach of it, for its speed is an estimate.
_PLAIN = 1.02
# Texts are to be so many times as fast as their rates, for not all expectations come true.
AIM = 1.01
# A text may make up for so many tokens in one step.
_MADE_UP = 1.0
# A text that is more tokens behind is not served: its rate is out of reach, and would cost others
# their drafts for nothing.
_GIVEN_UP = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """The speeds that the texts of a batch are to have.

    rates: float64[texts], tokens per second, 0 = none.  lags: float64[texts], the tokens that each
    text is behind its rate of late.
    """

    rates: Floats
    lags: Floats

    def price(self, weights: Floats, plain_s: float) -> float:
        """Return the weighted tokens that a second costs the texts that are behind.

        plain_s: the time of a plain step.  A rate that plain decoding does not reach takes drafts:
        shorter steps would not help, and may come of fewer drafts.
        """
        is_behind = (self.lags > 0.0) & (self.lags <= _GIVEN_UP)
        is_behind &= self.rates * plain_s <= _PLAIN
        return _LATE_PRICE * float((weights * self.rates)[is_behind].sum())

    def grants(
        self, tokens: Floats, prices: Prices, plain_s: float, most_s: float
    ) -> tuple[Indices, int]:
        """Return (how many of its best nodes each text is granted, the texts that are not served).

        A text gets its best nodes until the expected tokens of the step are what its rate demands
        of the round, which all grants make longer.  If its nodes cannot bring that, it gets none;
        of those that only the grants of others hinder, first the one that needs most.

        tokens: float64[texts, n + 1], the tokens that its best 0 to n nodes are expected to bring,
        the target's own included.  plain_s: the time of the round without any node.  most_s: the
        time that all grants may add.
        """
        is_served = (self.rates > 0.0) & (self.lags <= _GIVEN_UP)
        owed, total = np.minimum(self.lags, _MADE_UP), 0
        while True:
            round_s = plain_s + float(np.interp(total, NODE_EDGES, prices.extra_s))
            needed = np.where(is_served, AIM * self.rates * round_s + owed, 0.0)
            counts: Indices = (tokens < needed[:, None]).sum(axis=1)
            fails = counts == tokens.shape[1]
            wanted = int(counts.sum())
            if not fails.any() and np.interp(wanted, NODE_EDGES, prices.extra_s) > max(most_s, 0.0):
                fails[counts.argmax()] = True
            if fails.any():
                if total:  # perhaps only because of others' grants
                    fails &= needed == needed.max(where=fails, initial=0.0)
                is_served &= ~fails
                total = 0
            elif wanted == total:
                return counts, int((self.rates > 0.0).sum() - is_served.sum())
            else:
                total = wanted
