"""How well the step profile of a mixture of experts tells the times of sizes it has not measured.

    python -m benchmarks.rounds.experts [--family qwen3_moe] [--folder DIR]

A row of such a model reads its own experts' weights, so a step takes longer with every row that
goes to experts which no other row went to.  The model is a random one, large enough that these
weights are most of what a step reads; its tokenizer is SmolLM2's.  The engine profiles itself with
three kinds of rows: the ids 4 to 20, ids from all over the vocabulary, and a text.  Then steps on
other texts are timed at sizes between those of the profile, and compared with what it says by
interpolation, and with a + b * rows + c * distinct(rows) fitted to it, where distinct(rows) is the
mean over the layers of sum_e 1 - (1 - f_e)^rows, and f_e the share of 2,000 rows of text that went
to expert e.  What is compared are ratios between times, for no more of a profile is used.

Bar: the profile that the engine makes is within 15 % at each of these sizes.  Exit status 1 if not.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.options import add_options, parser_of
from benchmarks.support.prompts import held_out_text
from benchmarks.support.record import OUT, show_report
from cluster.config.schema import EngineConfig
from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.cpu.threads import configure_threads
from cluster.engine.engine import Engine
from cluster.engine.loading.profile import profile_steps
from cluster.engine.work import Work, run_alone
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve
from cluster.spec.forest import Floats
from cluster.spec.step_profile import StepProfile

_MOST = 0.15
_TOKENIZER = "smollm2-135m-instruct"
# None of them is measured by the profile.
SIZES = (3, 5, 7, 9, 14, 18, 22, 26, 36, 44, 56, 72, 112, 144, 176, 224)
_CONTEXT_LEN, _NUM_TEXTS, _TURNS = 32, 3, 4
_ROUTED_ROWS = 2000
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    "mixtral": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 2048,
        "sliding_window": None,
    },
}


def make(family: str, folder: Path) -> Path:
    """Write a random mixture with a tokenizer."""
    source = Path(resolve(_TOKENIZER))
    config = AutoConfig.for_model(
        family,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **_SHAPES[family],
    )
    torch.manual_seed(0)
    # Wider than usual, so that a row's route depends on its token.
    config.initializer_range = 0.1
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def shares_of_experts(engine: Engine, text: TokenArray, top: int) -> list[Floats]:
    """Return for each layer the share of the rows of a text that goes to each expert."""
    counts: dict[str, Floats] = {}

    def count(name: str, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        chosen = logits.float().reshape(-1, logits.shape[-1]).topk(top).indices
        found = np.bincount(chosen.flatten().numpy(), minlength=logits.shape[-1])
        counts[name] = counts.get(name, np.zeros(len(found))) + found

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: count(name, output))
        for name, module in engine.model.module.named_modules()
        if name.endswith((".gate", ".router"))
    ]
    run_alone(engine, Work("routes", 0, text))
    engine.release("routes")
    for hook in hooks:
        hook.remove()
    return [found / len(text) for found in counts.values()]


def distinct(shares: Sequence[Floats], rows: Floats) -> Floats:
    """Return the expected number of distinct experts of a layer, mean over the layers."""
    each = [(1.0 - (1.0 - share[:, None]) ** rows).sum(axis=0) for share in shares]
    return np.asarray(np.mean(each, axis=0))


def fitted(profile: StepProfile, shares: Sequence[Floats]) -> Floats:
    """Return what the three-part formula, fitted to a profile, says of SIZES."""

    def parts(rows: Floats) -> Floats:
        return np.stack((np.ones(len(rows)), rows, distinct(shares, rows)), axis=1)

    rows, times = np.array(profile.rows, dtype=float), np.array(profile.times_s)
    # In units of the time, so that small steps count as much as large ones.
    factors, *_ = np.linalg.lstsq(parts(rows) / times[:, None], np.ones(len(rows)), rcond=None)
    return np.asarray(parts(np.array(SIZES, dtype=float)) @ factors)


def timed(engine: Engine, text: TokenArray) -> list[float]:
    """Return the seconds of steps of SIZES: the fastest of a few, mean over some places of a text.

    A step's nodes are the text's continuation with the other half beside it, as in drafts."""
    found = np.full((_NUM_TEXTS, len(SIZES)), np.inf)
    for place in range(_NUM_TEXTS):
        own = text[place * 400 : (place + 1) * 400]
        run_alone(engine, Work("timed", 0, own[:_CONTEXT_LEN]))
        for _ in range(_TURNS):
            for index, size in enumerate(SIZES):
                nodes = own[_CONTEXT_LEN + 1 : _CONTEXT_LEN + size]
                parents = np.maximum(np.arange(len(nodes)) - 2, -1)
                work = Work(
                    "timed",
                    _CONTEXT_LEN,
                    own[_CONTEXT_LEN : _CONTEXT_LEN + 1],
                    TokenTree.of(nodes, parents),
                )
                began = time.perf_counter()
                assert run_alone(engine, work).logits is not None
                found[place, index] = min(found[place, index], time.perf_counter() - began)
        engine.release("timed")
    return [float(each) for each in found.mean(axis=0)]


def report_of(engine: Engine, family: str, text: TokenArray) -> dict[str, Any]:
    first = token_array(4 + np.arange(17))
    spread = token_array([])  # the engine's own choice
    kinds = {"ids 4 to 20": first, "all over the vocabulary": spread, "a text": text[-400:]}
    profiles = {name: profile_steps(engine, 256, text=ids) for name, ids in kinds.items()}
    true = np.array(timed(engine, text))
    shares = shares_of_experts(engine, text[:_ROUTED_ROWS], _SHAPES[family]["num_experts_per_tok"])
    found: dict[str, Any] = {}
    for name, profile in profiles.items():
        assert profile is not None
        says = {"interpolated": profile.at(SIZES), "by experts": fitted(profile, shares)}
        for manner, times in says.items():
            # Only the ratios between a profile's times are used, as machines change their speed.
            errors = times / np.median(times / true) / true - 1.0
            found[f"{name}, {manner}"] = {
                "largest_error": round(float(np.abs(errors).max()), 3),
                "errors": [round(float(each), 3) for each in errors],
            }
    return {
        "family": family,
        "sizes": SIZES,
        "measured_ms": [round(1000 * float(each), 2) for each in true],
        "experts_of_a_layer": [
            round(float(each), 1) for each in distinct(shares, np.array(SIZES, dtype=float))
        ],
        "profiles_ms": {
            name: dict(zip(each.rows, (round(1000 * t, 2) for t in each.times_s), strict=True))
            for name, each in profiles.items()
            if each is not None
        },
        "errors": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_options(
        parser,
        families=("qwen3_moe,mixtral", "separated by commas"),
        folder=(Path, "models made before are taken from here"),
    )
    arguments = parser.parse_args(argv)
    reports = []
    with TemporaryDirectory() as temporary:
        for family in arguments.families.split(","):
            folder = (arguments.folder or Path(temporary)) / family
            if not (folder / "config.json").is_file():
                make(family, folder)
            config = EngineConfig(
                model=str(folder), dtype="bfloat16", max_context_len=2048, max_batch_tokens=512
            )
            configure_threads(config)
            engine = Engine.load(config)
            ids = load_pretrained_tokenizer(folder)(held_out_text()[:40000])["input_ids"]
            reports.append(report_of(engine, family, token_array(ids)))
    show_report(OUT / "rounds" / "experts.json", {"bar": _MOST, "models": reports})
    own = "all over the vocabulary, interpolated"
    return 0 if all(each["errors"][own]["largest_error"] <= _MOST for each in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
