"""Real questions: shared out fairly, asked once in a server's life, compared with their like; what
the command refuses and continues."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.spec_bench import __main__ as command
from benchmarks.spec_bench.client import Asker, Turn
from benchmarks.spec_bench.peers.makers import Programs
from benchmarks.spec_bench.plan import OURS, PLAIN, Run, plan
from benchmarks.spec_bench.questions import Question, limit, load, share_out
from benchmarks.spec_bench.servers import Setup
from benchmarks.spec_bench.summary import ratio
from benchmarks.support.answers import Law
from benchmarks.support.record import Record
from deployments.openai_client import OpenAIServer
from tests.support.deployments.drafting_server import Answer, DraftingServer

GREEDY, PEER = Law("greedy", 0.0), "vLLM plain, HTTP"
QUESTIONS = [Question(number, f"kind {number % 3}", ("first", "second")) for number in range(48)]


def turn(question_id: int, tokens: int, seconds: float) -> Turn:
    return Turn(question_id, "qa", 0, 0.0, 1.0, 1.0 + seconds, tokens, "stop", "")


def test_a_line_that_is_not_a_question_is_named(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    good = {"question_id": 1, "category": "coding", "turns": ["a", "b"]}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({"question_id": 2}) + "\n")
    with pytest.raises(ValueError, match=r"questions.jsonl, line 3: not a question"):
        load(path)
    path.write_text(json.dumps(good) + "\n")
    assert load(path) == [Question(1, "mt_bench", ("a", "b"))]
    path.write_text(2 * (json.dumps(good) + "\n"))
    with pytest.raises(ValueError, match="occurs twice"):
        load(path)


def test_groups_are_disjoint_and_have_equal_shares_of_every_task():
    groups = share_out(QUESTIONS, [1] * 8)
    assert sorted(question.id for group in groups for question in group) == list(range(48))
    for group in groups:
        assert Counter(question.category for question in group) == {
            f"kind {n}": 2 for n in range(3)
        }
    assert sorted(len(group) for group in share_out(limit(QUESTIONS, 2), [1] * 4)) == [1, 1, 2, 2]


def test_a_part_of_the_questions_comes_from_all_over_each_category():
    chosen = [question.id for question in limit(QUESTIONS, 4)]
    assert chosen == [kind + at for kind in range(3) for at in (0, 12, 24, 36)]
    assert len(limit(QUESTIONS, 99)) == 48
    assert limit(QUESTIONS, None) == QUESTIONS


@pytest.mark.parametrize("num_rounds", [1, 2, 4])
def test_no_server_is_asked_a_question_twice_and_every_question_both_ways(num_rounds: int):
    runs = plan(QUESTIONS, [GREEDY], [1, 4, 16, 32], [PEER, "vLLM suffix, HTTP"], num_rounds)
    asked: dict[tuple[str, int], Counter[int]] = {}
    for run in runs:
        ids = [question.id for block in run.blocks for question in block.questions]
        assert sorted(ids) == list(range(48)), f"{run.key} asks each question once"
        for block in run.blocks:
            counter = asked.setdefault((block.system, block.concurrency), Counter())
            counter.update(question.id for question in block.questions)
    for level in (1, 4, 16, 32):
        assert asked[OURS, level] == asked[PLAIN, level] == asked["vLLM suffix, HTTP", level]
    counts = [asked[OURS, level].total() / num_rounds for level in (1, 4, 16, 32)]
    assert counts == sorted(counts)
    assert counts[0] >= 4
    assert len({run.key for run in runs}) == len(runs) == 4 * num_rounds


def test_a_ratio_compares_the_same_questions():
    fast = [turn(1, 11, 1.0), turn(2, 21, 1.0), turn(9, 1001, 1.0)]
    slow = [turn(1, 11, 2.0), turn(2, 21, 2.0), turn(8, 1001, 1.0)]
    found = ratio(fast, slow)
    assert (found["value"], found["low"], found["high"]) == pytest.approx((2.0, 2.0, 2.0))
    assert found["questions"] == 2
    assert ratio(fast, [turn(7, 5, 1.0)]) is None


def answering(body: dict[str, Any]) -> Answer:
    """Says what it was sent."""
    words = ["a"]
    if "messages" in body:
        words = [f"{len(body['messages'])} messages, ", f"seed {body.get('seed')}"]
    statistics = {"num_spec_steps": 2, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4}
    last = {"usage": {"completion_tokens": 7}, "metrics": {"speculative_decoding": statistics}}
    return [(word, []) for word in words], last


async def test_a_conversation_goes_on_with_its_own_answers_and_a_seed_of_its_own():
    transport = httpx.MockTransport(DraftingServer(answering))
    async with OpenAIServer("http://toy", transport=transport) as client:
        asker = Asker(client, "model", Law("t0.7", 0.7), 16)
        ended = []
        turns = await asker.ask_all(QUESTIONS[:3], 2, lambda: ended.append(None))
    assert len(ended) == 3
    by_question = {(one.question_id, one.turn): one for one in turns}
    assert by_question[2, 0].text == "1 messages, seed 2"
    assert by_question[2, 1].text == "3 messages, seed 2"
    one = by_question[1, 0]
    assert (one.num_tokens, one.steps, one.drafted, one.accepted) == (7, 2, 9, 4)
    assert one.submitted_s <= one.first_s <= one.last_s


async def test_a_text_is_continued_to_the_end_with_its_task_where_the_server_is_ours():
    server = DraftingServer(answering)
    text = Question(3, "code", prompt=(7, 8), task="code")
    transport = httpx.MockTransport(server)
    async with OpenAIServer("http://toy", transport=transport) as client:
        for is_ours in (True, False):
            (turn,) = await Asker(client, "m", GREEDY, 5, is_ours=is_ours).ask(text)
            assert (turn.num_tokens, turn.text, turn.category) == (7, "a", "code")
    assert [(body["prompt"], body["ignore_eos"]) for body in server.bodies] == 2 * [([7, 8], True)]
    assert [body.get("metadata") for body in server.bodies] == [{"task": "code"}, None]


SETUP = Setup("", (), "", "", "float32", Programs(), 4, 64, 0, Path())
RUNS = plan(QUESTIONS[:8], [GREEDY], [1], [PEER], 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were made, in order; the peer's fail."""
    made = []

    def answer(
        run: Run, setup: Setup, max_tokens: int, told: Callable[[], object]
    ) -> list[dict[str, Any]]:
        made.append(run.key)
        if run.server == PEER:
            raise RuntimeError("its log says:\nout of memory")
        told()
        return [{"system": block.system, "turns": []} for block in run.blocks]

    monkeypatch.setattr(command, "answer", answer)
    return made


def test_a_server_that_fails_is_left_out_and_the_same_command_goes_on(
    tmp_path: Path, asked: list[str]
):
    record = Record(tmp_path / "some.json", {})
    command.measure(record, RUNS, SETUP, 4)
    assert record.failures == {PEER: "out of memory"}
    assert asked == ["ours/greedy/0", f"{PEER}/greedy/0", "ours/greedy/1"]
    asked.clear()
    command.measure(Record(tmp_path / "some.json", {}), RUNS, SETUP, 4)
    assert asked == [f"{PEER}/greedy/0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "eagle"], "no 'eagle'; there are vllm-plain, vllm-ngram, vllm-suffix"),
        (["--ways", "smoke"], "--ways: no 'smoke'; there are http, in-process"),
        (["--peer", "vllm-plain"], "vLLM: name an interpreter that has vLLM with --vllm-python"),
        (["--peer", "llama-plain"], "llama.cpp: name llama.cpp's llama-server with --llama-server"),
        (
            ["--peer", "llama-plain", "--llama-server", "x"],
            "llama.cpp: name the model's GGUF file with --gguf",
        ),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["--peer", "vllm-plain", "--vllm-python", sys.executable],
            "`request` cannot be asked in process",
        ),
    ],
)
def test_a_wrong_word_is_named_with_what_there_is(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "questions.jsonl"
    question = {"question_id": 1, "category": "qa", "turns": ["a"], "request": {"n": 1}}
    path.write_text(json.dumps(question))
    monkeypatch.setattr(
        sys, "argv", ["spec_bench", str(path), "--out", str(tmp_path / "o.json"), *words]
    )
    with pytest.raises(SystemExit, match=message):
        command.main()
    assert not (tmp_path / "o.json").exists()
