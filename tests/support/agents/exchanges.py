"""What passes through an HTTP application: each request with its answer."""

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(slots=True)
class Exchange:
    """path: with the query.  answer: what has been sent of it.  is_whole: whether all of it has."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    is_whole: bool = False

    @property
    def is_stream(self) -> bool:
        return self.answer_headers.get("content-type", "").startswith("text/event-stream")


class Exchanges:
    """An application around another, which notes what is asked and answered."""

    def __init__(self, app: ASGIApp, noted: list[Exchange]) -> None:
        self._app = app
        self._noted = noted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode()
        exchange = Exchange(
            scope["method"],
            scope["path"] + (f"?{query}" if query else ""),
            {name.decode(): value.decode("latin-1") for name, value in scope["headers"]},
        )
        self._noted.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.answer_headers = {
                    name.decode(): value.decode() for name, value in message.get("headers", [])
                }
            else:
                exchange.answer += message.get("body", b"")
                exchange.is_whole = not message.get("more_body", False)
            await send(message)

        await self._app(scope, received, sent)
