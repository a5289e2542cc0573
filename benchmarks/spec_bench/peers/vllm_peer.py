"""vLLM as a peer, in its own interpreter (`benchmarks.spec_bench.peers.engines`).

Requests have no seeds, because per-request generators would slow down vLLM's sampler.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.spec_bench.peers.engines import NO_DRAFTS, Output, Question


def speculative_config(mode: str, draft: str, num_tokens: int) -> dict[str, Any] | None:
    """vLLM's settings for one of its modes, with its own defaults if it has them."""
    if mode == "plain":
        return None
    if mode == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": num_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    if mode == "suffix":
        return {"method": "suffix", "num_speculative_tokens": num_tokens}
    method = "eagle3" if mode == "eagle3" else "draft_model"
    return {"method": method, "model": draft, "num_speculative_tokens": num_tokens}


class Engine:
    """vLLM's engine in this process; see `benchmarks.spec_bench.peers.engines.Engine`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        tokens = arguments.num_speculative_tokens
        config = speculative_config(arguments.mode, arguments.draft, tokens)
        self._llm: Any = LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_sequences,
            enable_prefix_caching=True,
            seed=1,
            # No defaults from the checkpoint, as over HTTP.
            generation_config="vllm",
            speculative_config=config,
            per_request_spec_decode_metrics="none" if config is None else "summary",
        )
        self._tokenizer: Any = self._llm.get_tokenizer()

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def add(self, name: str, prompt: list[int], asked: Question, *, to_the_end: bool) -> bool:
        from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.exceptions import (  # type: ignore[import-not-found, unused-ignore]
            VLLMClientError,
        )

        params = SamplingParams(
            temperature=asked["temperature"],
            max_tokens=asked["max_tokens"],
            top_p=1.0,
            ignore_eos=to_the_end,
            detokenize=not to_the_end,
        )
        try:
            self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        except (VLLMClientError, ValueError):
            return False
        return True

    def step(self) -> list[Output]:
        return [
            Output(
                each.request_id,
                list(each.outputs[0].token_ids),
                (each.outputs[0].finish_reason or "ended") if each.finished else "",
                each.outputs[0].text if each.finished else "",
                _statistics(each.outputs[0].spec_decode_metrics),
            )
            for each in self._llm.llm_engine.step()
        ]


def _statistics(metrics: Any) -> dict[str, int]:
    if metrics is None:
        return dict(NO_DRAFTS)
    found = metrics.to_dict()
    return {
        "steps": found["num_spec_steps"],
        "drafted": found["num_draft_tokens"],
        "accepted": found["num_accepted_draft_tokens"],
    }
