"""Measures the quality of the demonstration models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.train.acceptance import (
    Interval,
    acceptance_lens,
    bootstrap_interval,
    decode_transcripts,
)
from cluster.train.bits import BitsPerByte, bits_per_byte, sample_documents, total
from cluster.train.corpus import KINDS, Excerpt, Kind, load_corpus
from cluster.train.dataset import read_tokenizer
from cluster.train.distill import kl_divergence
from cluster.train.drafter import stop_ids
from cluster.train.networks import load

GENERAL_DRAFTER = "demo-draft"
TASK_DRAFTERS: Mapping[Kind, str] = {"code": "demo-draft-code", "prose": "demo-draft-prose"}
MAX_PROMPT_TOKENS = 1024
MAX_NEW_TOKENS = 160


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """One drafter on the texts of one kind.

    The mean over texts, and its lead over the general drafter (positive = better).  Texts that are
    too short to measure are left out.
    """

    kind: Kind
    drafter: str
    num_texts: int
    value: Interval
    lead: Interval


# A drafter's result on each text: float64[texts], nan where it cannot be measured.
Measure = Callable[[nn.Module], NDArray[np.float64]]


def evaluate_bits(target_folder: Path, max_bytes: int | None) -> dict[str, BitsPerByte]:
    """Bits per byte on this machine's held-out documents, in windows of 2048 tokens.

    Unit tests are repetitive and make up most of the held-out code, so the result without tests is
    reported as well.
    """
    tokenizer, network = read_tokenizer(target_folder), load(target_folder)
    heldout = load_corpus().heldout
    costs = [
        (document, bits_per_byte(network, tokenizer, [document]))
        for kind in KINDS
        for document in sample_documents(heldout, kind, max_bytes)
    ]
    modules = [cost for item, cost in costs if item.kind == "code" and "test" not in item.path]
    return {
        **{kind: total([cost for item, cost in costs if item.kind == kind]) for kind in KINDS},
        "code without tests": total(modules),
    }


def evaluate_acceptance(models: Path, excerpts: Sequence[Excerpt]) -> list[DrafterReport]:
    """Mean acceptance lengths along the target's greedy text, by replay."""
    stops = stop_ids(read_tokenizer(models / "demo-target"))

    def measure_on(target: LlamaForCausalLM, prompts: Sequence[Sequence[int]]) -> Measure:
        transcripts = decode_transcripts(target, prompts, MAX_NEW_TOKENS, stops)
        return lambda drafter: acceptance_lens(drafter, transcripts)

    return _compare(models, excerpts, measure_on, better=1.0)


def evaluate_divergence(models: Path, excerpts: Sequence[Excerpt]) -> list[DrafterReport]:
    """KL(target || drafter) in nats per token along the excerpts."""

    def measure_on(target: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> Measure:
        return lambda drafter: divergences(drafter, target, texts)

    return _compare(models, excerpts, measure_on, better=-1.0)


def _compare(
    models: Path,
    excerpts: Sequence[Excerpt],
    measure_on: Callable[[LlamaForCausalLM, Sequence[Sequence[int]]], Measure],
    *,
    better: float,
) -> list[DrafterReport]:
    """The general and the matching task drafter per kind.  better: 1 = higher is, -1 = lower."""
    tokenizer = read_tokenizer(models / "demo-target")
    target = load(models / "demo-target")
    general = load(models / GENERAL_DRAFTER)
    reports: list[DrafterReport] = []
    for kind in KINDS:
        texts = [encode_prompt(tokenizer, item.text) for item in excerpts if item.kind == kind]
        if not texts:
            continue
        measure = measure_on(target, texts)
        base, special = measure(general), measure(load(models / TASK_DRAFTERS[kind]))
        for name, values in ((GENERAL_DRAFTER, base), (TASK_DRAFTERS[kind], special)):
            count = int(np.count_nonzero(~np.isnan(values)))
            lead = bootstrap_interval(better * (values - base))
            reports.append(DrafterReport(kind, name, count, bootstrap_interval(values), lead))
    return reports


@torch.no_grad()
def divergences(
    drafter: nn.Module, target: LlamaForCausalLM, texts: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """float64[texts]: KL(target || drafter) in nats, the mean over each text's positions."""
    found: list[float] = []
    for text in texts:
        ids = torch.tensor([text], device=target.device)
        drafted, wanted = (
            torch.log_softmax(network(input_ids=ids, use_cache=False).logits.float(), dim=-1)
            for network in (drafter, target)
        )
        found.append(float(kl_divergence(drafted, wanted)))
    return np.array(found)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The last MAX_PROMPT_TOKENS tokens of a text."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return list(ids[-MAX_PROMPT_TOKENS:])
