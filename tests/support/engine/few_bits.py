"""Models in few bits beside transformers' with the weights that they stand for."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.engine.engine import Engine, Work
from cluster.models.experts import unstacked
from cluster.models.grouped import StoredGroups, in_eight_bits, in_four_bits
from tests.support.engine.driver import generate, last_logits, load_oracle, prompt, rows, run
from tests.support.engine.products import in_few_bits, rounding_rows


def widened(folder: Path, settings: Mapping[str, Any]) -> Any:
    """transformers' model with the weights that an engine with such settings has."""
    oracle = unstacked(load_oracle(folder))
    stored = StoredGroups(folder)
    rounded = in_four_bits if settings.get("weights") == "int4" else in_eight_bits
    for name, layer in oracle.named_modules():
        if in_few_bits(layer):
            weight = rounded(layer.weight) if settings else stored[name]
            layer.weight.data = weight.dequantized()
    return oracle


def check_texts(engine: Engine, oracle: Any) -> None:
    """Greedy text is the oracle's, whose rows are rounded, but for near-ties."""
    errors, leads = [], []
    with rounding_rows(oracle), routed_as(oracle, engine.model.module):
        for number in range(10):
            text = prompt(8 + number, number)
            context = [*text.tolist(), *generate(oracle, text, 4)]
            for end in range(len(text), len(context)):
                given = torch.tensor(context[:end]).numpy().astype("int32")
                logits = last_logits(oracle, given)
                found = rows(run(engine, Work(f"{number}-{end}", 0, given)))[0]
                engine.release(f"{number}-{end}")
                first, second = logits.topk(2).values
                leads.append(float((first - second) / logits.std()))
                # A random network's near-ties fall by the rounding of keys to bfloat16, which
                # moves inputs to their next integer.
                assert first - logits[found.argmax()] < 0.2 * logits.std()
                errors.append(float((found - logits).norm() / logits.norm()))
    assert max(errors) < 0.2
    assert np.median(errors) < 0.06
    assert np.mean(np.array(leads) > 0.2) > 0.4  # which are no near-ties


@contextmanager
def routed_as(oracle: Any, module: Any) -> Iterator[None]:
    """Inside the context rows go to the experts, and count for as much, as in the oracle's last
    forward, which was of the same rows."""
    routed = {}
    with ExitStack() as hooks:
        for (name, theirs), (_, ours) in zip(_routers(oracle), _routers(module), strict=True):
            note = lambda _, rows, output, name=name: routed.update({name: output})  # noqa: E731
            answer = lambda _, rows, output, name=name: routed[name]  # noqa: E731
            hooks.enter_context(theirs.register_forward_hook(note))
            hooks.enter_context(ours.register_forward_hook(answer))
        yield


def _routers(module: Any) -> list[tuple[str, torch.nn.Module]]:
    named = module.named_modules()
    return [each for each in named if type(each[1]).__name__.endswith("TopKRouter")]
