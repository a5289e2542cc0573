"""The gRPC API on its own listener: models, tokens, and log-probabilities of prompts."""

from collections.abc import Iterator

import grpc
import httpx
import pytest

from cluster.client import (
    AsyncClient,
    ChatMessage,
    ChatMessages,
    Client,
    DetokenizeRequest,
    GenerateRequest,
    InvalidRequestError,
    SamplingOptions,
    TokenizeRequest,
)
from tests.support.deployments.server import MODEL, Server

CHAT = ChatMessages(
    messages=[
        ChatMessage(role="user", content="hello"),
        ChatMessage(role="assistant", content="yes?"),
    ]
)


@pytest.fixture
def client(grpc_address: str) -> Iterator[Client]:
    with Client(grpc_address) as client:
        yield client


def test_the_models_are_those_of_http(client: Client, server: Server):
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    models = client.list_models().models
    assert [model.id for model in models] == [card["id"] for card in cards]
    assert [model.max_context_len for model in models] == [card["max_model_len"] for card in cards]
    assert (models[0].root, models[0].parent) == (MODEL, "")


@pytest.mark.parametrize("adds", [True, False])
def test_tokens_are_those_of_http(client: Client, server: Server, adds: bool):
    body = {"prompt": "Grüße an alle", "add_special_tokens": adds}
    expected = server.ask("/tokenize", **body)["tokens"]
    request = TokenizeRequest(text=body["prompt"], add_special_tokens=adds)
    assert list(client.tokenize(request).token_ids) == expected
    body = {"messages": [{"role": turn.role, "content": turn.content} for turn in CHAT.messages]}
    expected = server.ask("/tokenize", **body)["tokens"]
    request = TokenizeRequest(chat=CHAT, model=MODEL)
    assert list(client.tokenize(request).token_ids) == expected


async def test_the_asyncio_client_says_the_same(grpc_address: str, client: Client):
    async with AsyncClient(grpc_address) as other:
        assert await other.list_models() == client.list_models()
        hello = TokenizeRequest(text="hello")
        tokens = await other.tokenize(hello)
        assert tokens == client.tokenize(hello)
        back = DetokenizeRequest(token_ids=tokens.token_ids)
        assert await other.detokenize(back) == client.detokenize(back)
        assert client.detokenize(back).text == "hello"
        with pytest.raises(InvalidRequestError):
            await other.tokenize(TokenizeRequest(text="x", model="gpt-5"))


def test_what_is_wrong_is_named(client: Client, grpc_address: str):
    with pytest.raises(InvalidRequestError, match="'gpt-5' is not served"):
        client.detokenize(DetokenizeRequest(token_ids=[1], model="gpt-5"))
    with pytest.raises(InvalidRequestError) as caught:
        client.detokenize(DetokenizeRequest(token_ids=[10**6]))
    assert caught.value.param == "token_ids"
    with pytest.raises(InvalidRequestError, match="at least one token"):
        client.detokenize(DetokenizeRequest())
    with grpc.insecure_channel(grpc_address) as channel:
        for body in (b"", b"\xff\xff\xff"):  # no prompt, no message
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/drafthouse.v1.GenerationService/Tokenize")(body)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_prompt_is_scored_without_an_output(client: Client, server: Server):
    sampling = SamplingOptions(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    answer = client.complete(GenerateRequest(model=MODEL, text="hello there", sampling=sampling))
    choice = server.complete(prompt="hello there", max_tokens=0, echo=True, logprobs=2)
    values = list(answer.prompt_logprobs.logprobs)
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)
    assert list(answer.prompt_logprobs.num_top) == [2] * len(values)
    assert answer.usage.completion_tokens == 0
    nothing = SamplingOptions(max_tokens=0)
    with pytest.raises(InvalidRequestError, match="max_tokens: 0 asks for nothing"):
        client.complete(GenerateRequest(model=MODEL, text="x", sampling=nothing))


def test_usage_and_predictions_reach_the_client(client: Client):
    sampling = SamplingOptions(temperature=0.0, max_tokens=4)
    request = GenerateRequest(
        model=MODEL, text="many words " * 20, sampling=sampling, prediction="and more"
    )
    client.complete(request)
    (*_, last) = client.generate(request)
    assert 0 < last.usage.cached_tokens < last.usage.prompt_tokens
    assert last.speculative_decoding.prediction_idle_because == "no_prediction_drafter"
