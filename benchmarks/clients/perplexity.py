"""Checks that `lm_eval` finds the same perplexity over HTTP as transformers.

    python -m benchmarks.clients.perplexity

`lm_eval` asks a started server, in float32, for its log-probabilities of held-out texts; then
transformers reads the same texts with the same model in float32.  Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.__main__ import free_ports
from benchmarks.clients.environments import Environments
from benchmarks.clients.plan import CLIENTS, Setting
from benchmarks.clients.running import rows_of
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, ROOT, show_report
from benchmarks.support.serving import running
from cluster.config.file import load
from cluster.models.resolve import resolve

# The tolerance is relative: a perplexity of hundreds has fewer exact decimals than one near 1.
_MOST_APART = 1e-3
_SETTINGS = ("target.engine.dtype=float32",)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clients.perplexity", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--url", help="a server of that model in float32, not one of its own")
    parser.add_argument("--venvs", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, default=OUT / "clients" / "perplexity.json")
    options = parser.parse_args()
    exit_on_sigterm()
    overrides = [*_SETTINGS, *options.overrides]
    folder = resolve(load(options.config, overrides).config.target.engine.model)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        with running(options.config, [*free_ports(), *overrides], options.url) as server:
            model = server.model()
            found = _asked(Setting(server.url, model, folder, work), options.venvs)
        pages = [sample["doc"]["page"] for sample in found["samples"]]
    expected = figures(pages, log_likelihoods(folder, pages))
    apart = {name: abs(found["figures"][name] / value - 1.0) for name, value in expected.items()}
    is_equal = all(each <= _MOST_APART for each in apart.values())
    report = {
        "settings": {
            "config": options.config, "model": model, "overrides": overrides,
            "lm_eval": found["version"], "texts": len(pages),
        },
        "summary": {
            "lm_eval over HTTP": found["figures"], "transformers": expected, "apart": apart,
            "is_equal": is_equal,
        },
    }  # fmt: skip
    show_report(options.out, report)
    sys.exit(not is_equal)


def _asked(setting: Setting, venvs: Path) -> dict[str, Any]:
    """Return lm_eval's results: its figures, its samples and its version."""
    client = next(each for each in CLIENTS if each.name == "lm_eval")
    rows = rows_of(client, Environments(venvs, None), setting, only="perplexity")
    for row in rows:
        if row.result != "passed":
            raise SystemExit(f"lm_eval {row.check}: {row.result}: {row.note}")
    (results,) = setting.work.glob("perplexity/**/results_*.json")
    (samples,) = setting.work.glob("perplexity/**/samples_*.jsonl")
    (measured,) = json.loads(results.read_text("utf-8"))["results"].values()
    named = {name.partition(",")[0]: value for name, value in measured.items()}
    lines = samples.read_text("utf-8").splitlines()
    return {
        "figures": {name: named[name] for name in figures(["a"], [0.0])},
        "samples": [json.loads(line) for line in lines],
        "version": rows[0].version,
    }


def figures(pages: Sequence[str], found: Sequence[float]) -> dict[str, float]:
    """Perplexities from the texts' log-likelihoods, as lm_eval defines them."""
    num_words = sum(len(re.split(r"\s+", page)) for page in pages)
    num_bytes = sum(len(page.encode()) for page in pages)
    total = sum(found)
    return {
        "word_perplexity": math.exp(-total / num_words),
        "byte_perplexity": math.exp(-total / num_bytes),
        "bits_per_byte": -total / num_bytes / math.log(2),
    }


def log_likelihoods(folder: Path, pages: Sequence[str]) -> list[float]:
    """Compute each text's log-likelihood by transformers in float32, after the token that begins
    (or else ends) texts."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if first is None else first
    found = []
    for page in pages:
        ids = tokenizer.encode(page, add_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([[first, *ids[:-1]]])).logits[0]
            chosen = logits.double().log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        found.append(float(chosen.sum()))
    return found


if __name__ == "__main__":
    main()
