"""Trains the demonstration target on the corpus."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.train.bits import bits_per_byte, sample_documents
from cluster.train.corpus import KINDS, Document, Kind, load_corpus
from cluster.train.dataset import mix_streams, read_tokenizer
from cluster.train.networks import TARGET, build, save
from cluster.train.processes import processes
from cluster.train.tokenizer import END_OF_TEXT
from cluster.train.trainer import (
    Budget,
    LanguageLoss,
    Phase,
    Report,
    Trainer,
    TrainSettings,
    window_orders,
)

log = logging.getLogger(__name__)

# Short windows first, because they are cheapest per token; long ones last, so that the model can
# use 2048 tokens of context.
TARGET_PHASES = (Phase(0.0, 512, 4), Phase(0.72, 1024, 2), Phase(0.86, 2048, 1))
TOKENS_PER_STEP = 8192
# Code has more weight: prose is easier per token, and the demonstration serves mostly code.
TARGET_MIXTURE = (("code", 1.0), ("prose", 0.5), ("chat", 1.0))
PROBE_BYTES = 120_000


def train_target(work: Path, output: Path, budget: Budget, seed: int = 0) -> None:
    """Train or resume in `work` and write `output`; interim models go to `work`/snapshot."""
    tokenizer = read_tokenizer(work / "data")
    torch.manual_seed(seed)
    network = build(TARGET, end_of_text_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    settings = TrainSettings(budget, TARGET_PHASES, TOKENS_PER_STEP, seed, compiles=True)
    trainer = Trainer(
        LanguageLoss(network),
        window_orders(mix_streams(work / "data", TARGET_MIXTURE), settings),
        settings,
        checkpoint=work / "target.pt",
    )
    trainer.resume()
    trainer.run(report=interim_report(network, tokenizer, work / "snapshot" / output.name))
    if processes().is_main_process:
        save(network, tokenizer, output)


def interim_report(
    network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> Report:
    """Returns a callback that saves the network and logs bits per byte of a held-out sample."""
    samples: dict[Kind, list[Document]] = {}

    def report(num_steps: int) -> None:
        save(network, tokenizer, folder)
        if not samples:
            heldout = load_corpus().heldout
            samples.update({kind: sample_documents(heldout, kind, PROBE_BYTES) for kind in KINDS})
        for kind, documents in samples.items():
            cost = bits_per_byte(network, tokenizer, documents)
            log.info("held-out steps=%s kind=%s bits_per_byte=%.4f", num_steps, kind, cost.rate)

    return report
