"""Clients that ask for the same texts again and again while a cluster is disturbed."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from cluster.client import AsyncClient, ClientError, Endpoint, GenerateRequest, SamplingOptions

MODEL = "tiny"
_TIMEOUT_S = 120.0


@dataclass
class Writers:
    """Clients over gRPC, which continue a text that broke, and over HTTP, which ask for it again;
    each with a seed and a connection of its own, all on one thread.

    addresses, urls: where ingresses may listen, for gRPC and HTTP.  wrong: texts that
    differ from the first one of their seed.  errors: streams that an error ended, by its name;
    their clients ask again.  http_timeout_s: an ingress that has stopped, or whose node is cut off,
    says nothing for so long.  rest_s: between two texts of a client.  longest_s: the longest time
    between two pieces of one gRPC stream since the caller has set it to 0.
    """

    addresses: Sequence[str]
    urls: Sequence[str]
    num_grpc: int
    num_http: int
    num_tokens: int
    http_timeout_s: float = 10.0
    rest_s: float = 0.5
    expected: dict[int, str] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write during the block; raises what a writer raised that is no error of the service."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._write_all())
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=run, name="writers")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
        if failures:
            raise failures[0]

    def wait(self, deadline_s: float = 120.0) -> None:
        """Return when every writer has ended a text that it had not begun at the call."""
        wanted = {seed: self.counts[seed] + 2 for seed in range(self.num_grpc + self.num_http)}
        end = time.monotonic() + deadline_s
        while any(self.counts[seed] < count for seed, count in wanted.items()):
            late = [seed for seed, count in wanted.items() if self.counts[seed] < count]
            assert time.monotonic() < end, f"writers {late} wrote nothing for {deadline_s:g} s"
            assert not self.wrong, self.wrong
            time.sleep(0.02)

    async def _write_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for seed in range(self.num_grpc):
                group.create_task(self._write(seed))
            for seed in range(self.num_grpc, self.num_grpc + self.num_http):
                group.create_task(self._write_http(seed))

    async def _write(self, seed: int) -> None:
        first = seed % len(self.addresses)
        ordered = [*self.addresses[first:], *self.addresses[:first]]
        # A silent ingress is left within three seconds.
        where = Endpoint("ipv4:" + ",".join(ordered), ping_s=2.0, ping_timeout_s=1.0)
        sampling = SamplingOptions(
            temperature=0.7, seed=seed, max_tokens=self.num_tokens, ignore_eos=True
        )
        request = GenerateRequest(model=MODEL, text=f"abc {seed} abc", sampling=sampling)
        async with AsyncClient(where, max_retries=30) as client:
            while not self._is_over.is_set():
                pieces = []
                last = time.monotonic()
                try:
                    async for response in client.generate(request, timeout_s=_TIMEOUT_S):
                        now = time.monotonic()
                        self.longest_s, last = max(self.longest_s, now - last), now
                        pieces += [choice.text for choice in response.choices]
                except ClientError as error:
                    self.errors[type(error).__name__] += 1
                    continue
                await self._take(seed, "".join(pieces))

    async def _write_http(self, seed: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"abc {seed} abc",
            "max_tokens": self.num_tokens,
            "temperature": 0.7,
            "seed": seed,
            "ignore_eos": True,
        }
        for attempt in itertools.count(seed):
            if self._is_over.is_set():
                return
            url = f"{self.urls[attempt % len(self.urls)]}/v1/completions"
            # A new connection each time: an ingress may have gone since the last.
            try:
                async with httpx.AsyncClient(timeout=self.http_timeout_s) as client:
                    answer = (await client.post(url, json=body)).raise_for_status().json()
            except httpx.ConnectError:  # no ingress is there, and no text was lost
                continue
            except httpx.HTTPError as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(0.1)
                continue
            await self._take(seed, answer["choices"][0]["text"])

    async def _take(self, seed: int, text: str) -> None:
        if self.expected.setdefault(seed, text) != text:
            self.wrong.append(f"seed {seed}: {text!r}, not {self.expected[seed]!r}")
        self.counts[seed] += 1
        # Others use the machine too: 32 clients without a rest take every core there is.
        await asyncio.sleep(self.rest_s)
