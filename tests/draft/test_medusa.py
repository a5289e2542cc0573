"""Medusa inside a target: products of its heads' candidates, and what they save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.head_options import MedusaOptions
from cluster.errors import ConfigError
from cluster.spec.noise import gumbel
from cluster.spec.tree import depths
from tests.support.draft.heads import (
    cyclic_target,
    random_eagle3,
    random_medusa,
    right_medusa,
)
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.worker.rounds import Session


@pytest.fixture(scope="module")
def head_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_medusa(tmp_path_factory.mktemp("medusa") / "head", llama_folder)


def drafted(inside: Inside, session: Session, max_nodes: int) -> TokenTree:
    """The tree behind the first token of the session's answer."""
    inside.draw(session)
    return inside.tree(session, max_nodes)


@LAWS
def test_each_depth_has_its_heads_best_tokens_by_the_targets_noise(
    params: SamplingParams, llama_folder: Path, head_folder: Path
) -> None:
    """After a prompt in chunks; behind every node that goes on stand the same tokens."""
    config = config_of(
        llama_folder, "medusa", head_folder, max_batch_tokens=16,
        options={"num_children": 2, "min_survival": 1e-9, "num_candidates": 64},
    )  # fmt: skip
    inside = Inside(config)
    session = Session("a", prompt(27).tolist(), params)
    tree = drafted(inside, session, 14)
    rows = expected_taps(load_oracle(llama_folder), np.array(session.tokens[:-1]), (-1,))
    with torch.inference_mode():
        logits = inside.drafter._head(rows[-1:, 0])[0].double().numpy()
    assert tree.parents.tolist().count(-1) == 2
    depth = depths(tree.parents)
    for ahead in range(3):
        scores = logits[ahead]
        if params.temperature:
            ids = np.arange(len(scores))
            scores = scores + gumbel(params.noise_key, 1 + ahead, ids, params.stream)
        best = set(np.argsort(-scores)[:2].tolist())
        assert set(tree.token_ids[depth == ahead + 1].tolist()) == best
    assert len(tree) == 2 + 4 + 8


@LAWS
def test_heads_that_are_right_save_steps(params: SamplingParams, tmp_path: Path) -> None:
    target = cyclic_target(tmp_path / "target")
    inside = Inside(config_of(target, "medusa", right_medusa(tmp_path / "head")))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    assert mean_accepted(session) > (1.0 if params is SAMPLED else 2.8)


def test_a_vocabulary_out_of_order_is_read_by_its_map(tmp_path: Path) -> None:
    """In vLLM's form a token map need not ascend."""
    import json

    from safetensors.torch import load_file, save_file

    target = cyclic_target(tmp_path / "target")
    held = load_file(right_medusa(tmp_path / "head") / "medusa_lm_head.safetensors")
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:22]
    named = {"token_map": order}
    for head in range(3):
        named[f"blocks.{head}.layers.0.weight"] = held[f"{head}.0.linear.weight"]
        named[f"lm_heads.{head}.weight"] = held[f"{head}.1.weight"][order]
    folder = tmp_path / "mapped"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "num_heads": 3}))
    save_file(named, folder / "model.safetensors")
    inside = Inside(config_of(target, "medusa", folder))
    session = Session("a", [5, 6, 7, 8], GREEDY)
    inside.decode([session], 120)
    assert mean_accepted(session) > 2.0


def test_heads_of_nan_draft_nothing(llama_folder: Path, tmp_path: Path) -> None:
    head = random_medusa(tmp_path, llama_folder, fill=float("nan"))
    inside = Inside(config_of(llama_folder, "medusa", head))
    inside.check_silent()


def test_without_the_last_row_nothing_is_drafted(llama_folder: Path, head_folder: Path) -> None:
    inside = Inside(config_of(llama_folder, "medusa", head_folder))
    session = Session("a", prompt(9).tolist(), GREEDY)
    assert len(drafted(inside, session, 8)) > 0
    inside.after_step = lambda rows: None
    assert len(drafted(inside, session, 8)) == 0
    inside.after_step = inside.drafter.read
    assert len(drafted(inside, session, 8)) > 0


def test_a_folder_of_another_kind_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    head = random_eagle3(tmp_path, llama_folder)
    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        Inside(config_of(llama_folder, "medusa", head))


def test_outside_of_a_target_it_says_where_it_belongs(head_folder: Path) -> None:
    from cluster.draft.product import MedusaDrafter

    with pytest.raises(ConfigError, match=r"drafters\.head\.placement"):
        MedusaDrafter(DrafterContext("head", 8, 8), MedusaOptions(model=str(head_folder)))
