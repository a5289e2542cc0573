"""How long each recorded text takes to decode beside others: the target's own planner says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.simulate.replay import Adaptive, Simulation
from cluster.simulate.world import Machine, Pool, RecordedText
from cluster.spec.tree import Floats

# Each text is played at least about so often.
_PASSES = 1.5
_SIZES = tuple(2**power for power in range(11))


class DecodeTimes:
    """Times by the number of texts at a target, each measured when it is first asked for.

    of: returns, for so many texts, the seconds from a text's first token to its last,
    float64[texts].

    Some sizes are replayed, step by step; between two of them times are interpolated.
    """

    def __init__(
        self,
        texts: Sequence[RecordedText],
        machine: Machine,
        pool: Pool,
        config: CoordinatorConfig,
        max_texts: int,
        seed: int = 0,
    ) -> None:
        """max_texts: the most at one target."""
        # Prompts cost what they cost by the profile: `cluster.simulate.fleet` adds it.
        self._texts = [replace(text, prompt_len=1) for text in texts]
        self._machine, self._pool, self._config = machine, pool, config
        self._seed = seed
        self._sizes = (*(edge for edge in _SIZES if edge < max_texts), max_texts)
        self.of = functools.cache(self._of)

    def _of(self, num_texts: int) -> Floats:
        above = next(size for size in self._sizes if size >= num_texts)
        below = max(size for size in self._sizes if size <= num_texts)
        if above == below:
            return self._replay(above)
        share = (num_texts - below) / (above - below)
        return (1.0 - share) * self.of(below) + share * self.of(above)

    def _replay(self, num_texts: int) -> Floats:
        lengths = np.array([len(text.token_ids) for text in self._texts], dtype=np.float64)
        # A pass takes at most what it would take without drafts, and each text ends once at least.
        tokens = max(lengths.sum() / num_texts, lengths.max())
        seconds = _PASSES * tokens * self._machine.step_s(num_texts, num_texts)
        simulation = Simulation(self._texts, self._machine, self._pool, num_texts)
        simulation.run(Adaptive(self._machine, self._pool, self._config), seconds, self._seed)
        # Each text's mean time, in the later plays where there are several.
        times: dict[int, list[float]] = {}
        for recorded, time_s in simulation.ended:
            times.setdefault(id(recorded), []).append(time_s)
        found = np.full(len(self._texts), np.nan)
        for index, text in enumerate(self._texts):
            if own := times.get(id(text)):
                found[index] = np.mean(own[len(own) // 3 :])
        is_known = ~np.isnan(found)
        token_s = found[is_known].sum() / (lengths[is_known] - 1.0).sum()
        return np.where(is_known, found, token_s * (lengths - 1.0))
