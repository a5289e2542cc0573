"""The real engine, a model that computes next to nothing, and graphs that are counted.

What such a model says of a row depends on its token and position alone, so that a text is known
beforehand, and every step tells whether the engine gave it the right rows.  Time is the number of
steps.  It needs Triton's interpreter, on which the model attends while the engine is made.

    TRITON_INTERPRET=1 python -m tests.support.gpu.load     what share of steps replays graphs
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cluster.core import SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.graphs.capture import Capture
from cluster.engine.loading.model import LoadedModel
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.records import record
from cluster.worker.verifier import Verifier
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engine.captures import Recorder
from tests.support.engine.integrity import check_integrity
from tests.support.engine.tiny import tiny
from tests.support.worker.rounds import Session, half_right, no_drafts

VOCAB_SIZE = 61
_HEAD_DIM = 16
_GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)
_RECORDED = Path(__file__).parents[1] / "agents" / "recorded"
# Of English text and code.
_LETTERS_PER_TOKEN = 4


class NullModel(torch.nn.Module):
    """attends: whether a forward asks its plan for attention, which adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attends = True

    def set_attn_implementation(self, name: str) -> None:
        """As transformers' models have it."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        logits_to_keep: torch.Tensor | None = None,
        plan: Any = None,
        **_: Any,
    ) -> SimpleNamespace:
        """See transformers' forwards."""
        num_rows = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(num_rows)[None]
        if plan is not None and self.attends:
            zeros = torch.zeros(1, 1, num_rows, _HEAD_DIM)
            plan.attend_layer(0, zeros, zeros, zeros, AttentionOptions(1.0))
        best = next_tokens(input_ids, position_ids)
        if logits_to_keep is not None:
            best = best[:, logits_to_keep]
        return SimpleNamespace(logits=-(torch.arange(VOCAB_SIZE) - best[..., None]).abs().float())


def next_tokens(token_ids: Any, positions: Any) -> Any:
    """What follows tokens at these positions."""
    return (7 * token_ids + 13 * positions + 3) % VOCAB_SIZE


def text_behind(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt and so many tokens more."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(next_tokens(text[-1], len(text) - 1)))
    return text


def null_engine(folder: Path, capture: Capture | None, **settings: Any) -> Engine:
    """folder: of any checkpoint, whose hashes it takes."""
    module, cpu = NullModel(), torch.device("cpu")
    own = {"attention": "triton", "cuda_graphs": capture is not None}
    model = LoadedModel(
        module=module,
        source=str(folder),
        architecture="NullModel",
        layers=(LayerSpec(1, _HEAD_DIM, torch.float32, cpu),),
        device=cpu,
        vocab_size=VOCAB_SIZE,
        max_context_len=8192,
        eos_token_ids=(),
    )
    engine = Engine(tiny(folder, settings, **own), model, capture=capture)
    module.attends = False
    engine.capture_ahead()
    return engine


@record
class Arrival:
    """A text.  step: when it comes.  num_tokens: of its output.  cancelled_at: a step, or never."""

    step: int
    prompt: Sequence[int]
    num_tokens: int
    cancelled_at: int | None = None


@dataclass(slots=True, eq=False)
class Played:
    """num_steps: that ran a forward.  num_ahead: of them those that began before the tokens of the
    step before were known.  num_missed: how often a text had lost its pages.  outputs: of each text
    that was not cancelled."""

    num_steps: int = 0
    num_ahead: int = 0
    num_missed: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)


def play(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    max_running: int,
    drafts: bool,
    ahead: bool = False,
    seed: int = 0,
    params: SamplingParams = _GREEDY,
) -> Played:
    """Serve the texts.  drafts: each step of a text brings a tree around what follows.  ahead:
    steps without drafts run ahead."""
    verifier, played = Verifier(engine), Played()
    waiting, running = list(enumerate(arrivals)), dict[int, tuple[Session, Any, Arrival]]()
    pending = set()
    step = 0
    while waiting or running:
        while waiting and waiting[0][1].step <= step and len(running) < max_running:
            index, each = waiting.pop(0)
            truth = text_behind(each.prompt, each.num_tokens + 8)
            drafter = half_right(truth, seed + index, VOCAB_SIZE) if drafts else no_drafts
            running[index] = Session(str(index), each.prompt, params), drafter, each
        for index, (session, _, each) in [*running.items()]:
            is_over = len(session.output) >= each.num_tokens
            if is_over:
                played.outputs[index] = session.output
            if is_over or (each.cancelled_at is not None and step >= each.cancelled_at):
                verifier.release([session.request_id])
                pending.discard(session.request_id)
                del running[index]
        step += 1
        asked = [
            session.item(drafter(session.tokens))
            for session, drafter, _ in running.values()
            if session.request_id not in pending
        ]
        pending |= {text.id for text, _ in asked}
        assert verifier.submit(asked) == {}
        if not verifier.has_pending:
            continue
        played.num_ahead += bool(verifier.ahead)
        answers = verifier.step([session.record for session, *_ in running.values()] * ahead)
        assert answers.refused == {}
        played.num_steps += 1
        played.num_missed += len(answers.missed)
        pending -= {each.request_id for each in answers.verdicts}
        pending |= {text.id for text in verifier.ahead}
        for verdict in answers.verdicts:
            running[int(verdict.request_id)][0].take(verdict)
    check_integrity(engine)
    return played


def recorded_arrivals(limit: int = 4096) -> list[Arrival]:
    """Requests of coding agents, as long as they were recorded, ten steps apart."""
    generator = np.random.default_rng(0)
    found = []
    for path in sorted(_RECORDED.glob("*.jsonl")):
        letters = 0
        for line in path.read_text("utf-8").splitlines():
            # A line has what the exchange adds to the one before it.
            letters += _num_letters(json.loads(line)["body"])
            length = min(letters // _LETTERS_PER_TOKEN, limit)
            prompt = generator.integers(0, VOCAB_SIZE, length).tolist()
            found.append(Arrival(10 * len(found), prompt, int(generator.integers(32, 256))))
    return found


def _num_letters(value: Any) -> int:
    if isinstance(value, dict):
        stands_for = value.get("$text")
        if isinstance(stands_for, int):
            return stands_for
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_num_letters, value))
    return len(value) if isinstance(value, str) else 0


def shares(folder: Path) -> dict[str, int]:
    """Of the recorded load, how many steps of a hundred replay a graph, rounded down."""
    found = {}
    for max_running, drafts in product((1, 8, 32), (False, True)):
        recorder = Recorder()
        engine = null_engine(folder, recorder, num_pages=8192, page_size=16)
        before = recorder.num_replays
        played = play(engine, recorded_arrivals(), max_running=max_running, drafts=drafts)
        name = f"{max_running} running{', with drafts' if drafts else ''}"
        found[name] = 100 * (recorder.num_replays - before) // played.num_steps
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(shares(tiny_checkpoint("llama", Path(folder)))) + "\n")
