"""The coordinator's lines in the log: one every ten seconds while there is work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import Load, TextVerdict
from cluster.requests.plain_why import PlainWhy

log = logging.getLogger(__name__)

# As in vLLM.
_INTERVAL_S = 10.0


@dataclass(slots=True)
class Activity:
    """Counts since the last line, of what targets do: tokens behind a stop string count too.

    plain_steps: that could have had drafts, by their reason.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_spec_steps: int = 0
    num_accepted: int = 0
    plain_steps: Counter[PlainWhy] = field(default_factory=Counter)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def plain_share(self) -> str:
        """The plain steps among all that could have had drafts, with the reasons."""
        num_plain = self.plain_steps.total()
        share = num_plain / max(num_plain + self.num_spec_steps, 1)
        whys = [f"{why.name.lower()} {count}" for why, count in self.plain_steps.most_common()]
        return f"{share:.0%}" + (f" ({', '.join(whys)})" if whys else "")


class ActivityLog:
    """One line every ten seconds in which requests were served, as vLLM writes one."""

    def __init__(self, now: float) -> None:
        self.counts = Activity()
        self._since = now

    def note_step(self, verdict: TextVerdict) -> None:
        """One sequence's share of a step."""
        counts = self.counts
        counts.num_output_tokens += len(verdict.token_ids)
        if verdict.num_nodes:
            counts.num_spec_steps += 1
            counts.num_accepted += len(verdict.sources)
        elif verdict.why:
            counts.plain_steps[verdict.why] += 1

    def tick(self, now: float, own: Load, targets: Sequence[Load]) -> None:
        """Write the line if it is time for one; to be called twice a second or so.

        own: how busy the coordinator is.  targets: how busy they are.
        """
        elapsed_s = now - self._since
        if elapsed_s < _INTERVAL_S:
            return
        counts, self.counts, self._since = self.counts, Activity(), now
        num_requests = own.num_running + own.num_waiting
        if not (counts.num_prompt_tokens or counts.num_output_tokens or num_requests):
            return
        in_use = sum(each.pages_in_use for each in targets)
        total = sum(each.pages_total for each in targets)
        log.info(
            "running %d requests, waiting %d, prompt %.1f tokens/s, output %.1f tokens/s, "
            "mean acceptance length %.2f, plain steps %s, KV cache %.1f %%",
            own.num_running,
            own.num_waiting,
            counts.num_prompt_tokens / elapsed_s,
            counts.num_output_tokens / elapsed_s,
            counts.mean_acceptance_length,
            counts.plain_share,
            100.0 * in_use / total if total else 0.0,
        )
