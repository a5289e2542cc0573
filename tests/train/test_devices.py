"""What training computes stays on its objective's device, tried on one that is not the CPU.

The device is a name without hardware, its tensors have no numbers (torch's fake tensors), and an
operation on two devices raises.  Only in a process of its own: such a name cannot be taken back.
"""

from typing import TypeVar

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.spawn import spawn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.draft.vocabulary import DraftVocabulary
from cluster.engine.device import computes
from cluster.train.chat_drafter import DraftModelLearner
from cluster.train.chat_heads import DepthDrafts, HeadBatch, Learner
from cluster.train.heads import (
    Eagle3Learner,
    ExitLearner,
    MedusaLearner,
    new_exit,
    new_head,
    new_heads,
)
from models.recipe.demo import DistillationLoss, LanguageLoss
from tests.support.choices import by_night

VOCAB, WIDTH, HIDDEN, K = 64, 12, 32, 4
Module = TypeVar("Module", bound=nn.Module)


def network() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def placed(module: Module, device: torch.device) -> Module:
    """As `to`, which cannot exchange fake parameters."""
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                held[name] = None if tensor is None else tensor.detach().to(device)
    return module


def learners() -> list[Learner]:
    ids, target = torch.arange(VOCAB // 2), network()
    every = np.arange(VOCAB, dtype=np.int32)
    return [
        DraftModelLearner(network(), DraftVocabulary(every, every)),
        Eagle3Learner(new_head(network(), (1, 2, 3), ids), 2),
        MedusaLearner(target, new_heads(target, 2), ids, 3, 2),
        ExitLearner(target, new_exit(target, 2), ids, 0),
    ]


def head_batch() -> HeadBatch:
    shape = (1, WIDTH)
    return HeadBatch(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(*shape, 4, HIDDEN),
        True,
        torch.zeros(*shape, K, dtype=torch.int64),
        torch.zeros(*shape, K),
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.bool),
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor:
    return (query @ key.mT).softmax(-1) @ value


@torch.no_grad()
def _compute_on_another_device(index: int) -> None:
    _setup_privateuseone_for_python_backend("toy")
    device = torch.device("toy", 0)
    nn.functional.scaled_dot_product_attention = attend  # torch's asks for a kernel of the device
    with FakeTensorMode(shape_env=ShapeEnv()):
        windows = torch.zeros(2, WIDTH, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"(?i)device"):
            placed(LanguageLoss(network()), device)(windows)
        for objective in (LanguageLoss(network()), DistillationLoss(network(), network())):
            assert placed(objective, device)(windows.to(device)).device == device

        heads = send_to_device(head_batch(), device)
        for learner in learners():
            placed(learner, device)
            for ahead, hidden in enumerate(learner.drafts(heads, 3), 1):
                probs, ids = (each[0, 3 + ahead :] for each in (heads.probs, heads.candidates))
                logits = learner.logits(hidden[0])
                picked = logits.log_softmax(dim=-1).gather(1, ids)
                drafts = DepthDrafts(logits, probs, ids, picked, heads.is_rejected[0, 3 + ahead :])
                assert drafts.cross_entropy.device == device


@by_night
def test_objectives_compute_where_they_and_their_batches_lie():
    spawn(_compute_on_another_device)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_gpu_computes_what_its_driver_says(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert computes(torch.bfloat16, torch.device("cuda")) == has_bfloat16
    assert computes(torch.float32, torch.device("cuda"))
