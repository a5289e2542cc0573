"""Audits: a text that the target would not write again is found, and nothing else is counted."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path

import pytest

from cluster import metrics
from cluster.config.speculation import AuditConfig
from cluster.core import SamplingParams, token_array
from cluster.errors import RequestError
from cluster.metrics import vllm_metrics
from cluster.rpc.messages import TextVerdict, VerdictFrame
from tests.support.choices import by_day
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    House,
    at_work,
    collect,
    house,
    request,
    text_of,
)
from tests.support.coordinator.toys import (
    VOCAB_SIZE,
    ToyDrafter,
    ToyTarget,
    random_tree,
    told_instead,
)

ALL = AuditConfig(share=1.0)


def outcomes(stage: House) -> dict[str, float]:
    """How many texts were audited, by outcome."""
    name, found = "drafthouse_audited_texts_total", {}
    for outcome in ("equal", "near_tie", "mismatch", "failed", "skipped"):
        if count := stage.value(name, outcome=outcome):
            found[outcome] = count
    return found


def changed_last(wrong: list[int]) -> Callable[..., VerdictFrame]:
    """The last two tokens of a text come as other ones; wrong: which."""

    def changed(verdict: TextVerdict) -> TextVerdict:
        if verdict.request_id[0] != "r" or verdict.context_len < 1 + SEEDED.max_tokens:
            return verdict
        wrong.append((verdict.token_ids[0] + 1) % VOCAB_SIZE)
        return replace(verdict, token_ids=token_array(wrong[-1:]))

    return told_instead(changed)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SEEDED,
        replace(SEEDED, top_p=0.8, top_k=9),
        replace(SEEDED, frequency_penalty=0.7, logit_bias=((3, 1.5),), stop_token_ids=(5,)),
        replace(SEEDED, stream=3, min_tokens=20, stop_token_ids=tuple(range(8))),
    ],
    ids=["greedy", "seeded", "truncated", "penalties", "stops"],
)
async def test_texts_are_what_would_be_drawn_again(params: SamplingParams):
    async with at_work(ToyDrafter("a", random_tree(2)), audit=ALL) as stage:
        for seed in range(by_day(2, 8)):
            await stage.ask((1, seed), replace(params, seed=seed))
            await stage.pass_time(1.0)
        assert outcomes(stage) == {"equal": 1.0 + seed}


async def test_a_text_that_nobody_drew_is_found_named_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cluster.coordinator.audit._MAX_FILES", 2)
    wrong, told, folder = [], [], tmp_path / "all" / "kept"
    asked = [request(params=replace(SEEDED, seed=n), id=f"r/{n}", task="t") for n in range(3)]
    async with at_work(
        ToyTarget(says=changed_last(wrong)), audit=replace(ALL, folder=str(folder))
    ) as stage:
        for each in asked:
            told.append(text_of(await collect(stage.coordinator, each)))
            await stage.pass_time(1.0)
        assert outcomes(stage) == {"mismatch": 3.0}
    assert [token for text in told for token in text[-2:]] == wrong
    said = [each for each in caplog.messages if each.startswith("audit: the text")]
    paths = sorted(folder.iterdir())
    assert [path.name.partition("-")[2] for path in paths] == ["r_0.json", "r_1.json"]
    for path, each, text, line in zip(paths, asked, told, said, strict=False):
        assert path.stat().st_mode & 0o077 == 0
        record = json.loads(path.read_text())
        redraws = sorted(record.pop("redraws"), key=itemgetter("gap"))
        assert json.loads(json.dumps(asdict(each.params))) == record.pop("params")
        assert record == {
            "request_id": each.id,
            "target": "target-0",
            "task": "t",
            "adapter": "",
            "prompt_ids": [1, 2, 3],
            "output_ids": text,
        }
        assert {each["position"] for each in redraws} == {len(text) - 2, len(text) - 1}
        place, drawn, gap = redraws[-1].values()
        assert line.endswith(
            f"request={each.id} target=target-0 is not what is drawn now: place={place} "
            f"token={text[place]} drawn={drawn} gap={gap:.4f} places=2 of {len(text)}"
        )


async def test_a_token_that_rounding_could_give_is_a_near_tie():
    async with at_work(
        ToyTarget(says=changed_last([])), audit=replace(ALL, tie_margin=1000.0)
    ) as stage:
        await collect(stage.coordinator, request(params=SEEDED))
        await stage.pass_time(1.0)
        assert outcomes(stage) == {"near_tie": 1.0}


async def test_another_target_looks_where_there_is_one():
    async with house(audit=ALL) as stage:
        targets = {name: ToyTarget() for name in ("one", "two")}
        for name, toy in targets.items():
            stage.add_target(toy, name)
        await stage.ask()
        (writer,) = (name for name, toy in targets.items() if toy.items)
        await stage.pass_time(1.0)
        (reader,) = set(targets) - {writer}
        audited = {item.request_id for item in targets[reader].items}
        assert len(audited) == 1
        assert outcomes(stage) == {"equal": 1.0}
        await stage.ask()
        stage.add_target(ToyTarget(), "short", max_context_len=3)
        await stage.pass_time(1.0)
        assert outcomes(stage) == {"equal": 1.0, "failed": 1.0}


async def test_nothing_of_an_audit_is_counted_as_a_request():
    seen = []
    for share in (0.0, 1.0):
        async with at_work(audit=AuditConfig(share=share)) as stage:
            await stage.ask(params=SEEDED)
            await stage.pass_time(2.0)
            lines = stage.metrics().splitlines()
            named = (metrics.TTFT, metrics.ITL, vllm_metrics.E2E_TIME)
            seen.append([each for each in lines if each.startswith(tuple(m.name for m in named))])
            assert bool(outcomes(stage)) is bool(share)
    assert seen[0] == seen[1]
    assert seen[0]


async def test_a_share_of_the_texts_is_looked_at_and_beams_scores_and_failures_never():
    toy = ToyTarget(refuses=lambda item: RequestError("no") if item.context_len == 50 else None)
    async with at_work(toy, audit=AuditConfig(share=0.25)) as stage:
        scored = replace(GREEDY, max_tokens=3, forced_ids=(1, 2, 3))
        for number in range(8):
            await stage.ask((1, number), scored)
            await stage.ask((number,) * 48, error=RequestError.code)
            await stage.ask((1, number))
        await stage.pass_time(2.0)
        assert outcomes(stage) == {"equal": 2.0}


async def test_an_audit_waits_for_idle_time_but_not_for_ever():
    toy = ToyTarget()
    async with at_work(toy, audit=ALL) as stage:
        for number in range(33):
            await stage.ask((1, number % 32), replace(GREEDY, max_tokens=1))
        assert outcomes(stage) == {"skipped": 1.0}, "32 wait at most"
        toy.gate.clear()
        running = stage.coordinator.submit(request((9,), replace(GREEDY, max_tokens=2000), "busy"))
        first = anext(aiter(running))
        toy.gate.set()
        await first
        toy.gate.clear()
        await stage.pass_time(10.0)
        assert not any(name.startswith("audit/") for name in stage.coordinator._present.sessions)
        await stage.pass_time(25.0)
        names = stage.coordinator._present.sessions
        assert sum(name.startswith("audit/") for name in names) == 1, "one at a time"
        toy.gate.set()
        await running.aclose()
