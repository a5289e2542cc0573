"""A model and what drafts for it, without a file: the configuration that it stands for."""

from pathlib import Path

import pytest

from cluster.by_name import is_file, read
from cluster.config.schema import Config
from cluster.draft.registry import drafters_of
from cluster.local import LLM
from tests.support.errors import config_error
from tests.support.local_models import GREEDY, ids_of

# Small enough for any machine, and the same text with any drafts.
TINY = (
    "target.engine.num_pages=64",
    "target.engine.threads=1",
    "target.engine.device=cpu",
    "coordinator.budget=fixed",
)


@pytest.mark.parametrize(
    ("draft", "name", "kind", "options"),
    [
        ("suffix", "suffix", "suffix", {}),
        ("demo-draft", "lm", "lm", {"engine": {"model": "demo-draft", "memory_fraction": 0.1}}),
        ("eagle3=/heads/one", "eagle3", "eagle3", {"model": "/heads/one"}),
        ("mtp", "mtp", "mtp", {"model": "the-target"}),
        ("my.module:Mine", "Mine", "my.module:Mine", {}),
        (
            "owner/name@v1",
            "lm",
            "lm",
            {"engine": {"model": "owner/name@v1", "memory_fraction": 0.1}},
        ),
    ],
)
def test_a_draft_is_a_drafter(draft: str, name: str, kind: str, options: dict[str, object]):
    found = drafters_of([draft], "the-target")
    assert found[name] == {"kind": kind, "options": options}
    assert [*found] == [name, "grammar", "prediction"]


def test_two_draft_models_have_names_of_their_own_and_equal_drafts_are_one():
    found = drafters_of(["demo-draft", "demo-draft-code", "demo-draft", "grammar"], "demo-target")
    assert [*found] == ["lm", "lm2", "grammar", "prediction"]


def test_a_model_without_drafts_has_a_look_up_and_settings_count():
    settings = ["http.port=8123", "drafters.suffix.options.max_ngram=4"]
    config = read("demo-target", (), settings).config
    assert config.model_name == "demo-target"
    assert config.http.port == 8123
    assert config.residents == ("suffix", "grammar", "prediction")
    assert config.drafters["suffix"].options == {"max_ngram": 4}
    with config_error(r"^the command line: http\.prt: unknown key .*port"):
        read("demo-target", (), ["http.prt=1"])


def test_files_are_told_from_models(tmp_path: Path):
    gguf, plain = tmp_path / "model.gguf", tmp_path / "configuration"
    gguf.touch()
    plain.touch()
    assert [is_file(each) for each in ("a.yaml", "missing.yml", plain)] == [True] * 3
    assert [is_file(each) for each in (gguf, "owner/name", tmp_path)] == [False] * 3
    with config_error("the file names its drafters; write suffix in there"):
        read("configs/tiny.yaml", ["suffix"])
    with config_error("a Config has its own"):
        LLM(Config(), draft="suffix")


def test_it_generates_and_chats_in_process(llama_folder: Path):
    question = [{"role": "user", "content": "one two one two"}]
    with LLM(str(llama_folder), draft=["suffix", str(llama_folder)], settings=TINY) as llm:
        assert [*llm.config.drafters] == ["suffix", "lm", "grammar", "prediction"]
        answers = llm.chat(question, GREEDY) + llm.chat([question, question], GREEDY)
        prompt = llm.tokenizer.apply_chat_template(question).tolist()
        (same,) = llm.generate([prompt], GREEDY)
    assert ids_of(answers) == [same.token_ids] * 3
    assert same.stats.num_accepted_draft_tokens > 0
