"""Fields of requests over HTTP with a real engine, without Ray."""

from typing import Any

from cluster.text.tokenizer import Tokenizer
from tests.support.deployments.server import Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def test_best_of_answers_with_the_likeliest_samples(server: Server):
    asked = {**GREEDY, "prompt": "abc", "temperature": 1.0, "seed": 4, "logprobs": 0}
    every = server.ask("/v1/completions", **asked, n=4)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    wanted = [choice["text"] for choice in sorted(every, key=mean, reverse=True)[:2]]
    best = server.ask("/v1/completions", **asked, n=2, best_of=4)
    assert [choice["text"] for choice in best["choices"]] == wanted
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 48
    del asked["logprobs"]
    (only,) = server.ask("/v1/completions", **asked, n=1, best_of=4)["choices"]
    assert only["text"] == wanted[0]
    assert only["logprobs"] is None


def whole(server: Server, **body: Any) -> dict[str, Any]:
    return server.complete(**{**GREEDY, "prompt": "abc", **body})


def test_the_text_may_keep_its_stop_string(server: Server):
    text = whole(server)["text"]
    stop = text[4:6]
    end = text.index(stop)
    without = whole(server, stop=[stop])
    with_it = whole(server, stop=[stop], include_stop_str_in_output=True)
    assert (without["text"], with_it["text"]) == (text[:end], text[: end + len(stop)])
    assert without["finish_reason"] == with_it["finish_reason"] == "stop"


def test_special_tokens_are_text_if_they_are_asked_for(server: Server):
    special = Tokenizer.load(server.folder).encode("<|im_end|>").tolist()
    bias = {"max_tokens": 2, "logit_bias": {str(special[0]): 100}}
    assert whole(server, **bias)["text"] == ""
    shown = whole(server, **bias, skip_special_tokens=False)["text"]
    assert shown == "<|im_end|>" * 2


def test_a_prompt_keeps_its_last_tokens(server: Server):
    asked = {"prompt": list(range(20, 60)), "return_token_ids": True}
    for count, kept in ((0, 40), (7, 7), (40, 40), (100, 40), (-1, 40)):
        choice = whole(server, **asked, truncate_prompt_tokens=count)
        assert choice["prompt_token_ids"] == list(range(60 - kept, 60))
    choice = whole(server, prompt=[5] * 600, truncate_prompt_tokens=-1, return_token_ids=True)
    assert len(choice["prompt_token_ids"]) == 512 - 12
    # An output that the context could never hold asks for no room of its own.
    endless = {"max_tokens": 10_000, "truncate_prompt_tokens": -1, "return_token_ids": True}
    assert len(whole(server, prompt=[5] * 600, **endless)["prompt_token_ids"]) == 512 - 1


def test_every_chunk_may_have_the_usage_so_far(server: Server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**GREEDY, "prompt": "abc", "stream_options": options}
    chunks = server.stream("/v1/completions", **asked)
    found = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert found == sorted(found)
    assert found[0] > 0
    assert found[-1] == 12


def test_log_probabilities_may_name_tokens_by_their_ids(server: Server):
    asked = {"logprobs": 2, "return_token_ids": True}
    plain = whole(server, **asked)
    named = whole(server, **asked, return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in plain["token_ids"]]
    for top in named["logprobs"]["top_logprobs"]:
        assert all(name.startswith("token_id:") for name in top)
    for key in ("token_logprobs", "text_offset"):
        assert named["logprobs"][key] == plain["logprobs"][key]


def test_the_last_message_may_be_continued(server: Server):
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "It is"}]
    asked = {"messages": messages, "continue_final_message": True}
    tokens = server.ask("/tokenize", **asked)["tokens"]
    text = Tokenizer.load(server.folder).decode(tokens, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is")
    bare = server.ask("/tokenize", messages=messages, add_generation_prompt=False)
    text = Tokenizer.load(server.folder).decode(bare["tokens"], skip_special_tokens=False)
    assert text.endswith("It is<|im_end|>\n")
