"""Chooses which works run in the next forward, and finds pages for them.

Decoding steps come first, in the order they were submitted; prefills get a reserved share of the
rows, in the order their requests arrived, cut into chunks.  The rows of prompts are bounded apart,
for the time that they take (`PromptPace`).  When pages run out, or places of sequences that hold
some, younger requests lose their caches; the oldest can take every page, so it always progresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cluster.config.schema import EngineConfig
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.prefix_cache import PagePool
from cluster.engine.memory.sequence import Sequence
from cluster.engine.paths import StepOutputs
from cluster.engine.schedule.batch import Pick
from cluster.engine.taps import Taps
from cluster.engine.work import Output, StepSummary
from cluster.records import record
from cluster.spec.step_profile import StepProfile
from cluster.spec.token_log import common_prefix_len

# A work that brings more tokens than these is a prefill; its tree says nothing of that.
_SHORT_ROWS = 64


@dataclass(slots=True)
class Schedule:
    """picks: what runs now.  answers: works that are over without running."""

    picks: list[Pick] = field(default_factory=list)
    answers: list[Output] = field(default_factory=list)
    num_rows: int = 0
    num_prompt_rows: int = 0
    num_preempted: int = 0
    num_prefix_hit_tokens: int = 0

    def summary(self, forward_time_s: float, step_time_s: float, taps: Taps | None) -> StepSummary:
        """The summary of the step that ran it."""
        return StepSummary(
            num_rows=self.num_rows,
            num_prefill_rows=sum(pick.num_delta for pick in self.picks if pick.is_prefill),
            num_prompt_rows=self.num_prompt_rows,
            num_sequences=sum(pick.completes for pick in self.picks),
            num_nodes=sum(pick.num_rows - pick.num_delta for pick in self.picks),
            num_preempted=self.num_preempted,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            forward_time_s=forward_time_s,
            step_time_s=step_time_s,
            taps=taps,
        )

    def told(self, pools: Iterable[PagePool]) -> list[object]:
        """What says which step this is, of things whose repr tells them whole: its rows, tokens,
        slots and answers, and the numbers of free and cached pages, which later steps depend on.

        Ranks schedule each for itself from the same calls.  Were one of them ever to hold another
        page, miss another prefix or cut another chunk, its forward would have other rows than its
        neighbours', and their collectives would hang or add up other tokens.  Picks must not be
        committed yet.  O(rows): contexts enter by their prefix hash and number of pages."""
        told: list[object] = [self.num_rows, self.num_preempted]
        told += [(pool.num_free, pool.num_idle) for pool in pools]
        for pick in self.picks:
            sequence, work = pick.sequence, pick.work
            length, tree = sequence.cached_len, work.tree
            stop = length + pick.num_delta + len(tree)
            told += [sequence.request_id, length, sequence.hash_at(length), sequence.num_pages]
            told += [pick.num_delta, pick.completes, work.num_cached_nodes, len(tree)]
            told += [pick.delta().tobytes()]
            told += [table.slots[length:stop].tobytes() for table in sequence.tables]
            if pick.completes:
                told += [tree.token_ids.tobytes(), tree.parents.tobytes()]
        return told + [(answer.request_id, answer.have_len) for answer in self.answers]


@record
class Launched:
    """A step on its way.  schedule: its picks are in the order of the rows.  found: a GPU may still
    be at it.  summary: with the host's times until it was launched."""

    schedule: Schedule
    found: StepOutputs
    summary: StepSummary

    def commit(self, owners: PageOwners, lost: Collection[str]) -> list[Output]:
        """Record what has been written, and answer the works that are over.

        lost: the requests whose works are to leave no trace; those that have been released leave
        none in any case."""
        picks, outputs = self.schedule.picks, self.schedule.answers
        sizes = [pick.num_logit_rows for pick in picks]
        for pick, rows in zip(picks, self.found.logits.split_with_sizes(sizes), strict=True):
            sequence, name = pick.sequence, pick.work.request_id
            if owners.sequences.get(name) is not sequence:
                continue
            if name in lost:
                sequence.work = None
                continue
            owners.commit(sequence, pick.delta())
            if not pick.completes:
                continue
            sequence.work = None
            sequence.tree = pick.work.tree
            top = pick.work.top(rows)
            outputs.append(Output(name, rows, top=top, num_cached=sequence.num_adopted))
        return outputs


class Scheduler:
    """Deterministic: equal calls in equal order give equal schedules, on every rank."""

    def __init__(self, page_owners: PageOwners, config: EngineConfig) -> None:
        self._pages = page_owners
        self._max_rows = config.max_batch_tokens
        self._page_size = config.page_size
        # Prefills get at least so many rows of every step, or decoding would starve them.
        self._prefill_rows = max(1, self._max_rows // 4)
        # The most rows of a work that runs in one piece beside decoding, in this step.
        self._short_rows = _SHORT_ROWS

    def schedule(self, waiting: list[Sequence], prompt_rows: int) -> Schedule:
        """Pick from the sequences with a pending work, given in order of submission.

        prompt_rows: at most so many rows of works that bring more than one token, at least 1."""
        schedule = Schedule()
        self._short_rows = min(_SHORT_ROWS, self._max_rows - self._prefill_rows, prompt_rows)
        short: list[Sequence] = []
        long: list[Sequence] = []
        for sequence in waiting:
            if self._open(sequence, schedule):
                kind = short if self._goes_with_decoding(sequence) else long
                kind.append(sequence)
        long.sort(key=lambda sequence: sequence.arrival)
        reserved = self._rows_for_prefill(long)
        short_prompt_rows = prompt_rows - min(reserved, prompt_rows // 4)
        for sequence in short:
            self._pick(sequence, self._max_rows - reserved, short_prompt_rows, schedule)
        for sequence in long:
            self._pick(sequence, self._max_rows, prompt_rows, schedule)
        return schedule

    def _goes_with_decoding(self, sequence: Sequence) -> bool:
        """False if it could never run beside the rows that are reserved for prefills."""
        fits = sequence.num_rows_left <= self._max_rows - self._prefill_rows
        return fits and sequence.num_delta_left <= self._short_rows

    def _open(self, sequence: Sequence, schedule: Schedule) -> bool:
        """True if the work may run; answers it where the cache lacks what it presumes."""
        work = sequence.work
        if work is None:  # preempted for an earlier one of this step
            return False
        if not sequence.is_open:
            have_len = self._pages.open(work, sequence)
            if have_len is not None:
                sequence.work = None
                schedule.answers.append(Output(sequence.request_id, have_len=have_len))
                return False
            sequence.is_open, sequence.num_adopted = True, 0
        return True

    def _rows_for_prefill(self, long: list[Sequence]) -> int:
        if not long:
            return 0
        rows = min(self._prefill_rows, sum(sequence.num_rows_left for sequence in long))
        first = long[0]
        if first.num_delta_left == 1:
            # Its last token and its tree run in one piece; a smaller share would never do.
            rows = max(rows, first.num_rows_left)
        return rows

    def _pick(
        self, sequence: Sequence, max_rows: int, max_prompt_rows: int, schedule: Schedule
    ) -> None:
        """Add the sequence to the schedule if rows and pages allow."""
        rows = max_rows - schedule.num_rows
        if rows <= 0 or not self._open(sequence, schedule):
            return
        if not self._find_place(sequence, schedule):
            return
        work = sequence.work
        assert work is not None
        if sequence.num_delta_left > self._page_size:
            start = sequence.cached_len - work.base_len
            num_adopted = self._pages.adopt_prefix(sequence, work.delta[start:])
            sequence.num_adopted += num_adopted
            schedule.num_prefix_hit_tokens += num_adopted
            if self._waits_for_prefix(sequence, schedule):
                return
            # A chunk ends where texts were seen to part ways: what is kept there serves the next.
            ahead = sequence.known_len - sequence.cached_len
            if ahead > self._short_rows:
                rows = min(rows, ahead + 1)
        left = max_prompt_rows - schedule.num_prompt_rows
        num_delta, num_nodes = sequence.num_delta_left, work.num_new_nodes
        is_prefill = num_delta > self._short_rows
        if num_delta > 1:
            rows = min(rows, left + num_nodes)
        completes = num_delta + num_nodes <= rows
        if not completes:
            may_be_cut = num_delta + num_nodes > self._short_rows
            # The last token stays with the tree: they are evaluated in one forward.
            num_delta = max(0, min(rows, left, num_delta - 1))
            if num_delta == 0 or not may_be_cut:
                return
        context_len = sequence.cached_len + num_delta
        length = context_len + (len(work.tree) if completes else 0)
        if self._find_pages(sequence, length, schedule):
            self._pages.reserve(sequence, length, context_len)
            pick = Pick(sequence, work, num_delta, completes, is_prefill)
            schedule.picks.append(pick)
            schedule.num_rows += pick.num_rows
            schedule.num_prompt_rows += pick.num_prompt_rows

    def _waits_for_prefix(self, sequence: Sequence, schedule: Schedule) -> bool:
        """True if most of this prompt is being computed in this very step for another request.

        Then waiting costs one step and saves the whole computation and its pages.
        """
        work = sequence.work
        assert work is not None
        if work.base_len or not self._pages.shares_prefixes:
            return False
        worthwhile = max(self._page_size, sequence.num_delta_left // 2)
        for pick in schedule.picks:
            other = pick.work
            if (
                not other.base_len
                and other.adapter == work.adapter
                and (pick.num_delta >= self._page_size)
            ):
                common = common_prefix_len(work.delta[:-1], other.delta)
                if common - sequence.cached_len >= worthwhile:
                    return True
        return False

    def _find_place(self, sequence: Sequence, schedule: Schedule) -> bool:
        """True if the sequence may hold pages; the youngest of younger ones makes way for it."""
        if self._pages.has_place(sequence):
            return True
        victims = self._pages.younger_holders(sequence.arrival)
        if victims:
            self._preempt(victims[0], schedule)
        return bool(victims)

    def _find_pages(self, sequence: Sequence, length: int, schedule: Schedule) -> bool:
        """Make enough pages available, at the cost of younger requests where that suffices."""
        page_owners = self._pages
        missing = page_owners.num_pages_missing(sequence, length)
        if not missing or missing <= page_owners.num_available:
            return True
        victims = page_owners.younger_holders(sequence.arrival)
        if missing > page_owners.num_available_without(victims):
            return False
        for victim in victims:
            self._preempt(victim, schedule)
            if missing <= page_owners.num_available:
                break
        return True

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        self._pages.evacuate(victim)
        schedule.num_preempted += 1
        for pick in schedule.picks:
            if pick.sequence is victim:
                schedule.num_rows -= pick.num_rows
                schedule.num_prompt_rows -= pick.num_prompt_rows
        schedule.picks = [pick for pick in schedule.picks if pick.sequence is not victim]
        work = victim.work
        if work is None:
            return
        if work.base_len == 0:
            victim.is_open = False  # it brings all its tokens along: it can start again by itself
            return
        victim.work = None
        schedule.answers.append(Output(victim.request_id, have_len=0))


# How many rows of prompts a step may have, so that nobody waits for long for it.
#
# A chunk of a prompt is bounded in rows by `max_batch_tokens` and in time by `max_chunk_s`: on
# slow cores 512 rows take seconds, in which no other text gets a token. What rows take is
# measured with each chunk, for it differs a thousandfold between machines and changes with what
# else they run.


# A step with a chunk may take so many times as long as one without, however long that is: else the
# rows that the weights are read for anyway would be too few for a prompt to get on.
_PLAIN_STEPS = 2.0
# Where no text decodes beside them, prompts may take so many times as long: a new text waits for
# that once, and larger chunks read the weights less often.
_ALONE = 4
# From one chunk to the next the rows grow and shrink by no more than these: a step that a machine
# was stopped in is made good by a few chunks.
_GROWTH, _SHRINKAGE = 2.0, 1 / 32
# Fewer rows than these save no time on any processor: the weights are read for them all at once.
_LEAST_ROWS = 4
# Weight of the newest step in the running mean of those without prompts.
_WEIGHT = 0.1


class PromptPace:
    """Learns from the steps of one engine.

    beside_others: the most rows of prompts in a step in which texts are decoded."""

    def __init__(self, max_rows: int, max_chunk_s: float) -> None:
        """max_rows: of a step.  max_chunk_s: what a step with a chunk of a prompt may take."""
        self._max_rows, self._max_chunk_s = max_rows, max_chunk_s
        self.beside_others = max_rows
        self._factor, self._allowed = 1, max_rows  # of the present step
        self._plain_s = 0.0  # 0 = no step without prompts yet

    def rows(self, waiting: list[Sequence]) -> int:
        """The most rows of prompts in the next step, which is one of these."""
        is_decoding = any(each.work and len(each.work.delta) <= 1 for each in waiting)
        self._factor = 1 if is_decoding else _ALONE
        self._allowed = min(self._factor * self.beside_others, self._max_rows)
        return self._allowed

    def begin(self, profile: StepProfile | None) -> None:
        """Begin with what steps took before anyone was served; None = that is not known."""
        if profile is not None:
            self._plain_s = float(profile.at([1])[0])
            times_s = profile.at(range(1, self._max_rows + 1))
            self._set((times_s <= self._limit_s).sum())

    def learn(self, step: StepSummary) -> None:
        """Take note of the step that is done."""
        if not step.num_prompt_rows:
            # One with many nodes is no plain one: a chunk of a text that is scored is a tree.
            if step.num_rows > 0 and step.num_nodes <= step.num_sequences:
                weight = _WEIGHT if self._plain_s else 1.0
                self._plain_s += weight * (step.step_time_s - self._plain_s)
            return
        is_in_time = step.step_time_s <= self._factor * self._limit_s
        if is_in_time and 2 * step.num_prompt_rows < self._allowed:
            return  # the end of a prompt tells nothing of a whole chunk
        room_s, took_s = self._limit_s - self._plain_s, step.step_time_s - self._plain_s
        fitting = step.num_prompt_rows * room_s / max(took_s, 1e-9)
        self._set(min(max(fitting, _SHRINKAGE * self.beside_others), _GROWTH * self.beside_others))

    @property
    def _limit_s(self) -> float:
        return max(self._max_chunk_s, _PLAIN_STEPS * self._plain_s)

    def _set(self, rows: float) -> None:
        self.beside_others = min(max(int(rows), _LEAST_ROWS), self._max_rows)
