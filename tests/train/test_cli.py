"""The training commands explain wrong options.  After a training the target's drafters are
compared, by depth and task, as they serve."""

import argparse
import json
import shutil
from pathlib import Path

import pytest

from cluster.config.schema import DrafterConfig
from cluster.core import SpeculationStats
from cluster.models.made_for import MadeFor, write_made_for
from cluster.train.chat_heads import target_of
from cluster.train.cli import configure, questions_of, run, show_comparison
from cluster.train.compare import Acceptance, compare, drafters_of, read_questions, table
from tests.support.errors import config_error


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drafthouse train")
    configure(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "STEP"),
        (("drafter", "x", "--target", "y"), "--steps --minutes"),
        (("drafter", "x", "--target", "y", "--steps", "5", "--minutes", "1"), "not allowed with"),
        (("drafter", "x", "--target", "y", "--minutes", "nan"), "'nan' is no number above 0"),
        (("drafter", "x", "--steps", "5"), "--target"),
        (
            ("drafter", "x", "--target", "y", "--steps", "5", "--layers", "0"),
            "'0' is no whole number of at least 1",
        ),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--models", "--work"])
def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    words = ("drafter", "x", "--target", "none", "--steps", "5", option, str(tmp_path / "file"))
    other = "--work" if option == "--models" else "--models"
    assert run(parse(*words, other, str(tmp_path))) == 2
    assert f"{option}: {tmp_path / 'file'} cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("demo",), "`make train`"),
        (("demo", "demo-draft", "--steps", "5", "--help"), "`python -m models.recipe train`"),
        (("evaluate", "--skip-bits"), "`python -m models.recipe bits`"),
        (("evaluate", "--max-bytes", "9"), "`python -m models.recipe bits`"),
    ],
)
def test_what_has_left_says_where_it_is(
    words: tuple[str, ...], instead: str, capsys: pytest.CaptureFixture[str]
):
    assert run(parse(*words)) == 2
    said = capsys.readouterr().err
    assert "gone" in said
    assert instead in said


def test_without_a_target_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]):
    assert run(parse("evaluate")) == 2
    assert "--target: name the model" in capsys.readouterr().err


def test_missing_questions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "questions.jsonl")
    assert run(parse("evaluate", "--target", "x", "--questions", missing)) == 2
    assert f"{missing}: no questions" in capsys.readouterr().err


def folder_for(parent: Path, model: Path, made_for: MadeFor) -> Path:
    folder = parent / model.name
    shutil.copytree(model, folder)
    write_made_for(folder, made_for)
    return folder


def questions_file(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "math", "turns": ["What is two and two?", "And three?"]},
        {"question_id": 2, "category": "math", "turns": ["What is two and five?"]},
        {"kind": "prose", "text": "A window\u2028slides over the text.", "licence": "PSF-2.0"},
    ]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def test_depths_count_the_steps_that_went_so_far():
    stats = [
        SpeculationStats(num_steps=5, num_spec_steps=4, acceptance_histogram=(1, 2, 1)),
        SpeculationStats(num_steps=1, num_spec_steps=0),
    ]
    found = Acceptance.of(num_tokens=12, answers=stats)
    assert found == Acceptance(2.0, (0.75, 0.25, 0.0, 0.0))


def test_questions_are_grouped_by_task_and_spread_over_the_file(tmp_path: Path):
    questions = read_questions(questions_file(tmp_path))
    assert list(questions) == ["math", "prose"]
    assert questions["math"] == ["What is two and two?", "What is two and five?"]
    assert questions["prose"] == ["Continue this text.\n\nA window\u2028slides over the text."]
    assert len(read_questions(questions_file(tmp_path), per_task=1)["math"]) == 1


@pytest.mark.parametrize("text", ["{}\n", "no JSON\n", None])
def test_a_file_without_questions_is_refused_by_name(tmp_path: Path, text: str | None):
    path = tmp_path / "other.jsonl"
    if text is not None:
        path.write_text(text)
    with config_error(r"other\.jsonl: no questions"):
        read_questions(path)


def test_drafters_are_those_that_were_made_for_the_target(llama_folder: Path, tmp_path: Path):
    mine = folder_for(tmp_path / "a", llama_folder, target_of(str(llama_folder)))
    other = folder_for(tmp_path / "b", llama_folder, MadeFor("another", "0123"))
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    write_made_for(head, target_of(str(llama_folder)))
    found = drafters_of(str(llama_folder), [mine, other, head, tmp_path / "no-folder"])
    kinds = {name: each.kind for name, each in found.items()}
    assert kinds == {"suffix": "suffix", mine.name: "lm", "head": "eagle3"}
    assert found["head"].options == {"model": str(head)}


@pytest.mark.usefixtures("tireless_residents")
def test_a_target_that_drafts_for_itself_is_always_accepted_and_another_less(
    llama_folder: Path, draft_folder: Path, tmp_path: Path
):
    questions = read_questions(questions_file(tmp_path))
    models = {"itself": llama_folder, "noisy": draft_folder}
    drafters = {
        name: DrafterConfig(kind="lm", options={"engine": {"model": str(each), "num_pages": 256}})
        for name, each in models.items()
    }
    found = compare(str(llama_folder), drafters, questions)
    for task in questions:
        itself, noisy = (found[name][task] for name in ("itself", "noisy"))
        assert itself.tokens_per_step > noisy.tokens_per_step >= 1.0
        # How deep its trees are is the drafter's choice; their first level has the likeliest token.
        assert itself.by_depth[0] == 1.0 > noisy.by_depth[0]
        for each in (itself, noisy):
            assert list(each.by_depth) == sorted(each.by_depth, reverse=True)
    lines = table(found).splitlines()
    assert [line.split("\t")[:2] for line in lines[1:]] == [
        ["math", "itself"],
        ["math", "noisy"],
        ["prose", "itself"],
        ["prose", "noisy"],
    ]


def test_the_command_compares_what_lies_in_its_models_only_when_asked(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = str(llama_folder)
    folder_for(tmp_path, llama_folder, target_of(target))
    training = ["eagle3", "x", "--target", target, "--steps", "1", "--models", str(tmp_path)]
    for words in ([], ["--evaluate", str(questions_file(tmp_path))]):
        arguments = parse(*training, *words)
        show_comparison(arguments, questions_of(arguments))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == (5 if words else 0), "two tasks of two drafters, and the heading"
    assert list(questions_of(parse(*training, "--evaluate"))) == ["code", "prose"]
