"""Generated streams contain prompts of the corpus with the target's continuations."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from cluster.train.generate import Sampling, chat_prompts, corpus_prompts, generate_stream
from cluster.train.networks import Shape, build

VOCAB = 64
USER, ASSISTANT, END_OF_TEXT = 2, 3, 0


def test_generated_stream_holds_every_prompt_with_its_continuation() -> None:
    torch.manual_seed(0)
    shape = Shape(32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)
    network = build(shape, end_of_text_id=END_OF_TEXT, vocab_size=VOCAB)
    prompts = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    sampling = Sampling(max_new_tokens=5, stop_ids=(VOCAB,), temperatures=(0.0, 0.8))
    stream = generate_stream(network, prompts, sampling, 100, seed=1, batch_size=2)
    assert stream.reshape(3, 8)[:, :3].tolist() == prompts
    again = generate_stream(network, prompts, sampling, 100, seed=1, batch_size=2)
    assert stream.tolist() == again.tolist()


def test_enough_tokens_end_the_generation() -> None:
    network = build(
        Shape(32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64),
        end_of_text_id=END_OF_TEXT,
        vocab_size=VOCAB,
    )
    stream = np.arange(500, dtype=np.uint16) % VOCAB
    sampling = Sampling(max_new_tokens=4, stop_ids=(VOCAB,))
    drawn = generate_stream(network, corpus_prompts(stream, 6, 0), sampling, 35, 0, batch_size=2)
    assert len(drawn) == 40


def test_corpus_prompts_are_cuts_of_the_stream() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    for prompt in islice(corpus_prompts(stream, 6, seed=0), 20):
        assert prompt == list(range(prompt[0], prompt[0] + 6))


def test_chat_prompts_end_where_the_assistant_begins() -> None:
    conversations = [
        [USER, 40, 41, ASSISTANT, 42, END_OF_TEXT],
        [USER, 50, END_OF_TEXT],
        [USER, 60, ASSISTANT, 61, USER, 62, ASSISTANT, 63, END_OF_TEXT],
    ]
    stream = np.concatenate(conversations).astype(np.uint16)
    prompts = list(chat_prompts(stream, ASSISTANT, END_OF_TEXT, seed=0))
    assert sorted(prompts) == [[USER, 40, 41, ASSISTANT], [USER, 60, ASSISTANT]]
