"""A server in this process, on a thread with an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_a_thread(place: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `place` there, and leave it at the end of the block."""
    entered = Future()

    async def run() -> None:
        over = asyncio.Event()
        try:
            async with place as found:
                entered.set_result((found, asyncio.get_running_loop(), over))
                await over.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    found, loop, over = entered.result(60)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
