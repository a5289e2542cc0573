"""Models with the weights of another one, whose tokenizer numbers other tokens."""

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def other_copy(folder: Path, copy: Path, *, left_out: Collection[int] = (), seed: int = 1) -> Path:
    """A copy of a checkpoint that numbers its tokens by chance, spells the end of a text in its own
    way, and lacks those left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.config.vocab_size
    kept = np.setdiff1d(np.arange(size), list(left_out))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(kept))
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight.data, output.weight.data = embedding.weight[order], output.weight[order]
    model.config.vocab_size = len(order)
    places = {int(old): new for new, old in enumerate(order)}
    if model.config.eos_token_id is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = places[0]
    model.save_pretrained(copy)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    spelled = {tokenizer.eos_token: "</s>"} if tokenizer.eos_token else {}
    vocab = {
        spelled.get(token, token): places[index]
        for token, index in state["model"]["vocab"].items()
        if index in places
    }
    state["model"]["vocab"] = vocab
    state["model"]["merges"] = [
        pair for pair in state["model"]["merges"] if {*pair, "".join(pair)} <= vocab.keys()
    ]
    for added in state["added_tokens"]:
        added["id"] = places[added["id"]]
        added["content"] = spelled.get(added["content"], added["content"])
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=spelled.get(tokenizer.eos_token),
    ).save_pretrained(copy)
    return copy


def letters_tokenizer(size: int, folder: Path) -> None:
    """Write a tokenizer of so many single letters into a folder."""
    letters = "abcd " + "".join(chr(0x100 + index) for index in range(size - 5))
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
