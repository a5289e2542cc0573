"""Bits per byte of held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.records import frozen
from cluster.train.corpus import Document, Kind
from cluster.train.processes import new_accelerator
from cluster.train.tokenizer import END_OF_TEXT


@frozen
class BitsPerByte:
    """The coding cost of a text under a model."""

    bits: float
    num_bytes: int
    num_tokens: int

    @property
    def rate(self) -> float:
        """Bits per byte of UTF-8."""
        return self.bits / self.num_bytes


def sample_documents(
    documents: Iterable[Document], kind: Kind, max_bytes: int | None
) -> list[Document]:
    """All documents of a kind; with a limit, the same share of the beginning of each."""
    chosen = [document for document in documents if document.kind == kind]
    if max_bytes is None:
        return chosen
    per_document = max(1, max_bytes // max(1, len(chosen)))
    return [Document(item.kind, item.path, item.text[:per_document]) for item in chosen]


@torch.no_grad()
def bits_per_byte(
    network: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Document],
    window_len: int = 2048,
    stride: int = 1024,
) -> BitsPerByte:
    """Score every token once, with a context of at least `window_len - stride` tokens if any."""
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    accelerator = new_accelerator()
    nats, num_bytes, num_tokens = 0.0, 0, 0
    for document in documents:
        ids = [
            end_id,
            *tokenizer.backend_tokenizer.encode(document.text, add_special_tokens=False).ids,
        ]
        num_bytes += len(document.text.encode())
        num_tokens += len(ids) - 1
        scored = 1
        while scored < len(ids):
            end = min(len(ids), window_len if scored == 1 else scored + stride)
            start = max(0, end - window_len)
            window = torch.tensor([ids[start:end]], device=network.device)
            with accelerator.autocast():
                logits = network(input_ids=window[:, :-1], use_cache=False).logits
            first = scored - start - 1
            nats += nn.functional.cross_entropy(
                logits[0, first:].float(), window[0, first + 1 :], reduction="sum"
            ).item()
            scored = end
    return BitsPerByte(nats / math.log(2.0), num_bytes, num_tokens)
