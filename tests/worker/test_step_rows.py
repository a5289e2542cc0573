"""What drafters inside the target are handed of its steps: rows, positions, taps, top tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.config.schema import Config, DrafterConfig, TargetConfig
from cluster.core import SamplingParams, TokenTree, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.host import Host
from cluster.draft.inside import StepReader, StepRows, StepWants, host_of
from cluster.engine.engine import Engine
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.spec.logprobs import top_tokens
from cluster.worker.build import build_target
from cluster.worker.target_parts import load_target_engine
from cluster.worker.verifier import Verifier
from tests.support.engine.driver import last_logits, load_engine, load_oracle, prompt
from tests.support.engine.taps import errors, expected_taps
from tests.support.engine.tiny import tiny
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.rounds import Session, decode_all, half_right
from tests.support.worker.steps import desk_of
from tests.support.worker.texts import LAWS, opened, plain

WANTS = StepWants((2, 0, -1), 3)
PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def decoded(engine: Engine, sessions: Sequence[Session], wants: StepWants) -> list[StepRows]:
    """What the steps computed until each session has 20 tokens."""
    verifier = Verifier(engine, wants=wants)
    found = []
    step = verifier.step

    def stepped() -> object:
        frame = step()
        found.extend(verifier.last_rows)
        return frame

    verifier.step = stepped  # type: ignore[method-assign, assignment]
    drafters = [half_right(prompt(40, seed=7).tolist(), 1, engine.vocab_size) for _ in sessions]
    decode_all(verifier, sessions, drafters, 20, release=True)
    return found


def text_rows(rows: Sequence[StepRows], name: str) -> dict[int, tuple[int, torch.Tensor]]:
    """Token and taps by position; a position that comes again replaces what came before."""
    found = {}
    for each in (each for each in rows if each.request_id == name):
        for offset, row in enumerate(each.text_rows.tolist()):
            found[each.first_position + offset] = (int(each.token_ids[row]), each.taps[row])
    return found


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_position_of_a_text_comes_with_its_token_and_hidden_rows(
    prefix_cache: bool, llama_folder: Path
):
    """In chunks, after preemptions, and along accepted paths."""
    engine = load_engine(llama_folder, num_pages=24, max_batch_tokens=16, prefix_cache=prefix_cache)
    sessions = [Session(str(i), prompt(9 + 16 * i, seed=i).tolist(), PARAMS) for i in range(3)]
    rows = decoded(engine, sessions, WANTS)
    oracle = load_oracle(llama_folder)
    for session in sessions:
        found = text_rows(rows, session.request_id)
        tokens = session.tokens[: max(found) + 1]
        assert sorted(found) == list(range(len(tokens)))
        assert [found[i][0] for i in range(len(tokens))] == tokens
        taps = torch.stack([found[i][1] for i in range(len(tokens))])
        wanted = expected_taps(oracle, token_array(tokens), WANTS.taps)
        assert errors(taps, wanted).max() <= 1e-5
    assert any(each.next_token is None for each in rows)  # a prompt's chunk
    assert sum(session.num_misses for session in sessions) > 0


def test_the_most_probable_tokens_are_those_of_the_last_row_and_of_all_nodes(
    llama_folder: Path,
):
    engine, oracle = load_engine(llama_folder), load_oracle(llama_folder)
    verifier = Verifier(engine, wants=StepWants(num_top=3))
    session = Session("a", prompt(11).tolist(), PARAMS)
    verifier.submit([session.item(TokenTree.of([5, 6, 7], [-1, 0, -1]))])
    frame = verifier.step()
    (rows,) = verifier.last_rows
    assert rows.taps is None
    assert (rows.first_position, rows.num_context) == (10, 1)
    assert rows.token_ids.tolist() == [session.tokens[-1], 5, 6, 7]
    assert rows.next_token == frame.verdicts[0].token_ids[-1]
    paths = [[], [5], [5, 6], [7]]
    logits = torch.stack([last_logits(oracle, [*session.tokens, *path]) for path in paths])
    assert np.array_equal(rows.top.token_ids, top_tokens(logits, 3).token_ids)


def test_nobody_reads_an_audit(llama_folder: Path):
    sessions = [Session(name, prompt(40, seed=1).tolist(), PARAMS) for name in "ab"]
    sessions[0].change(is_audit=True)
    rows = decoded(load_engine(llama_folder, max_batch_tokens=16), sessions, WANTS)
    assert {each.request_id for each in rows} == {"b"}


def test_nobody_is_handed_what_only_others_want(llama_folder: Path):
    engine = load_engine(llama_folder)
    verifier = Verifier(engine, wants=WANTS)
    verifier.submit([Session("a", prompt(6).tolist(), PARAMS).item()])
    verifier.step()
    (rows,) = verifier.last_rows
    seen = rows.seen_by(StepWants((-1, 2)), WANTS)
    assert seen.top is None
    assert torch.equal(seen.taps, rows.taps[:, [2, 0]])
    seen = rows.seen_by(StepWants(num_top=1), WANTS)
    assert seen.taps is None
    assert np.array_equal(seen.top.token_ids, rows.top.token_ids[:, :1])
    assert StepWants((2, 0), 1) | StepWants((0, -1), 3) == WANTS


class Reader(GreedyOracle):
    """Reads what steps computed, and raises now and then."""

    def __init__(self, every: int = 0) -> None:
        super().__init__()
        self.wants = StepWants(num_top=2)
        self.rows = []
        self.every = every
        self.num_calls = 0

    def read(self, rows: Sequence[StepRows]) -> None:
        self.num_calls += 1
        if self.every and self.num_calls % self.every == 0:
            raise ValueError("no")
        self.rows += rows


@LAWS
@pytest.mark.parametrize("every", [1, 2])
async def test_a_reader_that_raises_changes_no_text(every: int, params: SamplingParams):
    reader = Reader(every)
    async with desk_of(residents=[resident(reader)]) as desk:
        for index in range(3):
            desk.post(opened(f"r{index}", params=params, drafters=("a",)))
            await desk.run()
        assert desk.target.loop.texts.broken is None
    assert [desk.text(f"r{index}") for index in range(3)] == [plain(params=params)] * 3
    assert reader.num_calls > 2


def test_one_that_raises_again_and_again_is_left_alone():
    reader = Reader(every=1)
    contained = resident(reader, failures=3)
    rows = [StepRows("a", 0, "", b"", 0, token_array([1]), 1, token_array([]), token_array([]), 2)]
    for _ in range(10):
        contained.read_step(rows, StepWants(num_top=2), 1.0)
    assert reader.num_calls == 3


class Kept(Reader):
    """Keeps something in the target's cache."""

    @classmethod
    def kv_layers(cls, options: object, like: LayerSpec) -> Sequence[LayerSpec]:
        return [LayerSpec(2, 3, like.dtype, like.device)] * 2

    def __init__(self, context: DrafterContext, options: object) -> None:
        super().__init__()
        self.host = host_of(context, "kept")
        assert isinstance(self, StepReader)


def config_of(folder: Path, *names: str) -> Config:
    kinds = {"kept": f"{__name__}:Kept", "bad": f"{__name__}:Bad", "lookup": "prompt_lookup"}
    return Config(
        target=TargetConfig(engine=tiny(folder, {}, page_size=4, max_context_len=128)),
        drafters={name: DrafterConfig(kind=kinds[name.split("-")[0]]) for name in names},
    )


def test_each_reader_has_layers_of_its_own_in_the_targets_cache(llama_folder: Path):
    config = config_of(llama_folder, "kept-1", "lookup", "kept-2")
    engine = load_target_engine(config)
    hosts = [Host(engine, config, name) for name in config.drafters]
    assert [len(host.caches) for host in hosts] == [2, 0, 2]
    pointers = {cache.data_ptr() for host in hosts for cache in host.caches}
    assert pointers == {layer.data_ptr() for layer in engine.cache.layers[3:]}
    assert hosts[0].caches[0].shape[1:] == (2, 2, 3)
    verifier = Verifier(engine)
    verifier.submit([Session("a", prompt(6).tolist(), PARAMS).item()])
    verifier.step()
    assert hosts[2].slots("a").tolist() == engine.slots("a", 5)[:6].tolist()
    assert build_target(engine, config).describe().residents == ("kept-1", "lookup", "kept-2")


@pytest.mark.parametrize("tied", [True, False])
def test_a_host_has_the_weights_of_its_model(tied: bool, checkpoint_factory: Callable[..., Path]):
    folder = checkpoint_factory("llama", head_dim=16, tie_word_embeddings=tied)
    config = config_of(folder)
    host, oracle = Host(load_target_engine(config), config, "none"), load_oracle(folder)
    assert torch.equal(host.weight("embedding"), oracle.get_input_embeddings().weight)
    assert torch.equal(host.weight("output"), oracle.get_output_embeddings().weight)
    assert (host.hidden_size, host.num_layers, host.vocab_size) == (48, 3, 288)


class Bad(GreedyOracle):
    """Wants a tap that there is not."""

    def __init__(self, context: DrafterContext, options: object) -> None:
        super().__init__()
        self.wants = StepWants((1, 9))

    def read(self, rows: Sequence[StepRows]) -> None:
        raise AssertionError("nothing is to be read")


def test_one_that_wants_what_the_target_has_not_is_refused_alone(llama_folder: Path):
    config = config_of(llama_folder, "bad", "lookup")
    described = build_target(load_target_engine(config), config).describe()
    assert described.residents == ("lookup",)
    assert "tap 9" in described.refused["bad"]


def test_one_that_needs_a_target_is_refused_outside_of_it():
    with pytest.raises(ConfigError, match="with: target"):
        Kept(DrafterContext("kept", 8, 8), None)
