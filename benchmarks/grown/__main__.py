"""Writes a larger checkpoint that computes the same function as a small one.

    python -m benchmarks.grown OUT --shape 231m
    python -m benchmarks.grown OUT --hidden 1024 --layers 16 --heads 16 --kv-heads 4 \
        --intermediate 3760

The gain of speculative decoding depends on the cost ratio of two models and on how often they
agree. Small models trained on a laptop agree like real pairs, but the target is too cheap; a large
random model has a realistic cost but agrees with no drafter.  The grown target has the small
model's text at a large model's cost.  Its config contains `grown_from`; label every figure measured
with it as grown.

How it computes the same function (`benchmarks/grown/layers.py` has the algebra):

* the residual stream is padded with zeros from width d to H, and norm weights absorb the change of
  the mean: w * sqrt(d / H), eps * d / H;
* extra heads and neurons write nothing, because their columns of o_proj and down_proj are zero;
* extra layers write nothing, so the residual passes through them;
* all other new weights are small random numbers, so that no multiplication by zero is skipped.

The head dimension and the vocabulary do not change, so the 1B and 8B shapes have that many
parameters without the embedding of a large vocabulary.  Layers are written one at a time.

Fails unless the logits on held-out text agree in float32.  --dtype bfloat16 rounds the rescaled
norm weights again, which that check does not cover: it prints the largest difference of logits and
the share of equal argmaxes instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.grown.layers import DTYPES, SHAPES, Grower, Shape, Weights, logits_of
from benchmarks.support.options import DEMO_TARGET, add_options, parser_of
from benchmarks.support.prompts import heldout
from benchmarks.support.record import rows

TOLERANCE = 2e-3  # for float32 logits, whose range is a few tens
_TEXT_LEN = 192


def grow(
    source: Path,
    out: Path,
    shape: Shape,
    *,
    texts: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Write the grown checkpoint into `out`; returns the results of the check.

    texts: token ids on which the logits are compared.  tolerance: largest allowed difference.
    Raises ValueError if the source does not fit into `shape` or is not a plain Llama,
    ArithmeticError if the logits differ by more.
    """
    grower = Grower(source, shape, seed)
    out.mkdir(parents=True, exist_ok=True)
    _copy_other_files(source, out)
    weight_map: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for index, weights in enumerate(grower.parts()):
        name = f"model-{index:05d}.safetensors"
        stored = {key: tensor.to(dtype).contiguous() for key, tensor in weights.items()}
        save_file(stored, out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, name)
        num_parameters += sum(tensor.numel() for tensor in stored.values())
        num_bytes += sum(tensor.nbytes for tensor in stored.values())
    index_file = {
        "metadata": {"total_parameters": num_parameters, "total_size": num_bytes},
        "weight_map": weight_map,
    }
    _write_json(out / "model.safetensors.index.json", index_file)
    _write_json(out / "config.json", grower.config(str(dtype).removeprefix("torch."), seed))
    expected = logits_of(grower.source_config, grower.source_parts(), texts)
    exact = logits_of(grower.grown_config, grower.parts(), texts)
    difference = _difference(expected, exact)
    # Written this way so that NaN fails too.
    if not difference <= tolerance:
        raise ArithmeticError(
            f"the grown logits differ by {difference:.3g} in float32, {tolerance:g} is allowed; "
            f"{out} is not the same function, delete it"
        )
    saved = logits_of(grower.grown_config, saved_parts(out), texts)
    return {
        "parameters": num_parameters,
        "bytes": num_bytes,
        "positions compared": sum(len(text) for text in texts),
        "largest difference, float32": difference,
        f"largest difference, saved as {str(dtype).removeprefix('torch.')}": _difference(
            expected, saved
        ),
        "equal argmax, saved": _agreement(expected, saved),
    }


def saved_parts(folder: Path) -> Iterator[Weights]:
    """The weights of a grown checkpoint on disk, part by part, in the order written."""
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    for name in sorted(set(index["weight_map"].values())):
        yield load_file(folder / name)


def _difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


def _agreement(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    equal = [(a.argmax(-1) == b.argmax(-1)) for a, b in zip(expected, found, strict=True)]
    return float(torch.cat(equal).float().mean())


def _copy_other_files(source: Path, out: Path) -> None:
    """Copy tokenizer, chat template and generation settings: all but config and weights."""
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in (".safetensors", ".bin", ".pt") or "index.json" in file.name
        if file.is_file() and file.name != "config.json" and not is_weights:
            shutil.copyfile(file, out / file.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(rows(content) + "\n", "utf-8")


def heldout_texts(source: Path, count: int = 4) -> list[list[int]]:
    """Held-out code and prose, tokenised for `source`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    half = count // 2
    texts = heldout("code", half, tokenizer, _TEXT_LEN // 2, _TEXT_LEN)
    return texts + heldout("prose", count - half, tokenizer, _TEXT_LEN // 2, _TEXT_LEN)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, help="folder of the new checkpoint")
    add_options(
        parser,
        source=DEMO_TARGET,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a preset; options override it")
    for name in ("hidden", "layers", "heads", "kv-heads", "intermediate"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add_options(
        parser,
        seed=0,
    )
    return parser


def _shape(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Shape:
    preset = SHAPES.get(arguments.shape)
    values: dict[str, int] = {}
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate"):
        value = getattr(arguments, name)
        if value is None and preset is not None:
            value = getattr(preset, name)
        if value is None:
            parser.error(f"give --shape or --{name.replace('_', '-')}")
        values[name] = value
    return Shape(**values)


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    shape = _shape(arguments, parser)
    try:
        report = grow(
            arguments.source,
            arguments.out,
            shape,
            texts=heldout_texts(arguments.source),
            dtype=DTYPES[arguments.dtype],
            seed=arguments.seed,
        )
    except (ArithmeticError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{arguments.out}: {report['parameters'] / 1e6:.1f}M parameters, grown")
    print(rows(report))


if __name__ == "__main__":
    main()
