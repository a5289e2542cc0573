"""What `drafthouse serve` waits for after the replicas run."""

import pytest

from cluster.errors import WorkerError
from deployments.readiness import engine_line, wait_until_connected

URL = "http://127.0.0.1:8000"


def test_a_connected_application_is_ready():
    said = []
    state = {"status": "ok", "drafters": {"lm": 1}}
    wait_until_connected(lambda: state, URL, ["lm"], lambda: None, said.append)
    assert said == []


def test_a_refused_drafter_is_told_with_its_reason_and_not_waited_for():
    refused = {"lm": "other tokenizer", "m": "other tokenizer", "target.config": "no such key"}
    body = {"status": "ok", "drafters": {"lm": 0, "n": 1}, "refused": refused}
    said = []
    at_once = iter([None]).__next__  # fails where it is called again
    wait_until_connected(lambda: body, URL, ["lm", "n"], at_once, said.append)
    assert said == [
        "drafter lm, drafter m are refused: other tokenizer",
        "target.config is refused: no such key",
    ]


def test_an_application_that_never_serves_is_an_error_that_says_why():
    body = {"status": "unavailable", "coordinators": 1, "targets": 0}
    told = rf'{URL}/health says unavailable \{{"coordinators": 1, "targets": 0\}}'
    with pytest.raises(WorkerError, match=told):
        wait_until_connected(lambda: body, URL, [], lambda: None, lambda text: None, patience_s=0.0)


ENGINE = {
    "role": "target",
    "worker": "t",
    "name": "",
    "device": "cuda:0",
    "attention": "triton",
    "graphs": "cuda",
    "kernels": "triton",
    "kv_bytes": 2**31,
    "kv_tokens": 93_200,
    "fallbacks": [],
}


def test_the_ready_line_says_what_the_target_computes_with():
    assert engine_line({"engines": [ENGINE]}) == (
        "target on cuda:0: attention triton, CUDA graphs, kernels triton, KV cache 2 GiB "
        "(93,200 tokens)"
    )
    slow = ENGINE | {"attention": "sdpa", "graphs": "none", "fallbacks": ["a", "b"]}
    resident = ENGINE | {"name": "lm", "fallbacks": ["c"]}
    line = engine_line({"engines": [resident, slow]})
    assert "attention sdpa, kernels" in line
    assert line.endswith(", slower than wanted: a (2 more in /health)")
    assert engine_line({"engines": [slow | {"fallbacks": ["a"]}]}).endswith(
        ", slower than wanted: a"
    )
    narrow = ENGINE | {"device": "cpu", "kernels": "native", "products": "avx2"}
    assert "kernels native, products: avx2, KV cache" in engine_line({"engines": [narrow]})
    assert engine_line({"status": "nothing"}) == ""
