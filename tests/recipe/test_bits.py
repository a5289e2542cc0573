"""Every byte of a document is scored once, for any windows."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.train.processes import new_accelerator
from models.recipe.corpus import Document, train_tokenizer
from models.recipe.demo import Shape, bits_per_byte, build

TOKENIZER = train_tokenizer(["windows slide over the text\n"] * 3, vocab_size=270)
TEXT = "windows slide over text, and the text is longer than any window\n" * 3


def document(path: str, text: str) -> Document:
    return Document("prose", path, text)


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = Shape(32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)
    built = build(shape, end_of_text_id=0, vocab_size=len(TOKENIZER))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built.eval()


def test_one_window_over_the_whole_text_is_the_plain_loss() -> None:
    model = network()
    ids = [0, *TOKENIZER.encode(TEXT)]
    cost = bits_per_byte(model, TOKENIZER, [document("a", TEXT)])
    batch = torch.tensor([ids])
    with torch.no_grad(), new_accelerator().autocast():
        loss = model(input_ids=batch, labels=batch).loss.item()
    assert cost.bits == pytest.approx(loss * (len(ids) - 1) / math.log(2.0), rel=1e-2)
