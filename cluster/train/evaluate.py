"""The measured claims about the demonstration models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerFast

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

log = logging.getLogger(__name__)

GENERAL_DRAFTER = "demo-draft"
TASK_DRAFTERS: Mapping[Kind, str] = {"code": "demo-draft-code", "prose": "demo-draft-prose"}
MAX_PROMPT_TOKENS = 1024
MAX_NEW_TOKENS = 160


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """One drafter's mean acceptance length on one kind, and its lead over the general drafter."""

    kind: Kind
    drafter: str
    num_prompts: int
    length: Interval
    lead: Interval


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    """How far a drafter's law is from the target's along texts of one kind, in nats per token, and
    by how much nearer than the general drafter's it is."""

    kind: Kind
    drafter: str
    num_texts: int
    divergence: Interval
    lead: Interval


def evaluate_bits(target_folder: Path, max_bytes: int | None) -> dict[str, BitsPerByte]:
    """Bits per byte on this machine's held-out documents, in windows of 2048 tokens.

    Unit tests repeat themselves and most of the held-out code are tests, so the library's modules
    are also given alone.
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


def evaluate_acceptance(models: Path, excerpts: Sequence[Excerpt]) -> list[AcceptanceReport]:
    """Replay the general and the matching task drafter along the target's greedy text."""
    tokenizer = read_tokenizer(models / "demo-target")
    target = load(models / "demo-target")
    general = load(models / GENERAL_DRAFTER)
    reports: list[AcceptanceReport] = []
    for kind in KINDS:
        prompts = [encode_prompt(tokenizer, item.text) for item in excerpts if item.kind == kind]
        if not prompts:
            continue
        transcripts = decode_transcripts(target, prompts, MAX_NEW_TOKENS, stop_ids(tokenizer))
        base = acceptance_lens(general, transcripts)
        special = acceptance_lens(load(models / TASK_DRAFTERS[kind]), transcripts)
        for name, lens in ((GENERAL_DRAFTER, base), (TASK_DRAFTERS[kind], special)):
            reports.append(_report(kind, name, lens, base))
    return reports


def evaluate_divergence(models: Path, excerpts: Sequence[Excerpt]) -> list[DivergenceReport]:
    """KL(target || drafter) of the general and the matching task drafter along the excerpts."""
    tokenizer = read_tokenizer(models / "demo-target")
    target = load(models / "demo-target")
    general = load(models / GENERAL_DRAFTER)
    reports: list[DivergenceReport] = []
    for kind in KINDS:
        texts = [encode_prompt(tokenizer, item.text) for item in excerpts if item.kind == kind]
        if not texts:
            continue
        base = divergences(general, target, texts)
        special = divergences(load(models / TASK_DRAFTERS[kind]), target, texts)
        for name, nats in ((GENERAL_DRAFTER, base), (TASK_DRAFTERS[kind], special)):
            divergence, lead = bootstrap_interval(nats), bootstrap_interval(base - nats)
            reports.append(DivergenceReport(kind, name, len(texts), divergence, lead))
    return reports


@torch.no_grad()
def divergences(
    drafter: nn.Module, target: nn.Module, texts: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """float64[texts]: KL(target || drafter) in nats, the mean over each text's positions."""
    found: list[float] = []
    for text in texts:
        ids = torch.tensor([text])
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


def _report(
    kind: Kind, name: str, lens: NDArray[np.float64], base: NDArray[np.float64]
) -> AcceptanceReport:
    return AcceptanceReport(
        kind,
        name,
        int(np.count_nonzero(~np.isnan(lens))),
        bootstrap_interval(lens),
        bootstrap_interval(lens - base),
    )
