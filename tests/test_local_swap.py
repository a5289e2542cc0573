"""Another model in a drafter's place while texts are written: the texts stay the target's."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.core import SamplingParams, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import RequestState
from cluster.draft.plugin import Draft, TextDrafter
from cluster.local import LLM
from cluster.models.fingerprint import model_hash
from cluster.records import frozen
from cluster.worker.models import check_room
from tests.support.choices import by_day
from tests.support.draft.heads import random_eagle3
from tests.support.errors import config_error
from tests.support.local_models import (
    GREEDY,
    PLAIN,
    PROMPTS,
    drafters,
    hf_greedy,
    ids_of,
    target,
)

pytestmark = pytest.mark.usefixtures("tireless_residents")

NUM_STREAMS = by_day(12, 32)
# The accepted tokens of a model that is the target itself.  Beside busy cores residents may have
# time for one node of a tree, which is accepted.
OWN = 0.9
FIXED = CoordinatorConfig(budget="fixed", max_draft_tokens=6, max_running_sequences=NUM_STREAMS)
PARAMS = [
    SamplingParams(temperature=float(index % 2), seed=index, max_tokens=24)
    for index in range(NUM_STREAMS)
]
TEXTS = [PROMPTS[index % len(PROMPTS)] for index in range(NUM_STREAMS)]


def edited(source: Path, folder: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a model whose output layer has been edited."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = edit(weights["lm_head.weight"]).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def cut(source: Path, folder: Path) -> Path:
    """A copy of a model that was interrupted."""
    shutil.copytree(source, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def folders(
    llama_folder: Path,
    draft_folder: Path,
    checkpoint_factory: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    (root / "no-model").mkdir()
    return {
        "own": draft_folder,
        "right": llama_folder,
        "permuted": edited(draft_folder, root / "permuted", lambda rows: rows.roll(7, 0)),
        "NaN": edited(
            draft_folder,
            root / "nan",
            lambda rows: rows.index_fill(0, torch.tensor([3]), torch.nan),
        ),
        # It has no space.
        "other vocabulary": checkpoint_factory("llama", vocab_size=96),
        "no model": root / "no-model",
        "cut": cut(draft_folder, root / "cut"),
    }


@pytest.fixture(scope="module")
def llm(llama_folder: Path, folders: dict[str, Path]) -> Iterator[LLM]:
    own = {"lm": drafters(folders["own"], ())["lm"]}
    with LLM(Config(target=target(llama_folder), drafters=own, coordinator=FIXED)) as opened:
        yield opened


def tell(llm: LLM, drafter: str, **options: Any) -> None:
    llm.reconfigure({"drafters": {drafter: {"options": options}}})


def put(llm: LLM, folder: Path, **engine: int) -> None:
    options = llm.config.drafters["lm"].options
    own = {**options["engine"], "model": str(folder), **engine}
    tell(llm, "lm", **{**options, "engine": own})


def worth(llm: LLM, folder: Path) -> float:
    """The accepted tokens of a tree's best four along greedy texts, of the model in this folder,
    which drafts now."""
    wanted = f"lm@{model_hash(folder)[:12]}"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        llm.generate(PROMPTS, GREEDY)
        (told,) = llm.status()["targets"]
        for row in told.get("scores", ()):
            if (row["version"], row["law"]) == (wanted, "greedy") and row["trees"] > 20:
                return float(row["accepted"]["4"])
    raise AssertionError(f"{wanted} does not draft")


def cache_tokens(llm: LLM) -> int:
    """Of the drafter's engine, as the status tells of it."""
    (found,) = (each["kv_tokens"] for each in llm.status()["engines"] if each["name"] == "lm")
    return int(found)


def test_texts_under_way_are_the_targets_own_whatever_takes_the_drafters_place(
    llm: LLM, folders: dict[str, Path]
):
    expected = llm.generate(TEXTS, PARAMS, speculation=PLAIN)
    done = threading.Event()

    def exchange() -> int:
        """Each at least once, and again until the texts are written."""
        count = 0
        while count < 3 or not done.is_set():
            put(llm, folders[("right", "permuted", "own")[count % 3]])
            count += 1
        return count

    with ThreadPoolExecutor(1) as other:
        exchanging = other.submit(exchange)
        try:
            for _ in range(2):
                assert ids_of(llm.generate(TEXTS, PARAMS)) == ids_of(expected)
        finally:
            done.set()
        assert exchanging.result() >= 3


def test_a_model_has_its_own_score_and_finds_it_again(llm: LLM, folders: dict[str, Path]):
    put(llm, folders["right"])
    assert worth(llm, folders["right"]) > OWN
    whole = cache_tokens(llm)
    put(llm, folders["permuted"], num_pages=32)
    assert worth(llm, folders["permuted"]) < 0.5
    assert cache_tokens(llm) < whole, "the status tells of the engine that drafts now"
    put(llm, folders["right"])
    assert worth(llm, folders["right"]) > OWN


REFUSED = {
    "NaN": r"model\.safetensors: lm_head\.weight holds NaN or infinite values; copy",
    "other vocabulary": "use a draft model with the target's tokenizer",
    "no model": r"no-model' has no config\.json",
    "cut": "is damaged",
}


def test_models_that_cannot_draft_change_nothing_and_are_named(llm: LLM, folders: dict[str, Path]):
    put(llm, folders["right"])
    for what, reason in REFUSED.items():
        with config_error(reason) as refused:
            put(llm, folders[what])
        assert "drafters.lm" in refused.value.message
        assert str(folders[what]) in refused.value.message or "hash" in refused.value.message
    assert worth(llm, folders["right"]) > OWN


@frozen
class LateOptions:
    """dies: its load waits for `leave`, and fails then."""

    dies: bool = False


class LateDrafter(TextDrafter):
    """Drafts the text's last token again."""

    Options = LateOptions
    is_there, leave = threading.Event(), threading.Event()

    def __init__(self, context: DrafterContext, options: LateOptions) -> None:
        super().__init__(context)
        if options.dies:
            self.is_there.set()
            self.leave.wait(120)
            raise RuntimeError("CUDA out of memory")

    def draft(self, request: RequestState, max_nodes: int) -> Draft:
        last = int(request.text.token_ids[-1])
        return Draft(TokenTree.chain([last]), np.ones(1, np.float32))


def test_a_load_that_takes_long_holds_nobody_up_and_one_that_dies_leaves_the_drafter(
    llama_folder: Path,
):
    own = {"late": DrafterConfig(kind=f"{__name__}:LateDrafter")}
    config = Config(target=target(llama_folder), drafters=own, coordinator=FIXED)
    with LLM(config) as llm, ThreadPoolExecutor(1) as other:
        expected = llm.generate(TEXTS[:4], PARAMS[:4], speculation=PLAIN)
        swapping = other.submit(tell, llm, "late", dies=True)
        try:
            assert LateDrafter.is_there.wait(120)
            assert ids_of(llm.generate(TEXTS[:4], PARAMS[:4])) == ids_of(expected)
            assert not swapping.done()
        finally:
            LateDrafter.leave.set()
        with config_error("CUDA out of memory"):
            swapping.result()
        (after,) = llm.generate(TEXTS[:1], PARAMS[:1])
        assert after.token_ids == expected[0].token_ids
        assert after.stats.num_draft_tokens > 0


def test_one_that_does_not_fit_beside_the_other_is_refused_with_the_numbers(
    folders: dict[str, Path],
):
    check_room(folders["right"], 100, 100)
    with config_error(r"takes 2,000 bytes .* 1,999 are free; free so much"):
        check_room(folders["right"], 2000, 1999)


def test_a_head_finds_no_rows_of_the_one_before_it(llama_folder: Path, tmp_path: Path):
    first = random_eagle3(tmp_path / "first", llama_folder)
    second = edited(first, tmp_path / "second", lambda rows: rows.flip(0))
    own = DrafterConfig(kind="eagle3", options={"model": str(first)})
    config = Config(target=target(llama_folder), drafters={"head": own}, coordinator=FIXED)
    prompts = [PROMPTS[2]]
    expected = hf_greedy(llama_folder, prompts, GREEDY.max_tokens)
    with LLM(config) as llm:
        assert ids_of(llm.generate(prompts, GREEDY)) == expected
        tell(llm, "head", model=str(second))
        # The prompt's rows are in the prefix cache, and the new head has none of its own there.
        (found,) = llm.generate([PROMPTS[2][::-1]], GREEDY)
        assert ids_of(llm.generate(prompts, GREEDY)) == expected
        assert found.stats.num_draft_tokens > 0
        with config_error(r"drafters\.head\.options\.model"):
            tell(llm, "head", model=str(tmp_path / "none"))
