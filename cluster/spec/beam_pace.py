"""Decides step by step if a beam search drafts: where drafts bring more than their rows cost."""

from __future__ import annotations

import math

from cluster.spec.step_profile import StepProfile

# Nodes per beam, and their share of what the largest number brings: SmolLM2's searches of four
# beams make 1.14 to 1.6 steps of a forward with four nodes, and 1.3 to 2 with eight.
_SIZES = ((1, 0.55), (2, 1.0))
# Steps beyond the first that a forward with the most nodes brings, before any is seen; and the
# weight of the newest forward.
_FIRST_GAIN, _WEIGHT = 0.35, 0.15
# What drafts would have brought where all beams of a step without drafts would have been guessed.
_GUESSED_GAIN = 1.5
# What drafts cost on the host, whatever the model: choosing them, and taking in their laws.
_HOST_S = 0.0002
# A search may be slower by so many plain steps, and by so many per step, to see what drafts bring.
_SLACK, _SLACK_SHARE = 1.0, 0.01


class BeamPace:
    """The pace of one search.  Ask `num_nodes` before each forward, and tell `learn` after it."""

    def __init__(self, profile: StepProfile | None, max_nodes: int) -> None:
        """profile: of the target's steps, None = not measured, then it always drafts.
        max_nodes: of one forward."""
        self._profile = profile
        self._max_nodes = max_nodes
        self._gain = _FIRST_GAIN
        self._share = self._cost = 0.0  # of the last forward's drafts; 0 = it had none
        # Plain steps that drafts have cost so far beyond the steps that they brought.
        self._lost, self._is_trying = 0.0, True
        self._num_steps = self._num_guessed = 0

    def num_nodes(self, num_beams: int, num_beside: int, texts_beside: int) -> int:
        """Return the number of nodes to draft.

        num_beside: rows of other texts in the step.  texts_beside: how many texts they are; the
        step takes longer for them too."""
        choices = []
        for per_beam, share in _SIZES:
            nodes = min(per_beam * num_beams, self._max_nodes)
            cost = (1 + texts_beside) * self._added(num_beside + num_beams, nodes)
            choices.append((math.log1p(self._gain * share) - math.log1p(cost), nodes, share, cost))
        worth, nodes, self._share, self._cost = max(choices)
        headroom = _SLACK + _SLACK_SHARE * self._num_steps - self._lost
        self._is_trying = headroom > 0.0 and (self._is_trying or headroom >= _SLACK)
        if nodes and (self._is_trying or (worth > 0.0 and headroom > 0.0)):
            return nodes
        self._share = self._cost = 0.0
        return 0

    def _added(self, rows: int, nodes: int) -> float:
        """Return the time that nodes add to a step, in that of the step without them."""
        if self._profile is None:
            return 0.0
        plain_s, drafted_s = self._profile.at([rows, rows + nodes]).tolist()
        return float((drafted_s + _HOST_S) / plain_s) - 1.0

    def learn(self, num_steps: int, num_guessed: int) -> None:
        """Learn from a forward.

        num_steps: of the whole search so far.  num_guessed: those whose beams all would have been
        guessed; so forwards without drafts show what drafts would bring."""
        made, guessed = num_steps - self._num_steps, num_guessed - self._num_guessed
        self._num_steps, self._num_guessed = num_steps, num_guessed
        gain = (made - 1) / self._share if self._share else _GUESSED_GAIN * guessed
        self._gain += _WEIGHT * (gain - self._gain)
        if self._share:
            self._lost = max(self._lost + self._cost - (made - 1), 0.0)
