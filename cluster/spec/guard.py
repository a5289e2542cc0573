"""The guard bounds the time that speculation may lose against plain decoding.

From the first round on, and in any stretch of rounds,

    total time <= (1 + slowdown) * plain-equivalent time + balance at its start + overshoot

where the balance is the allowance at first, and at most SAVED allowances later.

plain-equivalent time: the time in which plain decoding would have emitted the same tokens.
overshoot: the greatest excess of a round's time over the time that the guard was told to expect.

Proof.  The balance is the time that may still be lost.  A round adds (1 + slowdown) * plain - time
to it, and it is capped, so over any stretch time - (1 + slowdown) * plain is at most the balance at
its start minus the balance at its end.  A speculative round starts only if its expected extra time
is within the balance, and it emits at least the tokens of a plain step, so the balance after it is
at least minus its overshoot.  A plain round never lowers a balance below zero.  A round is plain if
it verifies nothing and lets no resident draft.
"""

from __future__ import annotations

# Gains are saved up to so many allowances.  Drafts that gain a sixth on average lose in many
# rounds, often one after the other where models read new texts.  Four artificial texts on two
# cores were written 12 to 15 % slower with one allowance, and no faster without a guard.
SAVED = 4.0


class DeficitGuard:
    """The account of a target under one law at one load.

    slowdown: share of plain decoding's time that speculation may cost for good.
    slack_steps: the allowance in plain steps, a unit that fits any model.  Both may change.
    """

    def __init__(self, slowdown: float, slack_steps: float) -> None:
        self.slowdown = slowdown
        self.slack_steps = slack_steps
        self._allowance_s = 0.0
        self._balance_s: float | None = None  # None before the first round

    @property
    def deficit_s(self) -> float:
        """Seconds lost to speculation and not regained: the allowance less the balance."""
        return 0.0 if self._balance_s is None else max(self._allowance_s - self._balance_s, 0.0)

    def max_extra_s(self, step_s: float) -> float:
        """Return how much longer than a plain step of step_s a round may be expected to take.

        Below zero once the account is overdrawn: then not even a round without expected extra time
        may start.
        """
        return self.slack_steps * step_s if self._balance_s is None else self._balance_s

    def settle(
        self, time_s: float, plain_s: float, step_s: float, *, is_plain: bool = False
    ) -> None:
        """Enter a round of time_s, whose tokens plain decoding would have emitted in plain_s.

        step_s: the time of one plain step.  is_plain: then its time beyond plain_s was noise or had
        an outside cause.  It is charged only down to a balance of zero: otherwise a slow phase of
        the machine would end speculation for good.  What slowdown allows it fills the account with
        the allowance and no more.
        """
        self._allowance_s = self.slack_steps * step_s
        balance_s = self._allowance_s if self._balance_s is None else self._balance_s
        former_s = balance_s
        balance_s += (1.0 + self.slowdown) * plain_s - time_s
        most_s = SAVED * self._allowance_s
        if is_plain:
            balance_s = max(balance_s, min(former_s, 0.0))
            most_s = min(max(former_s, self._allowance_s), most_s)
        self._balance_s = min(balance_s, most_s)
