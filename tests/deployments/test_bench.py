"""`drafthouse bench`: exact figures of scripted answers in virtual time, and their report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.errors import WorkerError
from deployments.bench.command import QUESTIONS, Report, bench, markdown, write_json, write_picture
from deployments.bench.load import TimedAnswer, equal_texts, figures, ratios
from deployments.cli import parser_for
from tests.conftest import Run
from tests.deployments.conftest import Served
from tests.support.deployments.scripted_server import (
    PROMPT_TOKENS,
    ScriptedServer,
    in_virtual_time,
)
from tests.support.errors import config_error

URL = "http://server:8000"
# Of each kind: time to the first piece and between two in ms, pieces, tokens of each piece.
FAST, SLOW = "20 5 9 2", "120 10 5 1"


def benched(server: ScriptedServer, *words: str, url: str = URL) -> Report:
    arguments = parser_for([]).parse_args(["bench", url, *words])
    return in_virtual_time(bench(arguments, server))


def written(folder: Path, *prompts: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def expected(report: Report, **values: float) -> None:
    (run,) = report.runs
    assert {name: run.figures[name] for name in values} == pytest.approx(values)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_figures_of_scripted_answers_are_the_script_s(tmp_path: Path, endpoint: str):
    words = ("--prompts", written(tmp_path, FAST, SLOW), "--endpoint", endpoint)
    report = benched(ScriptedServer(), *words, "--goodput", "ttft:100", "tpot:5")
    # FAST: 9 pieces of 2 tokens, the last after 60 ms; SLOW: 5 of 1, the last after 160 ms.
    itl = [5.0] * 8 + [10.0] * 4
    expected(
        report,
        completed=2,
        failed=0,
        duration=0.22,
        total_input_tokens=2 * PROMPT_TOKENS,
        total_output_tokens=23,
        output_throughput=23 / 0.22,
        request_throughput=2 / 0.22,
        total_token_throughput=(23 + 2 * PROMPT_TOKENS) / 0.22,
        request_goodput=1 / 0.22,
        mean_ttft_ms=70.0,
        median_ttft_ms=70.0,
        p99_ttft_ms=119.0,
        p95_ttft_ms=115.0,
        mean_tpot_ms=(40 / 17 + 10.0) / 2,
        median_tpot_ms=(40 / 17 + 10.0) / 2,
        mean_itl_ms=sum(itl) / 12,
        median_itl_ms=5.0,
        p95_itl_ms=10.0,
        mean_e2el_ms=110.0,
        p99_e2el_ms=159.0,
    )


def test_so_many_are_asked_at_a_time_and_a_new_one_as_soon_as_one_has_ended(tmp_path: Path):
    words = ("--prompts", written(tmp_path, FAST, SLOW), "--num-prompts", "8")
    # FAST takes 60 ms and SLOW 160 ms; they come by turns.
    report = benched(ScriptedServer(), *words, "--concurrency", "2")
    sent = sorted(answer.asked_s for answer in report.runs[0].answers)
    begun = sent[0]
    assert [round(1e3 * (each - begun)) for each in sent] == [0, 0, 60, 120, 160, 220, 280, 340]
    assert report.runs[0].level.concurrency == 2


def test_random_arrivals_are_a_poisson_process_that_the_seed_decides(tmp_path: Path):
    words = ("--prompts", written(tmp_path, SLOW), "--rate", "50")

    def sent(seed: str, count: int) -> list[float]:
        asked = benched(ScriptedServer(), *words, "--seed", seed, "--num-prompts", str(count))
        answers = asked.runs[0].answers
        return [answer.asked_s - answers[0].asked_s for answer in answers]

    assert sent("1", 20) == sent("1", 20) != sent("2", 20)
    times = sent("1", 400)
    assert times[-1] == pytest.approx(399 / 50, rel=0.15)
    gaps = np.diff(times)
    assert gaps.var() == pytest.approx(gaps.mean() ** 2, rel=0.3)  # an exponential's


def test_a_request_that_fails_counts_as_failed_and_in_no_time(tmp_path: Path):
    words = ("--prompts", written(tmp_path, FAST, SLOW))
    report = benched(ScriptedServer(refusing=(SLOW,)), *words)
    expected(report, completed=1, failed=1, mean_ttft_ms=20.0, total_output_tokens=18)
    text = markdown(report)
    assert "1 at a time: 1 failed, the first: http://server:8000 refuses the question" in text
    with pytest.raises(WorkerError, match="not this one"):  # already the warm-up
        benched(ScriptedServer(refusing=(FAST,)), *words)


def test_an_answer_that_ends_before_any_token_has_none(tmp_path: Path):
    report = benched(ScriptedServer(), "--prompts", written(tmp_path, "20 5 0 0"))
    expected(report, completed=1, failed=0, total_output_tokens=0)


def test_every_request_has_what_the_options_say():
    server = ScriptedServer(is_ours=True)
    words = ("--max-tokens", "7", "--temperature", "0.5", "--seed", "3", "--ignore-eos")
    with pytest.raises(WorkerError, match="convert"):  # a question is no script
        benched(server, *words)
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": QUESTIONS[0]}]
    fields = {"model": "scripted", "max_tokens": 7, "temperature": 0.5, "seed": 3}
    assert body.items() >= {**fields, "ignore_eos": True, "stream": True}.items()
    assert "cache_salt" not in body


def test_drafts_are_compared_with_none_in_turn_and_nobody_profits_of_the_other(
    tmp_path: Path,
):
    server = ScriptedServer(is_ours=True)
    words = ("--prompts", written(tmp_path, FAST, SLOW), "--warmups", "0")
    report = benched(server, *words, "--compare", "off")
    is_off = ["speculation" in body for body in server.bodies]
    # Each prompt with drafts and without, in changing order, all rounds one after the other.
    assert is_off == [False, True, True, False] * 2
    assert len({body["cache_salt"] for body in server.bodies}) == 8
    text = markdown(report)
    assert "| 1 at a time | 1.00 (1.00 to 1.00): cannot tell |" in text
    assert "| 2 of 2 |" in text
    with config_error("server:8000 is no Drafthouse"):
        benched(ScriptedServer(), *words, "--compare", "off")


def test_a_server_that_is_compared_with_itself_has_its_own_answers_on_each_side(tmp_path: Path):
    words = ("--prompts", written(tmp_path, FAST, SLOW), "--rounds", "1", "--compare", URL)
    report = benched(ScriptedServer(), *words)
    assert [run.figures["completed"] for run in report.runs] == [2, 2]


def timed(*times_s: float, **known: Any) -> TimedAnswer:
    return TimedAnswer(lambda: 0.0, times=[*times_s], usage={"completion_tokens": 10}, **known)


def test_ratios_are_of_the_same_prompts_and_know_how_sure_they_are():
    def answer(prompt: int, seconds: float, text: str = "", **known: str) -> TimedAnswer:
        return timed(seconds / 2, seconds, prompt=prompt, unit=prompt, text=text, **known)

    fast = [answer(prompt, 1.0 + prompt) for prompt in range(8)]
    slow = [answer(prompt, 2.0 * (1 + prompt)) for prompt in range(8)]
    found = ratios(fast, slow)
    assert found["tokens/s of a request"].mean == pytest.approx(2.0)
    assert (found["TTFT"].low, found["TTFT"].high) == pytest.approx((0.5, 0.5))
    mixed = [answer(prompt, 1.0 + prompt % 3) for prompt in range(8)]
    uncertain = ratios(mixed, slow)["TPOT"]
    assert uncertain.low < uncertain.mean < (uncertain.high or 0.0)
    # Of prompts that one side failed on, neither counts.
    assert ratios([*fast, answer(9, 100.0)], slow)["TTFT"].mean == pytest.approx(0.5)
    assert ratios([answer(0, 1.0, error="x")], slow) == {}
    assert equal_texts([answer(0, 1.0, "a"), answer(1, 1.0, "b")], [answer(0, 1.0, "a")]) == (1, 1)
    assert equal_texts([answer(0, 1.0, "a")], [answer(0, 1.0, "b")]) == (0, 1)


def test_an_interval_holds_what_the_machine_does_from_one_measurement_to_the_next():
    """Two runs on one machine that is now fast, now slow, for whole runs of prompts: neither
    interval excludes the truth, whichever side met the slow times."""

    def side(slow: float, units: Sequence[int], fast: float = 1.0) -> list[TimedAnswer]:
        return [
            timed(time_s / 2, time_s, prompt=8 * unit + place, unit=unit)
            for unit in units
            for time_s in [slow if unit % 2 else fast]
            for place in range(8)
        ]

    for ours, theirs in ((1.3, 1.0), (1.0, 1.3)):
        found = ratios(side(ours, range(4)), side(theirs, range(4)))["tokens/s of a request"]
        assert found.low < 1.0 < found.high
        assert not found.is_telling
    sure = ratios(side(1.0, range(4)), side(2.0, range(4), 2.0))
    assert sure["tokens/s of a request"].is_telling
    alone = ratios(side(1.0, [0]), side(1.3, [0]))["TTFT"]
    assert (alone.low, alone.is_telling) == (None, False)


def test_drafts_are_counted_by_vllm_s_names(tmp_path: Path):
    class Counting(ScriptedServer):
        async def handle_async_request(self, request: Any) -> Any:
            reply = await super().handle_async_request(request)
            num = len(self.bodies)
            self.metrics = "".join(
                f'vllm:spec_decode_num_{name}_total{{engine="0"{label}}} {num * each}\n'
                for name, label, each in [
                    ("drafts", "", 4),
                    ("draft_tokens", "", 20),
                    ("accepted_tokens", "", 6),
                    ("accepted_tokens_per_pos", ',position="0"', 3),
                    ("accepted_tokens_per_pos", ',position="1"', 2),
                ]
            )
            return reply

    report = benched(Counting(metrics="# none yet\n"), "--prompts", written(tmp_path, FAST, SLOW))
    drafts = report.runs[0].speculation
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (8, 40, 12)
    assert drafts.mean_acceptance_length == 2.5
    assert drafts.accepted_per_position == (0.75, 0.5)
    assert "| 30% | 2.50 |" in markdown(report)


def test_it_is_written_as_json_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("--prompts", written(tmp_path, FAST, SLOW), "--concurrency", "1,2")
    report = benched(ScriptedServer(is_ours=True), *words, "--compare", "off")
    write_json(report, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [run["load"]["concurrency"] for run in found["runs"]] == [1, 1, 2, 2]
    assert found["runs"][0]["mean_ttft_ms"] == pytest.approx(70.0)
    assert found["ratios"][0]["TTFT"]["value"] == pytest.approx(1.0)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with config_error(r"--png needs matplotlib: pip install"):
        write_picture(report, tmp_path / "found.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    write_picture(report, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_a_conversation_is_no_prompt_of_a_completion(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"content": "a"}]}')
    with config_error(r"prompts.jsonl: messages are for the chat endpoint"):
        benched(ScriptedServer(), "--prompts", str(path), "--endpoint", "completions")


def test_spec_bench_s_form_and_conversations_are_prompts_too(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": SLOW}]
    path.write_text(f"{json.dumps({'turns': [FAST, 'x']})}\n\n{json.dumps({'messages': chat})}\n")
    expected(benched(ScriptedServer(), "--prompts", str(path)), completed=2, mean_ttft_ms=70.0)


def test_nothing_counted_has_no_times():
    assert "mean_ttft_ms" not in figures([timed(error="x")], 1.0, {})
    one = figures([TimedAnswer(lambda: 0.0, times=[0.5])], 1.0, {"tpot": 1.0})
    assert "mean_tpot_ms" not in one
    assert one["request_goodput"] == 1.0


def test_a_real_server_is_loaded_with_drafts_and_without(served: Served, tmp_path: Path, run: Run):
    words = ["--prompts", written(tmp_path, "abc abc abc", "one two one two"), "--rounds", "1"]
    words += ["--max-tokens", "24", "--ignore-eos", "--concurrency", "2", "--compare", "off"]
    found = tmp_path / "found.json"
    said = run("bench", f"{served.http}/v1", *words, "--json", found)
    assert "| 2 at a time | no drafts | 2 | 0 |" in said
    document = json.loads(found.read_text())
    assert [each["total_output_tokens"] for each in document["runs"]] == [48, 48]
    assert document["ratios"][0]["equal_texts"] == 2
