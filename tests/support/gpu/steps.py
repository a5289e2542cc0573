"""What a step asks of a GPU: kernels, copies, waits and bytes, by the engine's own code on `meta`.

A model is built at its true configuration, with two and with four layers; the difference is a
layer.  Graphs are the engine's own too: what it would capture runs once and is counted, and a
replay does nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
from transformers.initialization import no_tie_weights

from cluster.config.schema import EngineConfig
from cluster.core import SamplingParams, TokenArray, TokenMask, TokenTree, token_array
from cluster.engine.attention import seam
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.triton.backend import Shape, TritonForm
from cluster.engine.attention.triton.layout import Frame
from cluster.engine.draw.batch import BatchDraws
from cluster.engine.draw.triton import draw_tokens
from cluster.engine.fused.forward import fused_forward
from cluster.engine.graphs.capture import Replay
from cluster.engine.graphs.forward import LOGIT_ROWS, WIDTHS, GraphedForward
from cluster.engine.loading.model import LoadedModel
from cluster.engine.loading.planned import forward_bytes
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.pool_sizes import num_logit_rows, reserve, run
from cluster.engine.paths import StepInputs
from cluster.engine.schedule.batch import Batch
from cluster.grammar.text import GrammarHook
from cluster.records import record
from cluster.rpc.messages import Open
from cluster.spec.draw import DrawRows, begin_draw
from cluster.worker.step_rows import TargetSequence, logprobs_of
from cluster.worker.texts import TargetText
from tests.support.gpu.counting import META, Counting
from tests.support.gpu.launches import Launch
from tests.support.gpu.models import config_of, head_dim_of, layers_of

Counts = Mapping[str, int]

_PAGE = 16
_PROGRAMS = 264  # two for each multiprocessor of an H100
# Of a step of eight texts.
_WIDTH = 8
FEW, MORE = 2, 4  # layers
MANY = 2048  # rows of a step, where as many are configured


class Forms(SdpaBackend):
    """As the Triton backend is one behind its first step on a GPU."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def form(self, num_rows: int, max_rows: int) -> TritonForm:
        """See `AttentionBackend`."""
        lines = self._shape.block_lines(max_rows)
        tiling = self._shape.tiling(lines, _PROGRAMS)
        return TritonForm(self._shape, lines, tiling, Frame.holding(num_rows, tiling))


class CountingCapture:
    """A capture that counts.  operators, collectives: of the last graph."""

    def __init__(self, counting: Counting) -> None:
        self.operators = Counter()
        self.collectives = Counter()
        self._counting = counting

    def __call__(self, run: Callable[[], None]) -> Replay:
        before, said = self._counting.counted(), self._counting.collectives.copy()
        run()
        self.operators = self._counting.counted() - before
        self.collectives = self._counting.collectives - said
        return lambda: None


def built(config: Any, num_ranks: int = 1) -> LoadedModel:
    """The model on `meta`, ready for the engine's forwards.  num_ranks: of which it is one's share,
    split by transformers' own plan; inside of `collectives.ranks`."""
    seam.register()
    with META, no_tie_weights() if num_ranks > 1 else nullcontext():  # as while it is loaded
        module = AutoModelForCausalLM.from_config(
            config, attn_implementation=seam.IMPLEMENTATION, dtype=config.dtype
        )
    if num_ranks > 1:
        given, _, mesh = module.prepare_distribute_model(DistributedConfig(num_ranks, "auto"))
        module.maybe_distribute_model(module, given, mesh)
    heads = local_heads(config, num_ranks)
    layers = tuple(replace(each, num_kv_heads=heads[1]) for each in layers_of(config, META))
    limit = config.max_position_embeddings
    module.eval().requires_grad_(False)
    with torch.no_grad():
        fused = fused_forward(module, layers, limit)
    return LoadedModel(
        module=module,
        source="",
        architecture=type(module).__name__,
        layers=layers,
        device=META,
        vocab_size=config.vocab_size,
        max_context_len=limit,
        eos_token_ids=(),
        fused=fused,
    )


def local_heads(config: Any, num_ranks: int) -> tuple[int, int]:
    """Heads and key heads of a rank: all of them, where the plan does not split attention."""
    kv_heads = config.num_key_value_heads
    own = get_kv_heads_per_rank(config.base_model_tp_plan or {}, kv_heads, num_ranks)
    return config.num_attention_heads * own // kv_heads, own


def shape_of(config: Any, num_ranks: int = 1) -> Shape:
    """Of a layer's attention on a rank."""
    heads, kv_heads = local_heads(config, num_ranks)
    return Shape(heads, kv_heads, head_dim_of(config), config.dtype, META)


def cache_of(model: LoadedModel) -> KVCache:
    """Of a page for each group of layers."""
    groups = len({each.window is None for each in model.layers})
    return KVCache(model.layers, [1] * groups, _PAGE)


@record
class Step:
    """A step of eight rows.  operators, collectives, launched: of its graph, the latter our
    kernels.  beside: what is done besides."""

    operators: Counter[str]
    collectives: Counter[str]
    launched: Sequence[Launch]
    beside: Counts


def step_of(name: str, num_layers: int, num_ranks: int = 1) -> Step:
    """A step of a model of so many layers, in a graph; of so many ranks that of one."""
    config = config_of(name, num_layers)
    model = built(config, num_ranks)
    cache, forms = cache_of(model), Forms(shape_of(config, num_ranks))
    with torch.no_grad(), Counting() as counting:
        capture = CountingCapture(counting)
        graphs = GraphedForward(
            model, cache, forms, capture, widths=WIDTHS, rest_words=1024, vote=bool
        )
        zeros = np.zeros(_WIDTH, np.int64)
        batches = [Batch((), zeros, zeros, zeros, zeros)] * len(cache.groups)
        assert graphs(batches) is not None, graphs.failure
        before, copies = counting.counted(), counting.copies
        assert graphs(batches) is not None, graphs.failure
        beside = {
            "launches beside the graph": (counting.counted() - before).total(),
            "copies to the device": counting.copies - copies,
        }
    return Step(capture.operators, capture.collectives, counting.launched, beside)


def by_layer(few: Counter[str], more: Counter[str], what: str) -> Counts:
    """What is counted of a layer, and outside of layers."""
    layer, rest = divmod(more.total() - few.total(), MORE - FEW)
    assert rest == 0, "layers of one kind differ"
    return {
        f"{what} a layer": layer,
        f"{what} outside of layers": few.total() - FEW * layer,
    }


def of_architecture(name: str) -> Counts:
    """The row of a model: see the names."""
    few, more = step_of(name, FEW), step_of(name, MORE)
    return {
        **by_layer(few.operators, more.operators, "kernels"),
        **few.beside,
        **memory_of(name),
        **{f"{what}, at {MANY} rows": size for what, size in memory_of(name, MANY).items()},
    }


def memory_of(name: str, max_batch_tokens: int = 0) -> Counts:
    """Bytes at the largest step: what it takes, and what is reserved for it, by the configuration
    and by a forward at load.  max_batch_tokens: 0 = the default."""
    engine = EngineConfig(model="any")
    if max_batch_tokens:
        engine = replace(engine, max_batch_tokens=max_batch_tokens)
    config = config_of(name, FEW)
    model, rows = built(config), engine.max_batch_tokens
    drawn = num_logit_rows(engine)
    forward = _forward_bytes(model, config, rows, drawn)
    drawing = drawn * config.vocab_size * 4 + _drawing_bytes(drawn, config.vocab_size)
    width = min(WIDTHS[-1], rows)
    # Its pool, and the logits that are outside of it.
    num_logits = min(LOGIT_ROWS, width)
    graphs = _forward_bytes(model, config, width, num_logits) + num_logits * config.vocab_size * 4
    estimate = forward_bytes(config, config.vocab_size, config.dtype, ranks=1)
    planned, at_load = (
        reserve(engine, model.layers, config.vocab_size, drawn, each, on_one_gpu=True).total
        for each in (estimate, partial(_probed_bytes, model))
    )
    return {
        "bytes of the forward": forward,
        "bytes of the draws": drawing,
        "bytes of graphs": graphs,
        "bytes of all": max(forward, drawing) + graphs,
        "bytes reserved by the configuration": planned,
        "bytes reserved": at_load,
    }


def _forward_bytes(model: LoadedModel, config: Any, num_rows: int, num_logits: int) -> int:
    """Of an eager step: one prompt's chunk."""
    form, cache = Forms(shape_of(config)).form(num_rows, num_rows), cache_of(model)
    words = torch.zeros(form.frame.rest, dtype=torch.int32, device=META)
    rows = torch.zeros(num_rows, dtype=torch.int64, device=META)
    count = len(cache.groups)
    plan = seam.AttentionStep(cache, model.layers, [form.plan(words)] * count, [rows] * count)
    with torch.no_grad(), Counting() as counting:
        model.forward(StepInputs(rows, rows, rows[:num_logits], plan))
    return counting.peak_bytes


def _probed_bytes(model: LoadedModel, num_rows: int, num_logits: int) -> int:
    """As at load."""
    with Counting() as counting:
        run(model, num_rows, num_logits)
    return counting.peak_bytes


def _drawing_bytes(num_rows: int, vocab_size: int) -> int:
    """Beside the logits, of texts of eight rows whose laws ask for everything."""
    law = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    batch = _texts(num_rows // _WIDTH, law, vocab_size)
    with torch.no_grad(), Counting(answer=lambda *_: True) as counting:
        BatchDraws(batch, None, draw_tokens).taken()
    return counting.peak_bytes


def _texts(
    count: int, law: SamplingParams, vocab_size: int, hook: GrammarHook | None = None
) -> list[TargetSequence]:
    """So many, of eight rows each."""
    tree = TokenTree.of(range(_WIDTH - 1), range(-1, _WIDTH - 2))
    found = []
    for number in range(count):
        text = TargetText(str(number), Open(str(number), 0, token_array([0]), 0, 1, law, 0))
        found.append(TargetSequence(text, vocab_size, META, hook))
        found[-1].begin(tree)
        found[-1].logits = torch.zeros((_WIDTH, vocab_size), device=META)
    return found


# What follows the forward.

_LAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    # As Llama's own generation config has it.
    "truncated": SamplingParams(temperature=0.6, top_p=0.9),
}


def move() -> Counts:
    """Of the keys of the accepted nodes of 32 texts, to where they stay."""
    cache = cache_of(built(config_of("Llama-3.1-8B", FEW)))
    with torch.no_grad(), Counting() as counting:
        for first in range(0, 32 * _PAGE, _PAGE):
            cache.move(0, [first + 3, first + 5], [first + 2, first + 3])
        cache.settle()
    return asked(counting)


def asked(counting: Counting) -> dict[str, int]:
    """What a page says of something beside the forward."""
    return {
        "kernels": counting.counted().total(),
        "copies to the device": counting.copies,
        "pageable copies": counting.pageable,
        "waits": counting.waits,
    }


def draws(num_rows: int, vocab_size: int) -> dict[str, Counts]:
    """Of the target's draw at rows of each law."""
    found = {}
    for name, law in _LAWS.items():
        rows = DrawRows.of([law], [np.zeros(num_rows, np.int64)])
        logits = torch.zeros((num_rows, vocab_size), device=META)
        with torch.no_grad(), Counting(answer=lambda *_: None) as counting:
            begin_draw(logits, None if name == "greedy" else rows, draw_tokens).taken()
        found[name] = {**asked(counting), "bytes": counting.peak_bytes}
    return found


class _Masked:
    """A hook that allows all tokens of a vocabulary."""

    def __init__(self, num_words: int) -> None:
        self._masks = np.full((_WIDTH, num_words), 2**32 - 1, np.uint32)

    def extend(self, token_ids: TokenArray) -> None:
        """See `GrammarHook`."""

    def prepare(self, tree: TokenTree) -> range:
        """See `GrammarHook`."""
        return range(len(tree))

    def masks(self) -> TokenMask:
        """See `GrammarHook`."""
        return self._masks


def adjusted(num_texts: int, vocab_size: int) -> Counts:
    """Of draws by laws that ask for everything, and log-probabilities, of texts of eight rows."""
    law = SamplingParams(
        temperature=0.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((5, 1.0),),
        min_tokens=9,
        stop_token_ids=(7,),
        logprobs=2,
    )
    path = np.arange(2, dtype=np.int32)
    with torch.no_grad(), Counting(answer=lambda *_: None) as counting:
        batch = _texts(num_texts, law, vocab_size, _Masked(-(-vocab_size // 32)))
        BatchDraws(batch).taken()
        for each in batch:
            each.counts.add(token_array([3]))
            logprobs_of(each, path, token_array([1, 2, 3]))
    return asked(counting)
