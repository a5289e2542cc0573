"""Drafts of another engine: followed as they come, and an engine that fails costs its own alone."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config.schema import DrafterConfig
from cluster.core import Proposal, SamplingParams
from cluster.draft import registry
from cluster.draft.base import DrafterContext, Waking
from cluster.draft.hit_rates import HitRates
from cluster.draft.openai import OpenAIDrafter
from cluster.draft.openai_options import OpenAIOptions
from cluster.errors import ConfigError
from cluster.models.token_bytes import TokenBytes
from tests.support.draft.author import GREEDY, Author, grow
from tests.support.draft.scripted_engine import (
    PATIENCE_S,
    Gate,
    Script,
    ScriptedEngine,
    continues,
    event,
    head,
    says,
    scripted,
    sends,
)

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo-target")
CONTEXT = DrafterContext("peer", 16, 4, target_model=DEMO)
WHOLE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def tokenizer() -> TokenBytes:
    return TokenBytes.load(DEMO)


class Stage:
    """A drafter whose engine is scripted, and the news that it tells of."""

    def __init__(self, engine: ScriptedEngine, **options: Any) -> None:
        self.engine = engine
        self.now = 0.0
        settings = OpenAIOptions(**{"url": engine.url, **options})
        self.drafter = OpenAIDrafter(CONTEXT, settings, lambda: self.now)
        self._news = threading.Event()
        self.drafter.wake_by(self._news.set)

    def grown(
        self, author: Author, is_enough: Callable[[Proposal], bool] = lambda found: True
    ) -> Proposal:
        """The first proposal that is enough; asked for whenever something has come."""
        while True:
            found = grow(self.drafter, author).get(author.request_id)
            if found is not None and is_enough(found):
                return found
            self.wait()

    def wait(self) -> None:
        assert self._news.wait(PATIENCE_S)
        self._news.clear()

    def settle(self, author: Author, is_so: Callable[[], bool]) -> None:
        """Ask for trees until something of the drafter's is so."""
        grow(self.drafter, author)
        while not is_so():
            self.wait()
            grow(self.drafter, author)

    def open(self, author: Author) -> None:
        self.drafter.observe([author.opening()])

    def commit(self, author: Author, token_ids: list[int]) -> None:
        self.drafter.observe([author.commit(token_ids)])


def told(caplog: pytest.LogCaptureFixture) -> str:
    """What the drafter has logged."""
    ours = [each for each in caplog.records if each.name == OpenAIDrafter.__module__]
    return "\n".join(each.getMessage() for each in ours)


@contextmanager
def stage(script: Script, **options: Any) -> Iterator[Stage]:
    with scripted(script) as engine:
        made = Stage(engine, **options)
        yield made
        made.drafter.release([request.request_id for request in made.drafter._requests])


def test_the_draft_is_what_the_engine_says_in_the_targets_tokens(tokenizer: TokenBytes) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with stage(continues(WHOLE), model="theirs", max_tokens=40) as running:
        running.open(author)
        proposal = running.grown(author, lambda found: len(found.tree) > 3)
        body = running.engine.requests[0]
    ids = tokenizer.encode(WHOLE)
    count = len(author.tokens)
    assert proposal.tree.token_ids.tolist() == ids[count : count + len(proposal.tree)]
    assert proposal.tree.parents.tolist() == list(range(-1, len(proposal.tree) - 1))
    rates = [HitRates().rate(depth + 1) for depth in range(len(proposal.tree))]
    assert proposal.survival.tolist() == pytest.approx(np.cumprod(rates).tolist())
    assert body == {
        "model": "theirs", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True
    }  # fmt: skip


def test_it_grows_as_the_engine_speaks_and_is_asked_for_more_in_time(
    tokenizer: TokenBytes,
) -> None:
    ids = tokenizer.encode(WHOLE)
    author = Author(ids[:4])
    with stage(continues(WHOLE), max_tokens=48) as running:
        running.open(author)
        assert isinstance(running.drafter, Waking)
        hits = 0
        while len(author.tokens) < len(ids) - 40:
            token = ids[len(author.tokens)]
            hits += int(running.grown(author).tree.token_ids[0]) == token
            running.commit(author, [token])
        prompts = running.engine.prompts
    assert hits > 40
    assert len(prompts) < 14, "an answer is followed, not asked for again at every token"
    assert all(WHOLE.startswith(prompt) for prompt in prompts)
    assert prompts == sorted(prompts, key=len)


def test_survival_follows_what_became_of_drafts(tokenizer: TokenBytes) -> None:
    ids = tokenizer.encode(WHOLE)
    author = Author(ids[:4])
    with stage(continues(WHOLE), max_tokens=48) as running:
        running.open(author)
        rates = []
        while len(author.tokens) < len(ids) - 60:
            rates.append(running.grown(author).survival[0])
            running.commit(author, [ids[len(author.tokens)]])
        assert rates[-1] > rates[0] + 0.2


def test_a_text_that_goes_another_way_gives_the_answer_up_and_asks_anew(
    tokenizer: TokenBytes,
) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with scripted(says()) as engine:
        gate = Gate(engine)

        async def script(body: dict[str, Any]) -> Any:
            yield head()
            yield event(" fox jumps over")
            await gate.wait()

        engine.script = script
        running = Stage(engine)
        running.open(author)
        running.grown(author)
        engine.script = says(" sleeps in the sun", reason="stop")
        running.commit(author, tokenizer.encode(" dog"))
        proposal = running.grown(author)
        engine.wait_for(lambda: engine.num_left == 1)
        assert engine.prompts == [PROMPT, PROMPT + " dog"]
        gate.open()
        running.drafter.release(["a"])
    assert tokenizer.decode(proposal.tree.token_ids.tolist()) == b" sleeps in the sun"


def test_the_same_bytes_in_other_tokens_keep_the_draft(tokenizer: TokenBytes) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with stage(says(" fox jumps over the dog", reason="stop")) as running:
        running.open(author)
        running.grown(author, lambda found: found.is_complete)
        running.commit(author, [tokenizer.write(bytes([byte]))[0][0] for byte in b" fo"])
        proposal = running.grown(author)
        assert tokenizer.decode(proposal.tree.token_ids.tolist()).startswith(b"x jumps over")
        assert len(running.engine.requests) == 1


def test_an_engine_that_is_behind_catches_up_or_is_given_up(tokenizer: TokenBytes) -> None:
    ids = tokenizer.encode(WHOLE)
    author = Author(ids[:4])
    with scripted(says()) as engine:
        gate = Gate(engine)
        answer = continues(WHOLE)

        async def script(body: dict[str, Any]) -> Any:
            await gate.wait()
            async for piece in answer(body):
                yield piece

        engine.script = script
        running = Stage(engine, max_tokens=60)
        running.open(author)
        assert grow(running.drafter, author) == {}
        engine.wait_for(lambda: bool(engine.requests))
        running.commit(author, ids[4:8])
        assert grow(running.drafter, author) == {}
        gate.open()
        assert running.grown(author).tree.token_ids[0] == ids[8]
        assert len(engine.requests) == 1
        running.drafter.release(["a"])


def test_one_that_is_always_late_is_left_alone_for_a_while(tokenizer: TokenBytes) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with stage(says("", reason="stop"), rest_s=5.0) as running:
        running.open(author)
        for count in range(1, 4):
            running.settle(author, lambda count=count: len(running.engine.requests) == count)
            running.settle(author, lambda: next(iter(running.drafter._requests)).is_ended)
            running.commit(author, tokenizer.encode(" and"))
        assert grow(running.drafter, author) == {}
        running.commit(author, tokenizer.encode(" and"))
        assert grow(running.drafter, author) == {}
        assert len(running.engine.requests) == 3
        running.engine.script, running.now = continues(WHOLE), 5.0
        other = Author(tokenizer.encode(PROMPT), request_id="b")
        running.open(other)
        assert len(running.grown(other).tree)


def test_no_more_answers_are_under_way_than_may_be(tokenizer: TokenBytes) -> None:
    with scripted(says()) as engine:
        gate = Gate(engine)

        async def script(body: dict[str, Any]) -> Any:
            yield head()
            yield event(" fox jumps over it")
            await gate.wait()
            yield event("", "length")

        engine.script = script
        running = Stage(engine, concurrency=2)
        authors = [Author(tokenizer.encode(PROMPT + " " * n), request_id=f"r{n}") for n in range(3)]
        for author in authors:
            running.open(author)
        for author in authors[:2]:
            running.grown(author)
        assert grow(running.drafter, *authors) == {}
        assert len(engine.requests) == 2
        gate.open()
        running.grown(authors[2])
        running.drafter.release([author.request_id for author in authors])


def test_a_long_text_is_sent_from_a_place_that_seldom_moves(tokenizer: TokenBytes) -> None:
    text = "".join(f"Line {number} of many.\n" for number in range(200))
    ids = tokenizer.encode(text)
    author = Author(ids[:-90])
    with stage(says(" nonsense and more of that"), max_prompt_bytes=1024) as running:
        running.open(author)
        for start in range(len(ids) - 90, len(ids), 10):
            running.grown(author)
            running.commit(author, ids[start : start + 10])
        prompts = running.engine.prompts
    assert len(prompts) > 8
    assert all(512 <= len(prompt) <= 1024 and prompt in text for prompt in prompts)
    assert len({prompt[:50] for prompt in prompts}) <= 2


def test_a_prompt_has_no_opening_and_may_be_without_marks(tmp_path: Path) -> None:
    folder = tmp_path / "opened"
    _with_opening(folder)
    context = DrafterContext("peer", 16, 4, target_model=str(folder))
    tokenizer = TokenBytes.load(folder)
    assert tokenizer.opening
    mark, token_id = next((m, i) for m, i in tokenizer.marks.items() if i not in tokenizer.opening)
    ids = [*tokenizer.opening, token_id, *tokenizer.encode("hi")]
    prompts = {}
    for marks in ("text", "drop"):
        with scripted(says(" there it is")) as engine:
            drafter = OpenAIDrafter(context, OpenAIOptions(url=engine.url, marks=marks))  # type: ignore[arg-type]
            drafter.observe([Author(ids).opening()])
            grow(drafter, Author(ids))
            engine.wait_for(lambda engine=engine: bool(engine.requests))
            prompts[marks] = engine.prompts[0]
            drafter.release(["a"])
    assert prompts == {"text": f"{mark}hi", "drop": "hi"}


def _with_opening(folder: Path) -> None:
    from tokenizers import processors

    from tests.support.checkpoints import byte_tokenizer

    pretrained = byte_tokenizer()
    opening = pretrained.bos_token
    pretrained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{opening} $A", special_tokens=[(opening, pretrained.bos_token_id)]
    )
    pretrained.save_pretrained(folder)
    (folder / "config.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize(
    ("tenants", "tenant", "is_sent"),
    [
        ("auto", b"salted", True),  # the engine is this machine's own
        ("all", b"salted", True),
        ("unsalted", b"salted", False),
        ("unsalted", b"", True),
    ],
)
def test_texts_of_tenants_are_sent_where_they_may_be(
    tokenizer: TokenBytes, tenants: str, tenant: bytes, is_sent: bool
) -> None:
    author = Author(tokenizer.encode(PROMPT), tenant=tenant)
    with stage(continues(WHOLE), tenants=tenants) as running:
        running.open(author)
        if is_sent:
            running.grown(author)
        else:
            assert grow(running.drafter, author) == {}
        assert len(running.engine.requests) == is_sent


def test_auto_means_all_for_this_machine_alone() -> None:
    assert OpenAIOptions(url="http://localhost:8080/v1").sends_all
    assert OpenAIOptions(url="https://[::1]:8080").sends_all
    assert not OpenAIOptions(url="http://10.0.0.7:8080").sends_all
    assert not OpenAIOptions(url="http://localhost.example:8080").sends_all


def test_a_request_that_wants_no_drafts_is_not_sent(tokenizer: TokenBytes) -> None:
    author = Author(tokenizer.encode(PROMPT), max_nodes=0)
    ending = Author(tokenizer.encode(PROMPT), SamplingParams(max_tokens=1), "b")
    with stage(continues(WHOLE)) as running:
        running.open(author)
        running.open(ending)
        assert grow(running.drafter, author, ending) == {}
        assert running.engine.requests == []


def test_the_key_is_a_variables_and_is_sent_to_the_engine_alone(
    tokenizer: TokenBytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ENGINE_KEY", "sk-secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    author = Author(tokenizer.encode(PROMPT))
    with stage(continues(WHOLE), api_key_env="ENGINE_KEY") as running:
        running.open(author)
        running.grown(author)
        assert "authorization: bearer sk-secret" in running.engine.heads[0].lower()
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert all(word not in logged for word in ("sk-secret", PROMPT, "fox"))
    monkeypatch.delenv("ENGINE_KEY")
    with pytest.raises(ConfigError, match=r"drafters\.peer\.options\.api_key_env.*ENGINE_KEY"):
        OpenAIDrafter(CONTEXT, OpenAIOptions(url="http://a", api_key_env="ENGINE_KEY"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "url: missing"),
        ({"url": "127.0.0.1:8080"}, "is none; write http://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "is none"),
        ({"url": "http://a:99999"}, "is none"),
        ({"url": "http://a/?key=b"}, "is none"),
        ({"url": "http://user:secret@a"}, "holds a password; name a variable in api_key_env"),
        ({"url": "http://a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        registry.check("peer", DrafterConfig(kind="openai", options=options))
    assert "drafters.peer.options." in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_drafter_that_does_not_know_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options\.tokenizer: missing; name the target's model"):
        OpenAIDrafter(DrafterContext("peer", 16, 4), OpenAIOptions(url="http://a"))


def _flood(body: dict[str, Any]) -> Any:
    async def script() -> Any:
        yield head()
        while True:
            yield event("flood and flood ")

    return script()


def _never(body: dict[str, Any]) -> Any:
    async def script() -> Any:
        while True:
            yield b"HTTP/1.1 100 Continue\r\n\r\n"

    return script()


SSE = head()
HOSTILE: dict[str, tuple[Script, str]] = {
    "an error": (sends(head("500 Oops"), b"secret fox"), "HTTP status 500"),
    "too many requests": (sends(head("429 No", "Retry-After: 999999")), "HTTP status 429"),
    "a redirect": (sends(head("307 There", "Location: http://169.254.169.254/")), "status 307"),
    "no HTTP": (sends(b"\x00\xff" * 9), "RemoteProtocolError"),
    "nothing": (sends(), "RemoteProtocolError"),
    "a head without end": (sends(b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n"] * 40_000), "Error"),
    "heads without end": (_never, "within 2 s"),
    "no JSON": (sends(SSE, b"data: secret fox\n\n"), "its answer is no completion"),
    "other JSON": (sends(SSE, b"data: [1, 2]\n\n"), "its answer is no completion"),
    "no text": (sends(SSE, b'data: {"choices": [{"text": 7}]}\n\n'), "is no completion"),
    "deep JSON": (sends(SSE, b"data: " + b"[" * 15_000 + b"\n\n"), "is no completion"),
    "no UTF-8": (sends(SSE, b'data: {"choices": [{"text": "\xff"}]}\n\n'), "no completion"),
    "no stream": (sends(head(), b'{"choices": [{"text": "secret fox"}]}'), "breaks off"),
    "no words": (says(""), "its answer is empty"),
    "a line without end": (sends(SSE, *[b"data: " + b"x" * 65_536] * 9), "is too long"),
    "comments without end": (sends(SSE, *[b": x\n" * 16_384] * 99), "is too long"),
    "packed": (sends(head("200 OK", "Content-Encoding: gzip"), b"\x1f\x8b" * 99), "breaks off"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_engine_that_fails_costs_its_own_drafts_alone(
    tokenizer: TokenBytes, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    script, why = HOSTILE[what]
    author = Author(tokenizer.encode(PROMPT))
    with stage(script, timeout_s=2.0) as running:
        running.open(author)
        running.settle(author, lambda: bool(told(caplog)))
        assert why in told(caplog)
        assert "secret" not in caplog.text
        assert len({request["prompt"] for request in running.engine.requests}) == 1
        running.engine.script, running.now = continues(WHOLE), 60.0
        other = Author(tokenizer.encode(PROMPT), request_id="b")
        running.open(other)
        assert len(running.grown(other).tree)


@pytest.mark.parametrize(
    ("script", "drafted"),
    [
        (_flood, b" fox"),
        (says(" fox jumps \ufffd over it", " and more"), b" fox jumps"),
        (sends(SSE, b'data: {"choices": [{"text": " fox jumps \\ud83d over"}]}\n\n'), b" fox"),
    ],
    ids=["a flood", "broken UTF-8", "half a character"],
)
def test_of_an_answer_that_is_partly_sound_that_part_is_drafted(
    tokenizer: TokenBytes, script: Script, drafted: bytes
) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with stage(script, max_tokens=8) as running:
        running.open(author)
        request = next(iter(running.drafter._requests))
        running.settle(author, lambda: request.draft is not None and request.answer is None)
        assert request.draft is not None
        assert len(request.draft.rest) <= 8 * 16
        if script is not _flood:
            assert tokenizer.decode(request.draft.chain).startswith(drafted)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_the_engine_refuses_is_not_asked_for_again(
    tokenizer: TokenBytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    long, other = (Author(tokenizer.encode(PROMPT), request_id=name) for name in "ab")
    with stage(sends(head(f"{status} No"), json.dumps({"error": PROMPT}).encode())) as running:
        running.open(long)
        running.settle(long, lambda: bool(told(caplog)))
        running.commit(long, tokenizer.encode(" fox"))
        assert grow(running.drafter, long) == {}
        assert len(running.engine.requests) == 1
        assert PROMPT not in caplog.text
        running.engine.script = continues(WHOLE)
        running.open(other)
        assert len(running.grown(other).tree)


def test_an_address_where_nobody_answers_is_an_engine_that_fails(
    tokenizer: TokenBytes, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted(says()) as engine:
        running = Stage(engine)
    author = Author(tokenizer.encode(PROMPT))
    running.open(author)
    for _ in range(3):
        running.settle(author, lambda: bool(told(caplog)))
        running.commit(author, tokenizer.encode(" fox"))
    assert "ConnectError" in told(caplog)
    running.drafter.release(["a"])


def test_its_thread_is_there_while_texts_are_and_no_longer(tokenizer: TokenBytes) -> None:
    former = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        own = set(threading.enumerate()) - former
        return [each for each in own if each.name == "draft-requests"]

    with stage(continues(WHOLE)) as running:
        for round_index in range(2):
            author = Author(tokenizer.encode(PROMPT), GREEDY, f"r{round_index}")
            running.open(author)
            running.grown(author)
            (thread,) = threads()
            running.drafter.release([author.request_id])
            thread.join(PATIENCE_S)
            assert threads() == []
