"""What weights in few bits cost: bits per byte of held-out text under the same model.

    python -m benchmarks.exactness.bits --model smollm2-135m-instruct
    python -m benchmarks.exactness.bits --model FOLDER --only bf16,int8/bf16

The model reads the held-out code and prose of `models/` by our engine, in one process: each excerpt
after the token that begins (or else ends) texts, as far as fits one step.  Every format reads the
same tokens.  The summary compares them with `bf16`: the weights as they were widened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.support import prompts
from benchmarks.support.options import add_options, parser_of, words
from benchmarks.support.record import OUT, Record, rows
from cluster.config.parse import parse
from cluster.config.schema import EngineConfig
from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.engine import Engine, Work
from cluster.engine.work import run_alone
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve

# Keys of `engine` by the name of a format; behind a stroke that of the output layer.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "stored": {},
    "stored/bf16": {"output_weights": "bf16"},
    "int8": {"weights": "int8"},
    "int8/bf16": {"weights": "int8", "output_weights": "bf16"},
    "int4g32": {"weights": "int4"},
    "int4g32/bf16": {"weights": "int4", "output_weights": "bf16"},
}
_REFERENCE = "bf16"
_REQUEST = "bits"

Texts = Sequence[tuple[TokenArray, int]]


def main() -> None:
    parser = parser_of(__doc__)
    add_options(
        parser,
        model="smollm2-135m-instruct",
        only=(words, f"some of: {','.join(FORMATS)}"),
        rows=(512, "tokens of an excerpt, at most"),
        excerpts=(int, "of each kind; all of them by default"),
        out=OUT / "exactness" / "bits.json",
        fresh=(False, "measure anew, not go on"),
    )
    options = parser.parse_args()
    if unknown := set(options.only or ()) - FORMATS.keys():
        parser.error(f"no such format: {', '.join(sorted(unknown))}")
    texts = excerpts(options.model, options.rows, options.excerpts)
    settings = {
        "model": options.model,
        "rows": options.rows,
        "excerpts": {kind: len(each) for kind, each in texts.items()},
        "bytes": {kind: sum(size for _, size in each) for kind, each in texts.items()},
    }
    record = Record(options.out, settings, fresh=options.fresh)
    for name in options.only or FORMATS:
        if name not in record.results:
            record.add(name, _figures(options.model, options.rows, FORMATS[name], texts))
    print(rows(record.publish(with_differences(record.results))))


def _figures(
    model: str, max_rows: int, keys: Mapping[str, Any], texts: Mapping[str, Texts]
) -> dict[str, Any]:
    settings = {"model": model, "device": "cpu", "max_batch_tokens": max_rows, **keys}
    engine = Engine.load(parse(EngineConfig, settings))
    return {
        "weights": engine.model.weights or str(engine.layers[0].dtype).removeprefix("torch."),
        **{kind: round(bits_per_byte(engine, each), 5) for kind, each in texts.items()},
    }


def excerpts(model: str, max_rows: int, count: int | None) -> dict[str, Texts]:
    """The held-out texts by kind: the tokens, of which the first begins a text, and the bytes that
    the others stand for."""
    tokenizer = load_pretrained_tokenizer(resolve(model))
    first = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if first is None else first
    found: dict[str, list[tuple[TokenArray, int]]] = {}
    for each in prompts.excerpts():
        encoded = tokenizer(each.text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"][: max_rows - 1]
        text = each.text[: encoded["offset_mapping"][len(ids) - 1][1]]
        found.setdefault(each.kind, []).append((token_array([first, *ids]), len(text.encode())))
    return {kind: texts[:count] for kind, texts in found.items()}


def bits_per_byte(engine: Engine, texts: Texts) -> float:
    """The cost of the texts in one step each: all tokens but the first are a tree of one path."""
    nats, num_bytes = 0.0, 0
    for tokens, size in tqdm(texts, leave=False):
        output = run_alone(engine, Work(_REQUEST, 0, tokens[:1], TokenTree.chain(tokens[1:])))
        engine.release(_REQUEST)
        assert output.logits is not None, output
        laws = output.logits[:-1].double().log_softmax(dim=1)
        chosen = torch.from_numpy(tokens[1:].astype("int64"))
        nats -= float(laws.gather(1, chosen[:, None]).sum())
        num_bytes += size
    return nats / math.log(2.0) / num_bytes


def with_differences(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each format's figures, and by how much they exceed the reference's, in per cent."""
    reference = found.get(_REFERENCE)
    if reference is None:
        return dict(found)
    kinds = [kind for kind in reference if kind != "weights"]
    return {
        name: {
            **figures,
            "more, %": {
                kind: round(100 * (figures[kind] / reference[kind] - 1), 3) for kind in kinds
            },
        }
        for name, figures in found.items()
    }


if __name__ == "__main__":
    main()
