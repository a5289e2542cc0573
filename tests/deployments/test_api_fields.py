"""Fields of requests and answers over HTTP with a real engine, without Ray; log-probabilities of
prompts against transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments.server import Server
from tests.support.engine.driver import laws_of, load_oracle, prompt
from tests.support.local_models import engine

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


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
    special = server.ingress.tokenizer.encode("<|im_end|>").tolist()
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
    text = server.ingress.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is")
    bare = server.ask("/tokenize", messages=messages, add_generation_prompt=False)
    text = server.ingress.tokenizer.decode(bare["tokens"], skip_special_tokens=False)
    assert text.endswith("It is<|im_end|>\n")


TOLERANCE = 1e-4
PROMPT = "The river runs past the old mill, and the mill has not run for years. " * 3


def values_of(folder: Path, token_ids: list[int]) -> list[float]:
    laws = laws_of(load_oracle(folder), token_ids)
    return [float(law[token]) for law, token in zip(laws, token_ids[1:], strict=True)]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_log_probabilities_as_lm_eval_reads_them(server: Server, max_tokens: int):
    choice = whole(
        server,
        prompt=PROMPT,
        max_tokens=max_tokens,
        echo=True,
        logprobs=2,
        return_token_ids=True,
    )
    token_ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    found = choice["logprobs"]
    assert len(choice["token_ids"]) == max_tokens
    assert choice["text"].startswith(PROMPT)
    assert choice["finish_reason"] == "length"
    assert {len(values) for values in found.values()} == {len(token_ids)}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    expected = values_of(server.folder, token_ids)
    assert found["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
    greatest = laws_of(load_oracle(server.folder), token_ids).max(dim=1).values.tolist()
    tops = [max(top.values()) for top in found["top_logprobs"][1:]]
    assert tops == pytest.approx(greatest, abs=TOLERANCE)
    # The tiny model writes bytes that are no text; only the prompt's tokens are sure to be some.
    echoed = zip(choice["prompt_token_ids"], found["tokens"], found["text_offset"], strict=False)
    for _, token, offset in echoed:
        assert PROMPT[offset : offset + len(token)] == token


def test_prompt_logprobs_have_vllms_shape(server: Server):
    choice = whole(server, prompt=PROMPT, max_tokens=3, prompt_logprobs=2, return_token_ids=True)
    entries, token_ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert choice["logprobs"] is None
    assert entries[0] is None
    laws = laws_of(load_oracle(server.folder), token_ids)
    for entry, token, law in zip(entries[1:], token_ids[1:], laws, strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(law[token]), abs=TOLERANCE)
        assert own["decoded_token"] == server.ingress.tokenizer.token_text(token)
        assert 2 <= len(entry) <= 3
        ranks = sorted(one["rank"] for one in entry.values())
        assert ranks[:2] == [1, 2]
        for other, one in entry.items():
            assert one["logprob"] == pytest.approx(float(law[int(other)]), abs=TOLERANCE)


def test_a_chat_has_the_log_probabilities_of_its_prompt(server: Server):
    answer = server.ask(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello there"}],
        max_completion_tokens=0,
        prompt_logprobs=1,
        return_token_ids=True,
    )
    token_ids = answer["prompt_token_ids"]
    found = [
        entry[str(token)]["logprob"]
        for entry, token in zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True)
    ]
    assert found == pytest.approx(values_of(server.folder, token_ids), abs=TOLERANCE)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_prompts_of_one_token_and_echoes_alone_are_answered(server: Server):
    choice = whole(server, prompt=[5], max_tokens=0, prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [None]
    choice = whole(server, prompt=PROMPT, max_tokens=0, echo=True)
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
    choice = whole(server, prompt=[5], max_tokens=2, echo=True, logprobs=0)
    assert len(choice["logprobs"]["tokens"]) == 3
    echoed = {**GREEDY, "prompt": PROMPT, "max_tokens": 2, "echo": True}
    first, *later = server.stream("/v1/completions", **echoed)
    assert first["choices"][0]["text"] == PROMPT
    text = "".join(chunk["choices"][0]["text"] for chunk in (first, *later))
    assert text == whole(server, **echoed)["text"]


@pytest.fixture
def page_size(llama_folder: Path) -> int:
    return engine(llama_folder).page_size


def usage_of(server: Server, prompt: list[int] | list[list[int]], **body: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "prompt": prompt, "max_tokens": 2}
    return server.ask("/v1/completions", **asked, **body)["usage"]


def cached(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_full_pages_of_an_earlier_prompt_are_counted(server: Server, page_size: int):
    asked = prompt(5 * page_size + 3, seed=7).tolist()
    assert cached(usage_of(server, asked)) == 0
    assert cached(usage_of(server, asked)) == 5 * page_size
    # What differs is behind the third page.
    assert cached(usage_of(server, [*asked[: 3 * page_size + 1], *[9] * 40])) == 3 * page_size
    assert cached(usage_of(server, asked, cache_salt="other")) == 0


def test_prompts_are_counted_once_each_and_samples_of_one_are_not(server: Server, page_size: int):
    first = prompt(2 * page_size + 1, seed=11).tolist()
    second = prompt(3 * page_size + 1, seed=13).tolist()
    # The other samples share the first one's pages; what the request itself computed is no hit.
    assert cached(usage_of(server, first, n=3, seed=1)) == 0
    usage_of(server, second)
    assert cached(usage_of(server, [first, second], n=2, seed=1)) == 5 * page_size


def test_the_samples_of_a_scored_prompt_find_it_in_the_cache(
    server: Server, page_size: int, monkeypatch: pytest.MonkeyPatch
):
    asked = prompt(4 * page_size + 1, seed=23).tolist()
    hits = []
    submit = server.ingress.coordinators.submit

    def spied(request: Any, arrived: Any) -> Any:
        ticket = submit(request, arrived)
        take = ticket.take

        def taken() -> Any:
            events = take()
            if not request.params.forced_ids:
                hits.extend(event.num_cached for event in events)
            return events

        ticket.take = taken
        return ticket

    monkeypatch.setattr(server.ingress.coordinators, "submit", spied)
    usage_of(server, asked, prompt_logprobs=0)
    assert set(hits) == {4 * page_size}


def test_every_endpoint_says_it_in_its_own_words(server: Server, page_size: int):
    """The same conversation again: all of it but the last, broken page and what follows it."""
    text = "Tell me of the river, of the mill, and of the years since. " * 3
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    usage = server.ask("/v1/chat/completions", **chat)["usage"]
    expected = (usage["prompt_tokens"] - 1) // page_size * page_size
    assert expected > page_size
    assert cached(server.ask("/v1/chat/completions", **chat)["usage"]) == expected
    responses = {"input": text, "max_output_tokens": 2, "store": False}
    found = server.ask("/v1/responses", **responses)["usage"]
    assert found["input_tokens_details"]["cached_tokens"] == expected
    found = server.ask("/v1/messages", **chat)["usage"]
    assert found["cache_read_input_tokens"] == expected
    assert found["input_tokens"] + expected == usage["prompt_tokens"]
