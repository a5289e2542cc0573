"""The `anthropic` package: messages, streamed by its helper, async, counted, refused."""

import anthropic
from checks import arguments, run

URL, MODEL = arguments()
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
ASK = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Name a city."}],
}


def check_message() -> None:
    answer = CLIENT.messages.create(system="Be short.", **ASK)
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 16


def check_stream_helper() -> None:
    with CLIENT.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text


async def check_async_stream() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(stream=True, **ASK)
        kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def check_an_error_is_its_own() -> None:
    try:
        CLIENT.messages.create(**{**ASK, "model": "nobody"})
    except anthropic.NotFoundError:
        return
    raise AssertionError("an unknown model was accepted")


run(globals())
