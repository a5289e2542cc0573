"""Replay gives the acceptance of real chains of drafts, and distillation improves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.train.acceptance import (
    CHAIN_LEN,
    Transcript,
    acceptance_lens,
    bootstrap_interval,
    decode_transcripts,
    greedy_matches,
    mean_acceptance_len,
)
from cluster.train.distill import DistillationLoss, kl_divergence, negative_log_acceptance
from cluster.train.generate import Sampling, continue_prompts
from cluster.train.networks import Shape, build

VOCAB = 64
NO_STOP = (VOCAB,)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def toy(seed: int, hidden_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = Shape(hidden_size, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
    network = build(shape, end_of_text_id=0, vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network.eval()


def walk_with_real_drafts(
    drafter: LlamaForCausalLM, transcript: Transcript, chain_len: int
) -> float:
    """The definition: draft token by token, accept the matching prefix, continue after it."""
    position = num_steps = 0
    text = list(transcript.text)
    while position + chain_len < len(text):
        prefix = [*transcript.prompt, *text[:position]]
        drafts: list[int] = []
        for _ in range(chain_len):
            logits = drafter(input_ids=torch.tensor([[*prefix, *drafts]])).logits
            drafts.append(int(logits[0, -1].argmax()))
        accepted = 0
        while accepted < chain_len and drafts[accepted] == text[position + accepted]:
            accepted += 1
        position += accepted + 1
        num_steps += 1
    return position / num_steps


def test_target_as_its_own_drafter_is_always_accepted() -> None:
    target = toy(seed=1)
    transcripts = decode_transcripts(target, PROMPTS, 41, NO_STOP)
    assert acceptance_lens(target, transcripts).tolist() == [CHAIN_LEN + 1.0] * len(PROMPTS)


def test_replay_equals_real_drafting() -> None:
    target = toy(seed=1)
    drafter = toy(seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    transcripts = decode_transcripts(target, PROMPTS, 60, NO_STOP)
    measured = acceptance_lens(drafter, transcripts)
    expected = [walk_with_real_drafts(drafter, item, CHAIN_LEN) for item in transcripts]
    assert measured.tolist() == pytest.approx(expected)
    assert 1.0 < measured.mean() < CHAIN_LEN + 1.0


def test_known_matches_give_the_length_counted_by_hand() -> None:
    # Steps: one accepted, all four accepted, none accepted; the rest is too short to judge.
    matches = np.array([1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1], dtype=np.bool_)
    assert mean_acceptance_len(matches) == pytest.approx((2 + 5 + 1) / 3)


def test_text_too_short_to_judge_has_no_length() -> None:
    assert np.isnan(mean_acceptance_len(np.ones(CHAIN_LEN, dtype=np.bool_)))


def test_matches_of_a_text_start_with_its_first_token() -> None:
    target = toy(seed=1)
    (transcript,) = decode_transcripts(target, PROMPTS[:1], 5, NO_STOP)
    spoiled = Transcript(
        transcript.prompt, ((transcript.text[0] + 1) % VOCAB, *transcript.text[1:])
    )
    assert greedy_matches(target, transcript).all()
    assert not greedy_matches(target, spoiled)[0]


def test_batched_continuation_equals_greedy_generate() -> None:
    target = toy(seed=1)
    drawn = continue_prompts(
        target, PROMPTS, Sampling(12, NO_STOP), torch.Generator().manual_seed(0)
    )
    for prompt, text in zip(PROMPTS, drawn, strict=True):
        expected = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        assert text == expected[0, len(prompt) :].tolist()


def test_continuation_ends_with_its_first_stop_token() -> None:
    target = toy(seed=1)
    generator = torch.Generator().manual_seed(0)
    (text,) = continue_prompts(target, PROMPTS[:1], Sampling(12, NO_STOP), generator)
    stop = text[4]
    (stopped,) = continue_prompts(target, PROMPTS[:1], Sampling(12, (stop,)), generator)
    assert stopped == text[: text.index(stop) + 1]


def test_bootstrap_interval_contains_the_mean_and_shrinks_with_more_values() -> None:
    values = np.random.default_rng(0).normal(1.0, 1.0, size=400)
    few, many = bootstrap_interval(values[:25]), bootstrap_interval(values)
    assert many.low < many.mean < many.high
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize("loss", ["kl", "acceptance"])
def test_distillation_brings_the_drafter_closer_to_the_target(loss: str) -> None:
    target, drafter = toy(seed=1), toy(seed=2, hidden_size=16)
    objective = DistillationLoss(drafter, target, "kl" if loss == "kl" else "acceptance")
    divergence = DistillationLoss(drafter, target, "kl")
    windows = torch.randint(VOCAB, (8, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.01)
    before = divergence(windows).item()
    for _ in range(40):
        optimizer.zero_grad()
        objective(windows).backward()
        optimizer.step()
    assert divergence(windows).item() < 0.8 * before
    assert all(parameter.grad is None for parameter in target.parameters())


def test_losses_are_zero_for_equal_laws_and_positive_otherwise() -> None:
    law = torch.log_softmax(torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)), -1)
    other = law.roll(1, dims=-1)
    for loss in (kl_divergence, negative_log_acceptance):
        assert loss(law, law).item() == pytest.approx(0.0, abs=1e-5)
        assert loss(other, law).item() > 0.1
