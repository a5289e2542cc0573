"""The coordinator's lines in the log: one every ten seconds while there is work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from cluster.coordinator.present import Answered
from cluster.messages import Load
from cluster.requests.plain_why import PlainWhy

log = logging.getLogger(__name__)

# As in vLLM.
_INTERVAL_S = 10.0


class ActivityLog:
    """One line every ten seconds in which requests were served, as vLLM writes one.

    It counts what targets do: tokens behind a stop string too.
    """

    def __init__(self, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_spec_steps = self._num_accepted = 0
        # Those that could have had drafts, by their reason.
        self._plain_steps: Counter[PlainWhy] = Counter()

    def hear(self, answers: Sequence[Answered]) -> None:
        """Count the shares of texts in steps."""
        for each in answers:
            session, verdict = each.session, each.verdict
            if session.is_scored:  # its tokens are a prompt's
                self._num_prompt_tokens += len(verdict.token_ids)
                continue
            if each.former_at is None:
                self._num_prompt_tokens += session.prompt_len
            self._num_output_tokens += len(verdict.token_ids)
            if verdict.num_nodes:
                self._num_spec_steps += 1
                self._num_accepted += len(verdict.sources)
            elif verdict.why:
                self._plain_steps[verdict.why] += 1

    def tick(self, now: float, own: Load, targets: Sequence[Load]) -> None:
        """Write the line if it is time for one; to be called twice a second or so.

        own: how busy the coordinator is.  targets: how busy they are.
        """
        elapsed_s = now - self._since
        if elapsed_s < _INTERVAL_S:
            return
        num_tokens = self._num_prompt_tokens + self._num_output_tokens
        if num_tokens or own.num_running + own.num_waiting:
            total = sum(each.pages_total for each in targets)
            log.info(
                "running %d requests, waiting %d, prompt %.1f tokens/s, output %.1f tokens/s, "
                "mean acceptance length %.2f, plain steps %s, KV cache %.1f %%",
                own.num_running,
                own.num_waiting,
                self._num_prompt_tokens / elapsed_s,
                self._num_output_tokens / elapsed_s,
                1.0 + self._num_accepted / max(self._num_spec_steps, 1),
                self._plain_share(),
                100.0 * sum(each.pages_in_use for each in targets) / max(total, 1),
            )
        self._begin(now)

    def _plain_share(self) -> str:
        """The plain steps among all that could have had drafts, with the reasons."""
        num_plain = self._plain_steps.total()
        share = num_plain / max(num_plain + self._num_spec_steps, 1)
        whys = [f"{why.name.lower()} {count}" for why, count in self._plain_steps.most_common()]
        return f"{share:.0%}" + (f" ({', '.join(whys)})" if whys else "")
