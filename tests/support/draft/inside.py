"""A drafter inside a target, driven by hand: it reads every step and drafts for the next."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import (
    Config,
    DrafterConfig,
    DrafterPlacement,
    TargetConfig,
)
from cluster.core import EMPTY_TREE, Commit, SamplingParams, TokenTree, token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.host import Host
from cluster.draft.inside import StepRows, StepWants
from cluster.engine.graphs.capture import Capture
from cluster.worker.target_parts import load_target_engine
from cluster.worker.verifier import Verifier
from tests.support.engine.driver import prompt
from tests.support.engine.tiny import tiny
from tests.support.worker.rounds import Session, decode_all

GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=256)
LAWS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def config_of(target: Path, kind: str, head: Path | None = None, **settings: Any) -> Config:
    """A float32 target with small pages and one drafter, `head`, inside.  settings: of the engine;
    options: of the drafter; head: its folder, if it has one."""
    options = settings.pop("options", {})
    if head is not None:
        options = {"model": str(head), **options}
    return Config(
        target=TargetConfig(engine=tiny(target, settings, page_size=4, max_batch_tokens=64)),
        drafters={
            "head": DrafterConfig(
                kind=kind, options=options, placement=DrafterPlacement(with_="target")
            )
        },
    )


class Inside:
    """engine, verifier, drafter: of a configuration with one drafter inside the target."""

    def __init__(self, config: Config, capture: Capture | None = None) -> None:
        """capture: as a machine without a GPU has it; None = there are no graphs."""
        self.engine = load_target_engine(config)
        (name,) = config.residents
        host = Host(self.engine, config, name)
        host.capture = capture
        context = DrafterContext(name, 32, 64, self.engine.vocab_size, "", host)
        self.drafter = registry.create(name, config.drafters[name], context)
        self.verifier = Verifier(self.engine, wants=getattr(self.drafter, "wants", StepWants()))
        self.after_step = getattr(self.drafter, "read", lambda rows: None)
        self.trees = []
        self._step = self.verifier.step
        self.verifier.step = self._stepped

    def _stepped(self) -> Any:
        frame = self._step()
        self.after_step(self.verifier.last_rows)
        return frame

    def decode(self, sessions: Sequence[Session], num_tokens: int, max_nodes: int = 8) -> None:
        """Rounds over all sessions until each has num_tokens tokens of output; then they end."""
        drafters = [
            lambda tokens, session=session: self.tree(session, max_nodes) for session in sessions
        ]
        decode_all(self.verifier, sessions, drafters, num_tokens, release=True)
        self.drafter.release([session.request_id for session in sessions])

    def draw(self, session: Session) -> None:
        """Draw the token behind its text, which is read in chunks where it is long."""
        self.verifier.submit([session.item()])
        while self.verifier.has_pending:
            frame = self.verifier.step()
        session.take(frame.verdicts[0])

    def lose_steps(self, *numbers: int) -> None:
        """From here on the drafter does not see the steps of these numbers, counted from 1."""
        steps = itertools.count(1)

        def lossy(rows):
            if next(steps) not in numbers:
                self.drafter.read(rows)

        self.after_step = lossy

    def decode_checked(self, check: Callable[[StepRows, list[int]], None]) -> list[Session]:
        """Three texts with one beginning, read in chunks and behind prefix hits, and decoded.

        check: called after every step with what it drew for a text, and the text up to there."""
        sessions, num_checked = alike(), 0

        def checked(rows):
            nonlocal num_checked
            self.drafter.read(rows)
            for each in rows:
                if each.next_token is not None:
                    before = sessions[int(each.request_id)].tokens[: each.first_position]
                    check(each, [*before, *each.token_ids[each.text_rows].tolist()])
                    num_checked += 1

        self.after_step = checked
        self.decode(sessions[:1], 6)  # the others then find its beginning in the prefix cache
        self.decode(sessions[1:], 12)
        assert num_checked >= 12
        return sessions

    def check_silent(self) -> None:
        """The drafter is asked for trees and has none."""
        self.decode([Session("a", prompt(9).tolist(), GREEDY)], 10)
        assert self.trees
        assert all(len(tree) == 0 for tree in self.trees)

    def told(self, session: Session, max_nodes: int) -> DraftTask:
        """Tell the drafter the session's text as it stands; returns what it is to draft then."""
        record, text = session.record, token_array(session.tokens)
        name, generation = session.request_id, record.opened.generation
        commit = Commit(
            *(name, generation, 0, 0, text, record.opened.prompt_len, max_nodes, "default"),
            record.params,
        )
        (observed,) = self.drafter.observe([commit])
        assert observed.have_len == len(text)
        return DraftTask(name, generation, max_nodes)

    def tree(self, session: Session, max_nodes: int) -> TokenTree:
        """Its tree for the session's text as it stands."""
        tree, task = EMPTY_TREE, self.told(session, max_nodes)
        while proposals := self.drafter.propose([task]):
            (proposal,) = proposals
            assert proposal.base_len == len(session.tokens)
            tree = proposal.tree
            if proposal.is_complete:
                break
        self.trees.append(tree)
        return tree


def alike() -> list[Session]:
    """Three texts with one beginning."""
    shared = prompt(30, seed=5).tolist()
    return [Session(str(i), shared + prompt(i * 9, seed=i).tolist(), GREEDY) for i in range(3)]


def mean_accepted(session: Session) -> float:
    """Drafts that a step of the session accepted, on average."""
    return sum(len(verdict.path) for verdict in session.verdicts) / len(session.verdicts)
