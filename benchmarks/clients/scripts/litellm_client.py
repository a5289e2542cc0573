"""`litellm`: as an OpenAI-compatible server, as hosted vLLM, as Anthropic's API."""

import litellm
from checks import arguments, run

URL, MODEL = arguments()
ASK = {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 12, "timeout": 60}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
VLLM = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}


def check_completion() -> None:
    answer = litellm.completion(**OPENAI, **ASK)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def check_streamed() -> None:
    pieces = [
        chunk.choices[0].delta.content for chunk in litellm.completion(stream=True, **OPENAI, **ASK)
    ]
    assert "".join(piece or "" for piece in pieces)


async def check_async() -> None:
    assert (await litellm.acompletion(**OPENAI, **ASK)).choices[0].message.content


def check_hosted_vllm() -> None:
    assert litellm.completion(**VLLM, **ASK).choices[0].message.content


def check_text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="Once upon",
        max_tokens=8,
        api_base=f"{URL}/v1",
        api_key="none",
    )
    assert answer.choices[0].text


def check_anthropic() -> None:
    assert litellm.completion(**ANTHROPIC, **ASK).choices[0].message.content


run(globals())
