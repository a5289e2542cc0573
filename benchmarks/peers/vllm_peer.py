"""vLLM as a peer, in its own interpreter: `PYTHON -m benchmarks.peers.vllm_peer MODEL --mode MODE`.

The engine runs in this process and is stepped directly, so that every token gets the time of its
step. Requests have no seeds, because per-request generators would slow down vLLM's sampler.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Question, Reply, redirect_stdout, serve_questions

MODES = ("plain", "ngram", "suffix", "draft", "eagle3")
_COUNTERS = {
    "steps": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment variables that vLLM needs to compute on the CPU's `cores`.

    By default it leaves one core free, which on two cores is half of the machine.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def speculative_config(mode: str, draft: str, num_tokens: int) -> dict[str, Any] | None:
    """vLLM's settings for one of its modes, with its own defaults if it has them."""
    if mode == "plain":
        return None
    if mode == "ngram":
        return {
            "method": "ngram", "num_speculative_tokens": num_tokens,
            "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        }  # fmt: skip
    if mode == "suffix":
        return {"method": "suffix", "num_speculative_tokens": num_tokens}
    method = "eagle3" if mode == "eagle3" else "draft_model"
    return {"method": method, "model": draft, "num_speculative_tokens": num_tokens}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-sequences", type=int, default=32)


def create_engine(arguments: argparse.Namespace, **more: Any) -> Any:
    """vLLM's `LLM`; more: further arguments of it."""
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    config = speculative_config(arguments.mode, arguments.draft, arguments.num_speculative_tokens)
    return LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_sequences,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=1,
        speculative_config=config,
        per_request_spec_decode_metrics="none" if config is None else "summary",
        **more,
    )


class Peer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._llm = create_engine(arguments)
        self._engine: Any = self._llm.llm_engine
        self._count = 0

    def answer(self, question: Question) -> Reply:
        """Run the prompts, `concurrency` at a time; a new one starts whenever one ends."""
        before = self._counters()
        prompts, waiting = question["prompts"], list(range(len(question["prompts"])))[::-1]
        answers: list[dict[str, Any]] = [{} for _ in prompts]
        running: dict[str, int] = {}
        while waiting or running:
            while waiting and len(running) < question["concurrency"]:
                index = waiting.pop()
                running[self._add(prompts[index], question)] = index
                answers[index] = {"submitted": time.perf_counter(), "events": [], "token_ids": []}
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                answer = answers[running[output.request_id]]
                ids = list(output.outputs[0].token_ids)
                if len(ids) > len(answer["token_ids"]):
                    answer["events"].append([now, len(ids)])
                    answer["token_ids"] = ids
                if output.finished:
                    del running[output.request_id]
        after = self._counters()
        grown = {name: after[name] - before[name] for name in after}
        return {"answers": answers, "acceptance": grown if grown.get("steps") else None}

    def _add(self, prompt: list[int], question: Question) -> str:
        from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.sampling_params import (  # type: ignore[import-not-found, unused-ignore]
            RequestOutputKind,
        )

        self._count += 1
        params = SamplingParams(
            temperature=question["temperature"],
            max_tokens=question["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        name = str(self._count)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _counters(self) -> dict[str, float]:
        values = {metric.name: metric for metric in self._llm.get_metrics()}
        return {
            short: float(values[name].value) if name in values else 0.0
            for short, name in _COUNTERS.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    line = redirect_stdout()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    serve_questions(line, Peer(arguments).answer)


if __name__ == "__main__":
    main()
