"""One contract of all drafters, end to end: whatever drafts, the texts are the target's own."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from cluster.config.schema import Config, DrafterConfig, DrafterPlacement
from cluster.core import SamplingParams, SpeculationStats
from cluster.engine.engine import Engine
from cluster.local import LLM, Completion
from tests.support.checkpoints import noisy_copy
from tests.support.choices import by_day
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.heads import (
    SURENESS,
    VOCAB_SIZE,
    cyclic_target,
    random_eagle3,
    random_medusa,
    random_peagle,
    right_eagle3,
    right_medusa,
    right_peagle,
)
from tests.support.draft.mtp import SIZE, right_mtp, with_mtp
from tests.support.draft.other_vocabulary import letters_tokenizer, other_copy
from tests.support.local_models import (
    GREEDY,
    OPTIONS,
    PLAIN,
    PROMPTS,
    drafters,
    drafting,
    has_misses,
    hf_greedy,
    ids_of,
    metrics_once,
)

pytestmark = pytest.mark.usefixtures("tireless_residents")

Drafters = dict[str, DrafterConfig]
# Drafters for a target; the first folder is for what they need.
Make = Callable[[Path, Path], Drafters]
OWN = {
    "exit": ("early_exit", {"exit_layer": 2}),
    "skip": ("layer_skip", {"skip_layers": [1], "num_pages": 128}),
    "recycling": ("token_recycling", {}),
    "lookahead": ("lookahead", {}),
}
# On busy cores the drafts of a pool come late.
MANY_TRIES = 50


def three(*pool: str) -> Make:
    return lambda folder, target: drafters(noisy_copy(target, folder / "noisy"), pool)


def head(kind: str, make: Callable[..., Path], **how: Any) -> Make:
    return lambda folder, target: {
        "head": DrafterConfig(kind, {"model": str(make(folder / "head", target, **how))})
    }


def pooled(make: Make) -> Make:
    """The same with a look-up beside the target."""
    return lambda folder, target: {
        **make(folder, target),
        "lookup": drafters(target, ("lookup",))["lookup"],
    }


def own(*names: str) -> Make:
    placement = DrafterPlacement(with_="target")
    return lambda *_: {name: DrafterConfig(*OWN[name], placement=placement) for name in names}


def cascade(*stages: str, **options: Any) -> Make:
    def make(folder: Path, target: Path) -> Drafters:
        known = {**three()(folder, target), **own(*OWN)(folder, target)}
        both = DrafterConfig("cascade", {"stages": list(stages), **options})
        return {**{name: known[name] for name in stages}, "cascade": both}

    return make


def other(host: str, left_out: Sequence[int] = range(260, 288)) -> Make:
    """A draft model of another vocabulary, which lacks tokens of prompts and texts."""

    def make(folder: Path, target: Path) -> Drafters:
        copy = other_copy(target, folder / "other", left_out=left_out)
        lm = drafters(copy)["lm"]
        return {"lm": replace(lm, placement=DrafterPlacement(with_=host))}

    return make


def mtp(folder: Path, target: Path) -> Path:
    return target


# Those that know nothing.
HEADS = {
    "eagle3": ("eagle3", random_eagle3),
    "medusa": ("medusa", random_medusa),
    "peagle": ("peagle", random_peagle),
    "dflash": ("block", partial(random_block, spark=False)),
    "dspark": ("block", partial(random_block, spark=True)),
}
EAGLE, MEDUSA, PEAGLE, FLASH, SPARK = (head(*each) for each in HEADS.values())
# Models that draft with some of their own layers.
OWNERS = ("llama", "qwen3", "gemma2", "lfm2", "qwen3.5", "deepseek-v3")
# What is accepted sometimes; models that know nothing have drafts at least.
ACCEPTED = {
    **{
        f"three-{name}": (name, three())
        for name in ("llama", "qwen3", "mistral-sliding", "mixtral", "starcoder2")
    },
    "three-beside": ("llama", three("lm", "lookup", "ngram")),
    **{name: ("llama", own(name)) for name in OWN},
    **{f"own-{name}": (name, own(*OWN)) for name in OWNERS},
    # A stage that is never sure hands everything over.
    "cascade": ("llama", cascade("lookup", "lm")),
    "cascade-judged": ("llama", cascade("lookup", "lm", thresholds=[1.0])),
    "cascade-three": ("llama", cascade("recycling", "skip", "lm", thresholds=[0.9, 0.9])),
    "cascade-exit": ("llama", cascade("lookup", "exit", thresholds=[1.0])),
    "other": ("llama", other("target")),
    "other-beside": ("llama", other("")),
}
DRAFTED = {
    "eagle3": ("llama", EAGLE),
    "eagle3-pooled": ("llama", pooled(EAGLE)),
    "eagle3-sliding": ("mistral-sliding", EAGLE),
    "eagle3-lfm2": ("lfm2", EAGLE),
    "eagle3-qwen3.5": ("qwen3.5", EAGLE),
    "medusa-pooled": ("llama", pooled(MEDUSA)),
    "medusa-gemma2": ("gemma2", MEDUSA),
    "peagle-pooled": ("llama", pooled(PEAGLE)),
    "peagle-sliding": ("mistral-sliding", PEAGLE),
    "dflash-sliding": ("mistral-sliding", FLASH),
    "dspark": ("llama", SPARK),
    "dspark-pooled": ("llama", pooled(SPARK)),
    "mtp": ("glm4-moe", head("mtp", mtp)),
    "mtp-latent": ("deepseek-v3", head("mtp", mtp)),
    "mtp-apart": ("qwen3.5", head("mtp", mtp)),
    "mtp-apart-experts": ("qwen3-next", head("mtp", mtp)),
    "mtp-pooled": ("glm4-moe", pooled(head("mtp", mtp))),
}
CASES = {**ACCEPTED, **DRAFTED}
# Every kind of drafter, and every kind of layer that a target may have.
FEW = [
    "three-beside",
    "own-gemma2",
    "own-lfm2",
    "cascade-three",
    "other",
    "eagle3-sliding",
    "medusa-gemma2",
    "peagle-pooled",
    "dspark",
    "mtp-latent",
    "mtp-apart",
]


def config_of(folder: Path, found: Drafters, *, num_pages: int, max_rows: int) -> Config:
    """Prompts are read in chunks of max_rows."""
    config = drafting(folder, found)
    engine = replace(config.target.engine, num_pages=num_pages, max_batch_tokens=max_rows)
    return replace(config, target=replace(config.target, engine=engine))


@pytest.mark.parametrize("name", by_day(FEW, [*CASES]))
def test_no_drafter_changes_a_text(
    name: str,
    checkpoint_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Greedy is what transformers generates and sampled what it is without drafts, where prompts
    are read in chunks and pages are so few that requests are preempted, and continue."""
    monkeypatch.setattr(Engine, "uses_graphs", True)  # so that steps run ahead, as on a GPU
    architecture, make = CASES[name]
    if "mtp" in name:
        folder = tmp_path / "target"
        with_mtp(folder, architecture)
    else:
        folder = checkpoint_factory(architecture)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
    params = list(OPTIONS.values())

    def is_of_use(stats: SpeculationStats) -> bool:
        if name in DRAFTED:
            return stats.num_draft_tokens > 0
        accepted = stats.accepted_by_drafter
        return bool(accepted.get("cascade") if "cascade" in name else accepted)

    def check(expected: list[list[int]], *asked: Any) -> list[Completion]:
        for _ in range(MANY_TRIES):
            found = llm.generate(*asked)
            assert ids_of(found) == expected
            if any(is_of_use(each.stats) for each in found):
                return found
        raise AssertionError("its drafts are of no use")

    config = config_of(folder, make(tmp_path, folder), num_pages=12, max_rows=48)
    with LLM(config) as llm:
        for _ in range(2):  # the second time much is cached, and drafters have seen all of it
            check(hf_greedy(folder, PROMPTS, GREEDY.max_tokens), PROMPTS, GREEDY)
        metrics_once(llm, has_misses)
        plain = llm.generate(prompts, params, speculation=PLAIN)
        assert all(each.stats.num_draft_tokens == 0 for each in plain)
        drafted = check(ids_of(plain), prompts, params)
        reasons = [each.finish_reason for each in plain]
        assert [each.finish_reason for each in drafted] == reasons
        free = 'drafthouse_kv_pages_in_use{role="target",worker="target"} 0.0'
        metrics_once(llm, lambda page: free in page)


def test_the_time_of_all_stages_of_a_cascade_counts(llama_folder: Path, tmp_path: Path):
    make = cascade("lookup", "lm", thresholds=[1.0])
    with LLM(drafting(llama_folder, make(tmp_path, llama_folder))) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        page = metrics_once(llm, lambda page: "draft_seconds_total{" in page)
    assert sum(each.stats.accepted_by_drafter.get("cascade", 0) for each in found) > 0
    (line,) = (line for line in page.splitlines() if "draft_seconds_total{" in line)
    assert line.split('"')[1] == "cascade"
    assert float(line.split()[-1]) > 0.0


@pytest.mark.parametrize("name", [*HEADS, "mtp"])
@pytest.mark.parametrize("fill", by_day([float("nan")], [float("nan"), 0.0, 1e30]))
def test_numbers_without_sense_cost_speed_only(
    name: str, fill: float, llama_folder: Path, tmp_path: Path
):
    if name == "mtp":
        folder, make = tmp_path, head(name, mtp)
        with_mtp(folder, eh_proj__weight=torch.full((SIZE, 2 * SIZE), fill))
    else:
        folder, make = llama_folder, head(*HEADS[name], fill=fill)
    with LLM(drafting(folder, make(tmp_path, folder))) as llm:
        texts = ids_of(llm.generate(PROMPTS, GREEDY))
    assert texts == hf_greedy(folder, PROMPTS, GREEDY.max_tokens)


def without_target(make: Callable[[Path], Path]) -> Callable[..., Path]:
    return lambda folder, target: make(folder)


RIGHT = {
    "eagle3": head("eagle3", without_target(right_eagle3)),
    "medusa": pooled(head("medusa", without_target(right_medusa))),
    "peagle": head("peagle", without_target(right_peagle)),
    "block": head("block", without_target(right_block)),
    "mtp": head("mtp", mtp),
    # It numbers its tokens otherwise, and lacks some.
    "other vocabulary": other("target", (8, 9)),
}


@pytest.mark.parametrize("name", by_day(["eagle3", "mtp", "other vocabulary"], [*RIGHT]))
def test_texts_follow_the_targets_law(name: str, tmp_path: Path):
    """The drafts are often right, and half of the law's mass is elsewhere.  The control: texts
    drawn a little colder are convicted."""
    folder = (right_mtp if name == "mtp" else cyclic_target)(tmp_path / "target")
    letters_tokenizer(VOCAB_SIZE, folder)
    warm = SamplingParams(temperature=2.0, max_tokens=24, seed=1)
    config = config_of(folder, RIGHT[name](tmp_path, folder), num_pages=512, max_rows=512)
    with LLM(config) as llm:
        found, colder = (
            llm.generate([[5, 6, 7]] * 160, replace(warm, temperature=heat), ignore_eos=True)
            for heat in (2.0, 1.7)
        )
    # Of 3,840 tokens.
    assert sum(each.stats.num_accepted_draft_tokens for each in found) > 50
    assert p_value(ids_of(found), 2.0) > 1e-3
    assert p_value(ids_of(colder), 2.0) < 1e-6


def p_value(texts: list[list[int]], temperature: float) -> float:
    """Chi-squared: how far each token is from the one before, by the law of `cyclic_target`."""
    steps = Counter(
        (after - before) % VOCAB_SIZE
        for text in texts
        for before, after in zip([7, *text], text, strict=False)
    )
    logits = np.zeros(VOCAB_SIZE)
    logits[1] = SURENESS / temperature
    law = np.exp(logits) / np.exp(logits).sum()
    seen = np.array([steps[index] for index in range(VOCAB_SIZE)])
    return float(stats.chisquare(seen, law * seen.sum()).pvalue)
