"""Drafts of another engine: asked for where they may be, and followed as they come."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config.schema import DrafterConfig
from cluster.core import SamplingParams
from cluster.draft import registry
from cluster.draft.base import DrafterContext, Waking
from cluster.draft.hit_rates import HitRates
from cluster.draft.openai import OpenAIDrafter
from cluster.draft.openai_options import OpenAIOptions
from cluster.errors import ConfigError
from cluster.models.token_bytes import TokenBytes
from cluster.requests.tenant import PROFILE_TENANT
from tests.support.draft.author import GREEDY, Author, grow
from tests.support.draft.openai_stage import CONTEXT, DEMO, PROMPT, WHOLE, Stage, stage
from tests.support.draft.scripted_engine import (
    PATIENCE_S,
    Gate,
    continues,
    event,
    head,
    says,
    scripted,
)


@pytest.fixture(scope="module")
def tokenizer() -> TokenBytes:
    return TokenBytes.load(DEMO)


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
        # It may have been asked for what comes behind its answer, but not for the same again.
        assert tokenizer.decode(ids[:8]).decode() not in engine.prompts
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
    assert all(512 <= len(prompt) <= 1024 for prompt in prompts)
    assert all(prompt.split(" nonsense")[0] in text for prompt in prompts)
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
        ("all", PROFILE_TENANT, False),  # the target measures itself
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
        assert bool(running.engine.requests) == is_sent


def test_auto_means_all_for_this_machine_alone() -> None:
    assert OpenAIOptions(url="http://localhost:8080/v1").sends_all
    for path in ("", "/", "/v1", "/v1/", "/v1/completions"):
        assert OpenAIOptions(url=f"http://a{path}").endpoint == "http://a/v1/completions"
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
        ({"url": "127.0.0.1:8080"}, "is no address of HTTP: write http://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "is no address of HTTP"),
        ({"url": "http://a:99999"}, "is no address of HTTP"),
        ({"url": "http://a/?key=b"}, "is none"),
        ({"url": "http://user:secret@a"}, "holds a password; name a variable in api_key_env"),
        ({"url": "http://a", "max_tokens": 0}, "max_tokens"),
        ({"url": "http://a", "api_key_env": "sk-1"}, "api_key_env: this is no name of a variable"),
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
