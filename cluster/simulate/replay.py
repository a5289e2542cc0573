"""Plays recorded texts through a policy in virtual time: no clocks, and seeded jitter.

When a text ends, the next one takes its place.  The first minutes count too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.core import Proposal, TokenTree
from cluster.plan.controller import Controller
from cluster.plan.in_flight import Moment, Round
from cluster.plan.roster import lot_of
from cluster.plan.texts import Text
from cluster.records import frozen
from cluster.simulate.settings import Scene
from cluster.simulate.world import Machine, Offer, Pool, RecordedText, RemoteTree, best
from cluster.spec.step_profile import MAX_COMMIT, DraftTime
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import Floats, walk

_JITTER = 0.03


@dataclass(slots=True, eq=False)
class Playing:
    """A text that is being written.

    number: of the recorded one.  prompt_rows: rows of its prompt that are still to be read, 0 = it
    is read.  began_s: when its first token was drawn, and drafts behind it were made.  offers: the
    drafts that residents have made after the last step.  read: by model, the tokens that it was
    told of, those of the prompt among them.
    """

    number: int
    recorded: RecordedText
    text: Text
    prompt_rows: int
    position: int = 0
    began_s: float = 0.0
    growing: dict[str, RemoteTree] = field(default_factory=dict)
    offers: dict[str, Offer] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        return len(self.recorded.token_ids) - self.position


class Policy(Protocol):
    """Decides about drafts."""

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        """Return a tree per text to verify; the texts keep the drafts to ask residents for."""
        ...

    def first_ask(self, own: Playing, now: float) -> None:
        """Let a text whose prompt is read keep the drafts to ask residents for."""
        ...

    def learn(self, batch: Sequence[Playing], done: Round) -> None:
        """Learn that the texts have moved on.  Turns are those for texts that had been read before
        the step."""
        ...


@frozen
class Outcome:
    """The tokens emitted in time_s of virtual time; plain decoding would have taken plain_s.

    plain_s counts the prompts and tokens done so far, so the moment of the end does not matter.
    """

    tokens: int
    time_s: float
    plain_s: float

    @property
    def speed(self) -> float:
        """The speed relative to plain decoding."""
        return self.plain_s / self.time_s


class Simulation:
    """One cell: a number of concurrent texts, of one law, on one machine, with one pool.

    times_s: by text, the seconds from its first token to its last, each time that it was written.
    """

    def __init__(
        self, texts: Sequence[RecordedText], machine: Machine, pool: Pool, num_sequences: int
    ) -> None:
        self._texts = texts
        self._machine = machine
        self._pool = pool
        self._num_sequences = num_sequences
        self.times_s: list[list[float]] = [[] for _ in texts]

    def run(self, policy: Policy, seconds: float, seed: int = 0) -> Outcome:
        """Run a policy for `seconds` of virtual time."""
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(self._texts)).tolist()
        turns = list(range(self._num_sequences))
        now, plain_s, tokens = 0.0, 0.0, 0
        batch = [self._open(order, place, turns, now) for place in range(self._num_sequences)]
        while now < seconds:
            new = [own for own in batch if own.prompt_rows]
            decoding = [own for own in batch if not own.prompt_rows]
            room = self._machine.max_rows - len(decoding)
            trees = policy.plan(decoding, now, sum(_chunks(new, room))) if decoding else []
            size = sum(len(tree) for tree in trees)
            jitter = float(np.exp(_JITTER * generator.standard_normal()))
            chunks = _chunks(new, room - size)
            num_plain = len(decoding) + sum(chunks)
            step_s = self._machine.step_s(num_plain + size, len(batch)) * jitter
            # A prompt's last row draws a token, as a row of a decoding text does.
            num_read = sum(rows == own.prompt_rows for own, rows in zip(new, chunks, strict=True))
            num_drawing = len(decoding) + num_read
            only_step_s = self._machine.step_s(num_drawing, len(batch))
            read_s = self._machine.step_s(num_plain, len(batch)) - only_step_s
            plain_s += read_s * jitter
            emitted = [
                min(len(walk(tree, own.recorded.token_ids[own.position :])) + 1, own.remaining)
                for tree, own in zip(trees, decoding, strict=True)
            ]
            now += step_s
            for own, count in zip(decoding, emitted, strict=True):
                self._commit(own, count, now)
            drafted_in = self._turns(decoding)
            draft_s = sum(turn.time_s for turn in drafted_in)
            for own, chunk in zip(new, chunks, strict=True):
                own.prompt_rows -= chunk
                if own.prompt_rows:
                    continue
                policy.first_ask(own, now)
                self._commit(own, 1, now)
                draft_s += sum(turn.time_s for turn in self._turns([own]))
            now += draft_s
            for own in new:
                own.began_s = now
            texts = [own.text for own in decoding]
            done = Round(texts, emitted, size, step_s, draft_s, drafted_in, sum(chunks))
            policy.learn(decoding, done)
            num_emitted = sum(emitted) + num_read
            tokens += num_emitted
            plain_s += num_emitted / max(num_drawing, 1) * only_step_s * jitter
            for place, own in enumerate(batch):
                if own.remaining == 0:
                    self.times_s[own.number].append(now - own.began_s)
                    batch[place] = self._open(order, place, turns, now)
        return Outcome(tokens, now, plain_s)

    def _turns(self, batch: Sequence[Playing]) -> list[DraftTime]:
        """Let residents read and draft; returns their turns."""
        turns: list[DraftTime] = []
        residents = self._pool.residents
        for each in residents:
            asked = [own for own in batch if own.text.asks(each.name) and own.text.ask.num_nodes]
            if not asked:
                continue
            size = len(asked), asked[0].text.ask.num_nodes
            time_s = self._machine.draft_s(*size, each, residents)
            num_read = 0
            for own in () if each.is_look_up else asked:
                length = own.recorded.prompt_len + own.position
                lacking, own.read[each.name] = length - own.read.get(each.name, 0), length
                if lacking > MAX_COMMIT:
                    num_read += 1
                    time_s += self._machine.read_s * lacking
            turns.append(DraftTime(*size, each.name, each.is_look_up, time_s, num_read))
        return turns

    def _open(self, order: list[int], place: int, turns: list[int], now: float) -> Playing:
        number = order[turns[place] % len(order)]
        recorded = self._texts[number]
        turns[place] += self._num_sequences
        text = Text(f"{place}", (recorded.task, recorded.is_sampled), TokenLog())
        text.names = tuple(self._pool.sources)
        text.lot = lot_of(f"{place}-{turns[place]}")
        playing = Playing(number, recorded, text, recorded.prompt_len)
        share = min(1.0, self._pool.crowd / self._num_sequences)
        rate = self._pool.nodes_per_s * share
        playing.growing = {
            name: RemoteTree(self._pool.sources[name], rate, self._pool.latency_s, since_s=now)
            for name in sorted(self._pool.remote)
        }
        return playing

    def _commit(self, own: Playing, count: int, now: float) -> None:
        ids = own.recorded.token_ids[own.position : own.position + count]
        own.text.tokens.append(ids)
        own.position += count
        own.offers = {}
        if own.remaining == 0:
            return
        for growing in own.growing.values():
            growing.commit(own.recorded, own.position, now)
        if num_nodes := own.text.ask.num_nodes:
            own.offers = {
                each.name: best(
                    self._pool.sources[each.name](own.recorded, own.position), num_nodes
                )
                for each in self._pool.residents
                if own.text.asks(each.name)
            }


def _chunks(new: Sequence[Playing], room: int) -> list[int]:
    """Return the rows of each prompt that a step reads, the first prompts first."""
    chunks: list[int] = []
    for own in new:
        chunks.append(min(own.prompt_rows, max(room - sum(chunks), 0)))
    return chunks


class Adaptive:
    """The target's own controller."""

    def __init__(
        self, machine: Machine, pool: Pool, config: CoordinatorConfig | None = None
    ) -> None:
        self._config = config or CoordinatorConfig()
        times = machine.draft_times(pool.residents)
        self.controller = Controller(self._config, machine.told or machine.steps, times)
        self._pool, self._max_rows = pool, machine.max_rows
        self.whys: Counter[str] = Counter()

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        controller, texts = self.controller, [own.text for own in batch]
        for own in batch:
            controller.scores.roster.assign(own.text)
            self._offer(own, now)
        moment = Moment(now, self._pool.residents, prompt_rows)
        max_depths, room = [own.remaining - 1 for own in batch], self._max_rows - len(batch)
        plan = controller.plan(texts, max_depths, max(room, 0), moment)
        self.whys[plan.why.name.lower()] += 1
        return [item.tree for item in plan.in_flight]

    def first_ask(self, own: Playing, now: float) -> None:
        own.text.max_draft_tokens = self._config.max_draft_tokens
        if self._pool.residents:
            self.controller.first_ask(own.text, Moment(now, self._pool.residents))

    def learn(self, batch: Sequence[Playing], done: Round) -> None:
        for text in done.texts:
            text.num_steps += 1
        self.controller.learn(done)
        for ends in (False, True):
            over = [own.text for own in batch if (own.remaining == 0) is ends]
            self.controller.scores.score(over, ends=ends)

    def _offer(self, own: Playing, now: float) -> None:
        grown = {name: growing.at(own.recorded, now) for name, growing in own.growing.items()}
        text, scores = own.text, self.controller.scores
        offers = {name: each for name, each in (own.offers | grown).items() if text.may_ask(name)}
        for name, (tree, claimed) in offers.items():
            held = text.held.get(name)
            if len(tree) == 0:
                text.held.pop(name, None)
            elif held is None or held.proposed_len != own.position or len(held.tree) != len(tree):
                proposal = Proposal(text.id, 0, own.position, 0, tree, claimed)
                held = scores.keep_newest(text, name, proposal)
                assert held is not None
                held.is_resident = name not in grown
                held.is_look_up = held.is_resident and name not in self._pool.models
        if not offers:
            text.held.clear()


# How long each recorded text takes to decode beside others: the target's own planner says.

# Each text is played at least about so often.
_PASSES = 1.5
_SIZES = tuple(2**power for power in range(11))


class DecodeTimes:
    """Times by the number of texts at a target, each measured when it is first asked for.

    of: returns, for so many texts, the seconds from a text's first token to its last,
    float64[texts].

    Some sizes are replayed, step by step; between two of them times are interpolated.
    """

    def __init__(self, scene: Scene, pool: Pool) -> None:
        # Prompts cost what they cost by the profile: `cluster.simulate.fleet` adds it.
        self._texts = [replace(text, prompt_len=1) for text in scene.texts]
        self._scene, self._pool = scene, pool
        self._sizes = (*(edge for edge in _SIZES if edge < scene.seats), scene.seats)
        self.of = functools.cache(self._of)

    def _of(self, num_texts: int) -> Floats:
        above = next(size for size in self._sizes if size >= num_texts)
        below = max(size for size in self._sizes if size <= num_texts)
        if above == below:
            return self._replay(above)
        share = (num_texts - below) / (above - below)
        return (1.0 - share) * self.of(below) + share * self.of(above)

    def _replay(self, num_texts: int) -> Floats:
        lengths = np.array([len(text.token_ids) for text in self._texts])
        # A pass takes at most what it would take without drafts, and each text ends once at least.
        tokens = max(lengths.sum() / num_texts, lengths.max())
        machine, pool = self._scene.machine, self._pool
        seconds = _PASSES * tokens * machine.step_s(num_texts, num_texts)
        simulation = Simulation(self._texts, machine, pool, num_texts)
        policy = Adaptive(machine, pool, self._scene.config.coordinator)
        simulation.run(policy, seconds, self._scene.settings.seed)
        # Each text's mean time, in the later plays where there are several.
        found = np.array(
            [np.mean(own[len(own) // 3 :]) if own else np.nan for own in simulation.times_s]
        )
        is_known = ~np.isnan(found)
        token_s = found[is_known].sum() / (lengths[is_known] - 1.0).sum()
        return np.where(is_known, found, token_s * (lengths - 1.0))
