"""The guard: speculation may lose only what it has earned, and a little more.

In any stretch of rounds that it has watched,

    total time <= (1 + slowdown) * plain-equivalent time + allowance + overshoot

plain-equivalent: what plain decoding would have taken for the tokens that were emitted.
overshoot: by how much the dearest round exceeded what the guard had been told to expect.

Proof.  The balance is what may still be lost.  A round moves it by (1 + slowdown) * plain - time
and it is cut at the allowance, so over any stretch time - (1 + slowdown) * plain is at most the
balance at its start, which is the allowance or less, minus the balance at its end.  A speculative
round starts only if its expected extra time is within the balance, and emits at least what a plain
step would, so it cannot end below minus its overshoot; a plain round never lowers a balance below
zero.  A round is plain that verifies nothing, waits for nothing and lets no resident draft.
"""

from __future__ import annotations


class DeficitGuard:
    """The account of a target under one law at one load.

    slowdown: share of plain decoding's time that speculation may cost for good.
    slack_steps: the allowance, in plain steps, which makes it fit any model.  Gains beyond it are
    not saved up: a long success pays for no long failure.
    """

    __slots__ = ("_allowance_s", "_balance_s", "_slack_steps", "_slowdown")

    def __init__(self, slowdown: float, slack_steps: float) -> None:
        self._slowdown = slowdown
        self._slack_steps = slack_steps
        self._allowance_s = 0.0
        self._balance_s: float | None = None  # None before the first round

    @property
    def deficit_s(self) -> float:
        """Seconds lost to speculation and not regained: the allowance less the balance."""
        return 0.0 if self._balance_s is None else self._allowance_s - self._balance_s

    def max_extra_s(self, step_s: float) -> float:
        """By how much longer than a plain step of step_s a round may be risked to take.

        Below zero once the account is overdrawn: not even what is expected to cost nothing is
        risked then.
        """
        return self._slack_steps * step_s if self._balance_s is None else self._balance_s

    def settle(
        self, time_s: float, plain_s: float, step_s: float, *, is_plain: bool = False
    ) -> None:
        """A round took time_s; its tokens would have taken plain_s, one plain step step_s.

        is_plain: what it took beyond plain_s was noise, or somebody else's doing; that is charged
        as far as there is a balance, or the machine's troubles would end speculation for good.
        """
        self._allowance_s = self._slack_steps * step_s
        balance_s = self._allowance_s if self._balance_s is None else self._balance_s
        former_s = balance_s
        balance_s += (1.0 + self._slowdown) * plain_s - time_s
        if is_plain:
            balance_s = max(balance_s, min(former_s, 0.0))
        self._balance_s = min(balance_s, self._allowance_s)
