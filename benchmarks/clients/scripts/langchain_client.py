"""`langchain-openai`: invoke, stream, batch, structured output, tools, completions."""

import pydantic
from checks import arguments, run
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = arguments()
SETTING = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
CHAT = ChatOpenAI(temperature=0, max_tokens=48, timeout=60, **SETTING)


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")


def check_invoke() -> None:
    answer = CHAT.invoke([SystemMessage("Be short."), HumanMessage("Name a city.")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def check_stream() -> None:
    assert "".join(piece.content for piece in CHAT.stream("Name a city."))


def check_batch() -> None:
    assert len(CHAT.batch(["Name a city.", "Name a river.", "Name a lake."])) == 3


async def check_async() -> None:
    assert (await CHAT.ainvoke("Name a city.")).content


def check_structured_output() -> None:
    city = CHAT.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(city, City)


def check_tools() -> None:
    answer = CHAT.bind_tools([City], tool_choice="City").invoke("Name a city.")
    assert answer.tool_calls[0]["name"] == "City"


def check_responses_api() -> None:
    assert ChatOpenAI(use_responses_api=True, max_tokens=16, **SETTING).invoke("A city?").content


def check_completions() -> None:
    assert OpenAI(max_tokens=16, **SETTING).invoke("Once upon a time")


run(globals())
