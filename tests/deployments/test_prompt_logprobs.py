"""Log-probabilities of prompts over HTTP and gRPC, in vLLM's shapes, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.deployments.server import Server

TOLERANCE = 1e-4
PROMPT = "The river runs past the old mill, and the mill has not run for years. " * 3
CHAT = [{"role": "user", "content": "hello there"}]
ENDLESS = {"temperature": 0, "ignore_eos": True}


def complete(server: Server, **body: Any) -> dict[str, Any]:
    return server.complete(**{**ENDLESS, **body})


def laws_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Row i: the law of the token after the first i + 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([token_ids])).logits[0].log_softmax(dim=1))


def values_of(folder: Path, token_ids: list[int]) -> list[float]:
    laws = laws_of(folder, token_ids)
    return [float(laws[i, token]) for i, token in enumerate(token_ids[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_log_probabilities_as_lm_eval_reads_them(server: Server, max_tokens: int):
    choice = complete(
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
    greatest = laws_of(server.folder, token_ids)[:-1].max(dim=1).values.tolist()
    tops = [max(top.values()) for top in found["top_logprobs"][1:]]
    assert tops == pytest.approx(greatest, abs=TOLERANCE)
    # The tiny model writes bytes that are no text; only the prompt's tokens are sure to be some.
    echoed = zip(choice["prompt_token_ids"], found["tokens"], found["text_offset"], strict=False)
    for _, token, offset in echoed:
        assert PROMPT[offset : offset + len(token)] == token


def test_prompt_logprobs_have_vllms_shape(server: Server):
    choice = complete(server, prompt=PROMPT, max_tokens=3, prompt_logprobs=2, return_token_ids=True)
    entries, token_ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert choice["logprobs"] is None
    assert entries[0] is None
    laws = laws_of(server.folder, token_ids)
    for index, (entry, token) in enumerate(zip(entries[1:], token_ids[1:], strict=True)):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(laws[index, token]), abs=TOLERANCE)
        assert own["decoded_token"] == server.ingress.tokenizer.token_text(token)
        assert 2 <= len(entry) <= 3
        ranks = sorted(one["rank"] for one in entry.values())
        assert ranks[:2] == [1, 2]
        for other, one in entry.items():
            assert one["logprob"] == pytest.approx(float(laws[index, int(other)]), abs=TOLERANCE)


def test_a_chat_has_the_log_probabilities_of_its_prompt(server: Server):
    answer = server.ask(
        "/v1/chat/completions",
        messages=CHAT,
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
    choice = complete(server, prompt=[5], max_tokens=0, prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [None]
    choice = complete(server, prompt=PROMPT, max_tokens=0, echo=True)
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
    choice = complete(server, prompt=[5], max_tokens=2, echo=True, logprobs=0)
    assert len(choice["logprobs"]["tokens"]) == 3
    echoed: dict[str, Any] = {**ENDLESS, "prompt": PROMPT, "max_tokens": 2, "echo": True}
    first, *later = server.stream("/v1/completions", **echoed)
    assert first["choices"][0]["text"] == PROMPT
    text = "".join(chunk["choices"][0]["text"] for chunk in (first, *later))
    assert text == complete(server, **echoed)["text"]
