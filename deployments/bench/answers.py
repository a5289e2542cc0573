"""What a client notes of one answer, and the figures of many: a pure function of their times.

The definitions are those of `vllm bench serve`, and so are the figures' names, so that what reads
its results reads ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from cluster.records import frozen

# Bounds that a good answer keeps, by their names in --goodput, and what they bound.
GOODPUT: Mapping[str, Callable[[TimedAnswer], float]] = {
    "ttft": lambda answer: 1e3 * answer.ttft_s,
    "tpot": lambda answer: 1e3 * (answer.tpot_s or 0.0),
    "e2el": lambda answer: 1e3 * answer.e2e_s,
}
_PERCENTILES = (95, 99)


@frozen
class TimedAnswer:
    """One request as its client saw it.  All times are seconds of one clock.

    prompt: its place among the prompts.  unit: of what is compared, both sides of which were asked
    one right after the other.  arrivals_s: when each piece of the answer came, which may
    be several tokens.  late_s: how much later than planned it was sent.  error: why it failed.
    """

    prompt: int
    sent_s: float
    arrivals_s: tuple[float, ...] = ()
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    text: str = ""
    late_s: float = 0.0
    error: str = ""
    unit: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is none."""
        num_later = self.num_tokens - 1
        return (self.e2e_s - self.ttft_s) / num_later if num_later > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between two pieces of the answer, whatever number of tokens they bring."""
        return [later - sooner for sooner, later in pairwise(self.arrivals_s)]


def figures(
    answers: Sequence[TimedAnswer], duration_s: float, goodput: Mapping[str, float]
) -> dict[str, float]:
    """The figures of one run by the names of `vllm bench serve`; times in milliseconds.

    duration_s: from before the first request to after the last answer.  goodput: bounds in
    milliseconds by the names of GOODPUT; an answer within all of them is good.  A time that no
    answer has is missing.
    """
    good = [answer for answer in answers if not answer.error]
    prompt_tokens = sum(answer.num_prompt_tokens for answer in good)
    tokens = sum(answer.num_tokens for answer in good)
    found: dict[str, float] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": tokens / duration_s,
        "total_token_throughput": (prompt_tokens + tokens) / duration_s,
    }
    if goodput:
        kept = [all(GOODPUT[name](each) <= most for name, most in goodput.items()) for each in good]
        found["request_goodput"] = sum(kept) / duration_s
    times = {
        "ttft": [each.ttft_s for each in good],
        "tpot": [each.tpot_s for each in good if each.tpot_s is not None],
        "itl": [value for each in good for value in each.itl_s],
        "e2el": [each.e2e_s for each in good],
    }
    for name, values in times.items():
        if values:
            found |= _spread(name, 1e3 * np.array(values))
    return found


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    found = {f"mean_{name}_ms": np.mean(values), f"median_{name}_ms": np.median(values)}
    found |= {f"p{share}_{name}_ms": np.percentile(values, share) for share in _PERCENTILES}
    return {key: float(value) for key, value in found.items()}
