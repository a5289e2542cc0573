"""The `openai` package: sync, async, streaming helpers, responses, parse, tools."""

import json

import openai
import pydantic
from checks import arguments, run

URL, MODEL = arguments()
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
ASK = [{"role": "user", "content": "Name a city."}]
SHORT = {"model": MODEL, "max_tokens": 12, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")
    is_capital: bool


def check_models() -> None:
    assert MODEL in [model.id for model in CLIENT.models.list()]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def check_completion() -> None:
    answer = CLIENT.completions.create(prompt="Once upon", n=2, logprobs=2, **SHORT)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens // 2


def check_completion_streamed() -> None:
    whole = CLIENT.completions.create(prompt="Once upon", **SHORT).choices[0].text
    stream = CLIENT.completions.create(prompt="Once upon", stream=True, **SHORT)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole


def check_chat() -> None:
    answer = CLIENT.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, **SHORT)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


async def check_chat_async_streamed() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(messages=ASK, **SHORT)
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(
            messages=ASK, stream=True, stream_options=usage, **SHORT
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == (whole.choices[0].message.content or "")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def check_chat_stream_helper() -> None:
    # The helper's last call raises for answers that end with `length`, as this one may.
    with CLIENT.chat.completions.stream(messages=ASK, **SHORT) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.current_completion_snapshot
    assert "".join(pieces) == final.choices[0].message.content


def check_parse() -> None:
    answer = CLIENT.chat.completions.parse(
        messages=ASK, model=MODEL, response_format=City, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def check_tool_required() -> None:
    answer = CLIENT.chat.completions.create(
        messages=ASK, model=MODEL, tools=[TOOL], tool_choice="required", max_tokens=64
    )
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason == "tool_calls"


def check_tool_named_streamed() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    with CLIENT.chat.completions.stream(
        messages=ASK, model=MODEL, tools=[TOOL], tool_choice=named, max_tokens=64
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def check_responses() -> None:
    first = CLIENT.responses.create(model=MODEL, input="Name a city.", max_output_tokens=16)
    assert first.output_text
    again = CLIENT.responses.create(
        model=MODEL, input="And one more.", previous_response_id=first.id, max_output_tokens=16
    )
    assert again.usage.input_tokens > first.usage.input_tokens


def check_responses_stream_helper() -> None:
    with CLIENT.responses.stream(model=MODEL, input="Name a city.", max_output_tokens=16) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    # The helper's last call takes `response.completed` alone, and this answer may be cut.
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text


def check_responses_parse() -> None:
    answer = CLIENT.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, max_output_tokens=64
    )
    assert isinstance(answer.output_parsed, City)


def check_an_error_is_its_own() -> None:
    try:
        CLIENT.chat.completions.create(messages=ASK, model=MODEL, temperature=9)
    except openai.BadRequestError as error:
        field = error.param
    else:
        field = "none: temperature 9 was accepted"
    assert field == "temperature", field
    try:
        CLIENT.chat.completions.create(messages=ASK, model="nobody")
    except openai.NotFoundError:
        return
    raise AssertionError("an unknown model was accepted")


run(globals())
