"""openvino-genai as a peer, in its own interpreter (`benchmarks.spec_bench.peers.engines`).

It reads the GGUF file as it is.  It counts no drafts: its lookup shows in its speed alone.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from typing import Any

from benchmarks.spec_bench.peers.engines import Output, Question

# The longest n-gram that its lookup searches the text for, as in its own samples.
_MAX_NGRAM = 3


@dataclass(slots=True)
class _Open:
    """A request that goes on."""

    handle: Any
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """A pipeline that batches continuously; see `benchmarks.spec_bench.peers.engines.Engine`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_seqs = arguments.max_sequences
        scheduler.max_num_batched_tokens = arguments.max_model_len
        scheduler.enable_prefix_caching = True
        self._num_drafts = arguments.num_speculative_tokens
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
        if self._num_drafts:
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            arguments.model, scheduler, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._open: dict[str, _Open] = {}

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, True)
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids
        return [int(token) for token in ids.data[0]]

    def add(self, name: str, prompt: list[int], asked: Question, *, to_the_end: bool) -> bool:
        import numpy as np
        import openvino  # type: ignore[import-not-found, unused-ignore]

        config = self._genai.GenerationConfig()
        config.max_new_tokens = asked["max_tokens"]
        config.ignore_eos = to_the_end
        config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        config.do_sample = asked["temperature"] > 0.0
        if config.do_sample:
            config.temperature = asked["temperature"]
        if self._num_drafts:
            config.num_assistant_tokens = self._num_drafts
            config.max_ngram_size = _MAX_NGRAM
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(int(name), ids, config)
        self._open[name] = _Open(handle)
        return True

    def step(self) -> list[Output]:
        self._pipeline.step()
        outputs = []
        for name, request in list(self._open.items()):
            before, reason = len(request.token_ids), ""
            while request.handle.can_read():
                for found in request.handle.read().values():
                    request.token_ids += map(int, found.generated_ids)
            if request.handle.get_status() != self._genai.GenerationStatus.RUNNING:
                reason = "ended"
                del self._open[name]
            if reason or len(request.token_ids) > before:
                text = self._tokenizer.decode(request.token_ids) if reason else ""
                outputs.append(Output(name, list(request.token_ids), reason, str(text)))
        return outputs
