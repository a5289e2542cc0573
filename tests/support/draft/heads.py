"""Draft heads for tiny targets, in the published forms: random ones, and ones that are right."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.engine.types import AttentionOptions

VOCAB_SIZE = 24
HIDDEN = 32
# How sure the target is of each next token, in units of its logits.
SURENESS = 6.0


# attend(layer, query [rows, heads, dim], key, value [rows, kv heads, dim]) -> [rows, heads, dim],
# by scores that are divided by the root of the size.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ByRows:
    """A `LayerPlan` by an `Attend`."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        query = query * (options.scaling * query.shape[-1] ** 0.5)
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        return self._attend(layer, query, key, value)[None]


def cyclic_target(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """A target that goes on with the next token's number, most of the time: its layers do nothing,
    and its hidden row after the final norm says which token stands there.

    settings: of its configuration."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**sizes, **settings})
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(VOCAB_SIZE, HIDDEN)
    model.lm_head.weight.data = _after(1)
    model.save_pretrained(folder)
    return folder


def right_eagle3(folder: Path) -> Path:
    """The head that knows how `cyclic_target` goes on: its layer turns each token's row into the
    next one's."""
    scale, sharp = HIDDEN**0.5, 4.0
    shift = torch.zeros(HIDDEN, HIDDEN)
    for token in range(VOCAB_SIZE):
        shift[(token + 1) % VOCAB_SIZE, token] = 1.0
        shift[token, token] -= 1.0
    # silu(sharp * scale) * scale is what the inner layer makes of a row that is normed.
    inner = float(torch.nn.functional.silu(torch.tensor(sharp * scale))) * scale
    tensors = {
        name: torch.ones_like(each) if each.dim() == 1 else torch.zeros_like(each)
        for name, each in eagle3_tensors(HIDDEN, HIDDEN, VOCAB_SIZE).items()
    }
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)), dim=1)
    tensors["lm_head.weight"] = _after(1)
    tensors["midlayer.mlp.gate_proj.weight"] = sharp * torch.eye(HIDDEN)
    tensors["midlayer.mlp.up_proj.weight"] = torch.eye(HIDDEN)
    tensors["midlayer.mlp.down_proj.weight"] = shift * scale / inner
    config = _eagle3_config(HIDDEN, HIDDEN, VOCAB_SIZE, VOCAB_SIZE)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 3, 3]}
    return written(folder, config, tensors)


def right_medusa(folder: Path, num_heads: int = 3) -> Path:
    """Heads that know how `cyclic_target` goes on."""
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.1.weight"] = _after(head + 2)
    return written(folder, {"medusa_num_heads": num_heads}, tensors, "medusa_lm_head.safetensors")


def random_eagle3(
    folder: Path, target: Path, *, fill: float | None = None, num_layers: int = 1, **keys: Any
) -> Path:
    """A head of random weights for a target's sizes, with a vocabulary of every third token.

    fill: what all of its output layer holds in place of random numbers.  keys: of its
    configuration."""
    config = AutoConfig.from_pretrained(target)
    size, vocab_size, reduced = config.hidden_size, config.vocab_size, config.vocab_size // 3
    has_bias = "attention_bias" in keys
    tensors = eagle3_tensors(size, 2 * size, reduced, num_layers=num_layers, has_bias=has_bias)
    tensors["lm_head.weight"] *= 4
    tensors["d2t"] = 2 * torch.arange(reduced)
    if "ptd_token_id" in keys:
        tensors["mask_hidden"] = torch.randn(
            1, 3 * size, generator=torch.Generator().manual_seed(2)
        )
    if fill is not None:
        tensors["lm_head.weight"].fill_(fill)
    said = _eagle3_config(size, 2 * size, vocab_size, reduced) | keys
    return written(folder, said | {"num_hidden_layers": num_layers}, tensors)


def random_peagle(folder: Path, target: Path, *, fill: float | None = None) -> Path:
    """A P-EAGLE head of random weights: two layers, three tokens a pass, biases, and the reduced
    vocabulary of `random_eagle3`."""
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    said = {"proposal_methods": methods, "default_proposal_method": "greedy"}
    return random_eagle3(
        folder,
        target,
        fill=fill,
        num_layers=2,
        ptd_token_id=5,
        attention_bias=True,
        speculators_config=said,
    )


def right_peagle(folder: Path) -> Path:
    """One whose first row knows how `cyclic_target` goes on; all others know nothing."""
    right_eagle3(folder)
    config = json.loads((folder / "config.json").read_text()) | {"ptd_token_id": 3}
    tensors = load_file(folder / "model.safetensors")
    tensors["mask_hidden"] = torch.zeros(1, 3 * HIDDEN)
    return written(folder, config, tensors)


def random_medusa(folder: Path, target: Path, *, fill: float | None = None) -> Path:
    """Three heads of random weights for a target's sizes."""
    config = AutoConfig.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for head in range(3):
        size = config.hidden_size
        tensors[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=generator) / 8
        tensors[f"{head}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{head}.1.weight"] = torch.randn(config.vocab_size, size, generator=generator)
        if fill is not None:
            tensors[f"{head}.1.weight"].fill_(fill)
    return written(folder, {"medusa_num_heads": 3}, tensors, "medusa_lm_head.safetensors")


def _after(distance: int) -> torch.Tensor:
    """An output layer: of the row that says `token`, most likely token + distance."""
    output = torch.zeros(VOCAB_SIZE, HIDDEN)
    for token in range(VOCAB_SIZE):
        output[(token + distance) % VOCAB_SIZE, token] = SURENESS / HIDDEN**0.5
    return output


def eagle3_tensors(
    size: int,
    inner: int,
    draft_vocab: int,
    prefix: str = "midlayer.",
    *,
    num_layers: int = 1,
    has_bias: bool = False,
) -> dict[str, torch.Tensor]:
    """Random ones of a head with heads as `_eagle3_config` has them.  prefix: of the first layer,
    which is twice as wide as those after it."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "fc.weight": drawn(size, 3 * size),
        "norm.weight": drawn(size) + 1,
        "lm_head.weight": drawn(draft_vocab, size),
        f"{prefix}hidden_norm.weight": drawn(size) + 1,
    }
    for layer in range(num_layers):
        own, wide = (f"layers.{layer}.", size) if layer else (prefix, 2 * size)
        shapes = {
            "self_attn.q": (size, wide),
            "self_attn.k": (size // 2, wide),
            "self_attn.v": (size // 2, wide),
            "self_attn.o": (size, size),
            "mlp.gate": (inner, size),
            "mlp.up": (inner, size),
            "mlp.down": (size, inner),
        }
        for name, shape in shapes.items():
            tensors[f"{own}{name}_proj.weight"] = drawn(*shape)
            if has_bias and name.startswith("self_attn"):
                tensors[f"{own}{name}_proj.bias"] = drawn(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{own}{name}.weight"] = drawn(size) + 1
    return tensors


def _eagle3_config(size: int, inner: int, vocab_size: int, draft_vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }


def written(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | None],
    name: str = "model.safetensors",
) -> Path:
    """Write a folder of a head; returns it.  Tensors that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = {key: each.contiguous() for key, each in tensors.items() if each is not None}
    save_file(held, folder / name)
    return folder
