"""Trains the demonstration models on this machine's own text.

The target learns the text.  The drafters learn the target's law along it: a general one, and from
that one for each kind of text.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from cluster.errors import ConfigError
from cluster.models.made_for import write_made_for
from cluster.records import frozen
from cluster.train.chat_drafter import save_network
from cluster.train.chat_heads import target_of
from cluster.train.trainer import (
    Budget,
    Rates,
    Trainer,
    TrainingPhase,
    TrainSettings,
    new_accelerator,
    processes,
    run_together,
)
from models.recipe.corpus import (
    END,
    END_OF_TEXT,
    KINDS,
    VOCAB_SIZE,
    Document,
    Kind,
    Tokens,
    WindowOrder,
    conversations,
    encode_documents,
    load_corpus,
    save_tokenizer,
    train_tokenizer,
)

# The shapes of the demonstration networks, and their Hugging Face folders.


@frozen
class Shape:
    """Sizes of a Llama with tied embeddings and heads of 64."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_context_len: int = 4096


# Head counts are even so that the target can be split over two tensor-parallel ranks.
TARGET = Shape(384, num_layers=6, num_heads=6, num_kv_heads=2, intermediate_size=896)
DRAFTER = Shape(192, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=512)


def build(shape: Shape, *, end_of_text_id: int, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A newly initialised network; the caller seeds torch."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_context_len,
        tie_word_embeddings=True,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
        initializer_range=0.02,
        attn_implementation="sdpa",
    )
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        # Every block starts as the identity, so depth does not slow the start of training.
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return network


def load(folder: Path) -> LlamaForCausalLM:
    """The network of a folder in float32, whatever its saved dtype, on this process's device."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: no model here; train it first with `make train`")
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(network, LlamaForCausalLM)
    network.to(processes().device)
    return network


def save(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face folder with bfloat16 weights."""
    stop_ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END)]
    network.generation_config = GenerationConfig(
        bos_token_id=stop_ids[0], eos_token_id=stop_ids, pad_token_id=stop_ids[0]
    )
    save_network(network, folder, "bfloat16")
    save_tokenizer(tokenizer, folder)


# Bits per byte of held-out text.


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


log = logging.getLogger(__name__)

TARGET_NAME = "demo-target"


@frozen
class Recipe:
    """How one model is trained.

    start: the shape of a new network, or the model whose weights it begins with.  streams: that it
    reads, some of them twice in an epoch.  share: of the budget of all models.
    """

    name: str
    start: Shape | str
    streams: Sequence[str]
    share: float
    phases: Sequence[TrainingPhase]
    tokens_per_step: int
    rates: Rates


_DRAFTER_PHASES = (TrainingPhase(0.0, 512, 4), TrainingPhase(0.85, 1024, 2))
_TASK_RATES = Rates(muon=0.006, adamw=0.0012, warmup=0.05, decay=0.95)
RECIPES = (
    Recipe(
        # More code than prose, which is easier: the demonstration serves mostly code.
        TARGET_NAME,
        TARGET,
        ("code", "code", "prose", "chat", "chat"),
        0.6,
        # Short windows are the cheapest per token; the long ones teach it to use its context.
        (TrainingPhase(0.0, 512, 4), TrainingPhase(0.72, 1024, 2), TrainingPhase(0.86, 2048, 1)),
        8192,
        Rates(),
    ),
    Recipe(
        "demo-draft",
        DRAFTER,
        ("code", "prose", "chat", "chat"),
        0.26,
        _DRAFTER_PHASES,
        4096,
        Rates(decay=0.7),
    ),
    Recipe("demo-draft-code", "demo-draft", ("code",), 0.07, _DRAFTER_PHASES, 4096, _TASK_RATES),
    Recipe("demo-draft-prose", "demo-draft", ("prose",), 0.07, _DRAFTER_PHASES, 4096, _TASK_RATES),
)


class LanguageLoss(nn.Module):
    """Next-token cross-entropy, with the softmax in float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """windows: int64[rows, length + 1].  Returns the mean in nats per token."""
        logits = self.network(input_ids=windows[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


class DistillationLoss(nn.Module):
    """KL(target || drafter) in nats, the mean over all places; the target is not trained."""

    def __init__(self, drafter: nn.Module, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.drafter = drafter
        self.target = target.requires_grad_(False).eval()

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """windows: int64[rows, length + 1]; the last token of each is not read."""
        inputs = windows[:, :-1]
        with torch.no_grad():
            wanted = self.target(input_ids=inputs, use_cache=False).logits
        drafted = self.drafter(input_ids=inputs, use_cache=False).logits
        ours, theirs = (
            torch.log_softmax(each.float().flatten(0, 1), dim=-1) for each in (drafted, wanted)
        )
        return nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def train_demo(
    work: Path, models: Path, names: Sequence[str], budget: Budget, num_processes: int, seed: int
) -> None:
    """Train the models of these names one after another, or go on with them; none = all.

    Raises ConfigError for unknown names, and where the text or a model to start from is missing."""
    known = [recipe.name for recipe in RECIPES]
    if unknown := set(names).difference(known):
        raise ConfigError(f"{min(unknown)}: no demonstration model; known: {', '.join(known)}")
    if not (work / "data" / "tokenizer").exists():
        write_streams(work / "data", seed)
    chosen = [recipe for recipe in RECIPES if not names or recipe.name in names]
    total = sum(recipe.share for recipe in chosen)
    for recipe in chosen:
        part = part_of(budget, recipe.share / total)
        run_together(num_processes, train_model, recipe, work, models, part, seed)


def part_of(budget: Budget, share: float) -> Budget:
    """That share of a budget, at least one step."""
    if budget.steps is not None:
        return Budget(steps=max(1, round(share * budget.steps)))
    assert budget.minutes is not None
    return Budget(minutes=share * budget.minutes)


def write_streams(folder: Path, seed: int) -> None:
    """Train the tokenizer on the corpus, and write each stream's tokens in a fixed order."""
    learnt = [each for each in load_corpus() if not each.is_held_out]
    texts: dict[str, list[str]] = {
        kind: [each.text for each in learnt if each.kind == kind] for kind in KINDS
    }
    texts["chat"] = [text for document in learnt for text in conversations(document)]
    tokenizer = train_tokenizer(each.text for each in learnt)
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in texts.items():
        order = np.random.default_rng(seed).permutation(len(parts))
        tokens = encode_documents([parts[index] for index in order], tokenizer)
        np.save(folder / f"{name}.npy", tokens)
        log.info("stream=%s tokens=%s", name, len(tokens))
    # The tokenizer last: where it is, everything is.
    save_tokenizer(tokenizer, folder / "tokenizer")


def train_model(recipe: Recipe, work: Path, models: Path, budget: Budget, seed: int) -> None:
    """Train one model, or go on where it was interrupted, and write its folder in `models`."""
    tokenizer = AutoTokenizer.from_pretrained(work / "data" / "tokenizer")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    torch.manual_seed(seed)
    if isinstance(recipe.start, str):
        network = load(models / recipe.start)
    else:
        end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        network = build(recipe.start, end_of_text_id=end_id, vocab_size=len(tokenizer))
    is_target, target = recipe.name == TARGET_NAME, models / TARGET_NAME
    objective = LanguageLoss(network) if is_target else DistillationLoss(network, load(target))
    compile_for_each_shape(objective)
    settings = TrainSettings(budget, recipe.phases, recipe.tokens_per_step, seed, recipe.rates)
    streams: list[Tokens] = [
        np.load(work / "data" / f"{name}.npy", mmap_mode="r") for name in recipe.streams
    ]
    orders = [WindowOrder(streams, phase.length, seed).read for phase in recipe.phases]
    Trainer(objective, orders, settings, work / f"{recipe.name}.pt").run()
    if processes().is_main_process:
        save(network, tokenizer, models / recipe.name)
        if not is_target:
            write_made_for(models / recipe.name, target_of(str(target)))


def compile_for_each_shape(objective: nn.Module) -> None:
    """Compile its forward for each shape of a batch; without a C++ compiler it stays as it is."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        log.warning("no C++ compiler found; training runs eagerly, about a third slower")
        return
    # The forward alone: its parameters keep their names, by which a checkpoint has them.
    objective.forward = torch.compile(objective.forward, dynamic=False)


def heldout_bits(model: Path, max_bytes: int | None) -> dict[str, BitsPerByte]:
    """Bits per byte of the corpus's held-out documents by kind, in windows of 2048 tokens."""
    network, tokenizer = load(model), AutoTokenizer.from_pretrained(model)
    held_out = [each for each in load_corpus() if each.is_held_out]
    return {
        kind: bits_per_byte(network, tokenizer, sample_documents(held_out, kind, max_bytes))
        for kind in KINDS
    }
