"""From served answers to a drafter that accepts more of them: recorder, files, training."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.core import SamplingParams
from cluster.draft.recorded import UNSALTED, Folder
from cluster.local import LLM
from cluster.models.fingerprint import model_hash
from cluster.train import runs
from cluster.train.chat_answers import AnswerSettings
from cluster.train.chat_heads import HeadBatch, HeadLoss, HeadSettings
from cluster.train.runs import TrafficLoss, learn_from_traffic, load_drafter, train_head
from cluster.train.trainer import Budget
from tests.support.checkpoints import noisy_copy
from tests.support.draft.recording import answers_in
from tests.support.errors import config_error
from tests.support.local_models import drafters, target
from tests.train.test_cli import parse, run

ANSWERS = AnswerSettings(6, max_question_tokens=10, max_answer_tokens=12)
SETTINGS = HeadSettings(depth=2, vocab_size=288, num_answer_tokens=120, answers=ANSWERS)
STEPS = Budget(steps=30)


@pytest.fixture(scope="module")
def current(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has learned next to nothing."""
    work = tmp_path_factory.mktemp("current")
    settings = replace(SETTINGS, num_layers=1, weights="int8")
    train_head("drafter", str(folder), work, work / "d", settings, Budget(steps=1))
    return work / "d"


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers as they are served, with drafts."""
    kept = tmp_path_factory.mktemp("recorded")
    options = {"tenants": "unsalted", "share": 1.0, "keep": "disk", "folder": str(kept)}
    inside = {"lookup": drafters(folder)["lookup"]}
    inside["recorder"] = DrafterConfig(kind="recorder", options=options)
    config = Config(
        target=target(folder),
        drafters=inside,
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=4),
    )
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 280, 6).tolist() * 2 for _ in range(40)]
    with LLM(config) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.7, seed=1, max_tokens=24))
        answers_in(kept, len(prompts), runs.origin_of(folder))
    return kept


def learn(
    folder: Path, recorded: Path, current: Path, work: Path, mix: float = 0.5
) -> runs.Learned:
    settings = replace(SETTINGS, weights="", starts_from=str(current), loss="acceptance")
    settings = replace(settings, from_traffic=recorded, mix=mix)
    return learn_from_traffic(str(folder), work, work / "new", settings, STEPS)


def test_a_drafter_learns_from_what_was_served(
    folder: Path, recorded: Path, current: Path, tmp_path: Path
):
    found = learn(folder, recorded, current, tmp_path)
    assert found.folder.name == f"new@{model_hash(found.folder)[:12]}"
    assert not (tmp_path / "new.unfinished").exists()
    for name in ("traffic", "originals"):
        assert found.after[name].acceptance > found.before[name].acceptance
        assert found.after[name].excess_nats < found.before[name].excess_nats
    # It serves as any drafter does, in the format of the one that it started from.
    assert (found.folder / "model.int8.safetensors").exists()
    engine = {"model": str(found.folder), "dtype": "float32", "device": "cpu", "num_pages": 64}
    lm = DrafterConfig(kind="lm", options={"engine": engine})
    with LLM(Config(target=target(folder), drafters={"lm": lm})) as llm:
        (answer,) = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
        assert len(answer.token_ids) > 0


def test_a_drafter_goes_on_without_traffic_and_with_another_vocabulary(
    folder: Path, current: Path, tmp_path: Path
):
    # So many that several of the answers are held out: of one, chance says which way it goes.
    settings = replace(SETTINGS, weights="", vocab_size=280, num_answer_tokens=1200)
    settings = replace(settings, starts_from=str(current))
    found = learn_from_traffic(str(folder), tmp_path, tmp_path / "new", settings, STEPS)
    assert found.after["originals"].acceptance > found.before["originals"].acceptance
    network = load_drafter(found.folder, runs.origin_of(folder)).network
    assert network.config.vocab_size == 280


def test_a_new_vocabulary_leaves_what_a_drafter_knows(folder: Path, recorded: Path, current: Path):
    origin = runs.origin_of(folder)
    known, _ = runs.split(recorded, origin)
    old = load_drafter(current, origin)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = runs.with_vocabulary(old, known, network, 150)
    both = np.intersect1d(new.vocabulary.target_ids, old.vocabulary.target_ids)
    assert len(both) > 100
    with torch.no_grad():
        logits = [
            each.network(
                input_ids=torch.from_numpy(each.vocabulary.read(both[None])).long()
            ).logits[..., torch.from_numpy(each.vocabulary.read(both)).long()]
            for each in (old, new)
        ]
    torch.testing.assert_close(*logits)


def test_a_drafter_that_accepts_less_is_not_written(
    folder: Path,
    recorded: Path,
    current: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    class Unlearning(TrafficLoss):
        def forward(self, batch: HeadBatch) -> torch.Tensor:
            return -super().forward(batch)

    monkeypatch.setattr(runs, "TrafficLoss", Unlearning)
    with config_error(r"would fall from 0\.\d+ to 0\.\d+, by more than 1%"):
        learn(folder, recorded, current, tmp_path, mix=0.0)
    assert not list(tmp_path.glob("new*"))


def test_what_it_cannot_learn_from_is_refused_by_name(
    folder: Path, recorded: Path, current: Path, tmp_path: Path
):
    with config_error("no recorded answers"):
        learn(folder, tmp_path, current, tmp_path)
    other = noisy_copy(folder, tmp_path / "other")
    with config_error("another target wrote it"):
        learn(other, recorded, current, tmp_path)
    foreign = tmp_path / "foreign"
    shutil.copytree(current, foreign)
    config = foreign / "config.json"
    config.write_text(config.read_text().replace('"model_hash": "', '"model_hash": "0'))
    with config_error("it was made for"):
        learn(folder, recorded, foreign, tmp_path, mix=0.0)
    kept = Folder(tmp_path / "few")
    name = Folder(recorded).names(UNSALTED)[0]
    kept.put(UNSALTED, name, (recorded / UNSALTED / name).read_bytes())
    with config_error("1 prompts are too few"):
        learn(folder, kept.path, current, tmp_path)


def test_places_where_drafts_ended_count_by_what_would_be_accepted(
    folder: Path, recorded: Path, current: Path
):
    origin = runs.origin_of(folder)
    known, held_out = runs.split(recorded, origin)
    assert not {each.prompt.tobytes() for each in known} & {
        each.prompt.tobytes() for each in held_out
    }
    learner = load_drafter(current, origin)
    answer = max(known, key=lambda each: len(each.rejected))
    batch = runs.HeadOrder(known, learner.vocabulary, 0).batch(answer)
    assert 0 < int(batch.is_rejected.sum()) < int(batch.is_known.sum())
    assert not (batch.is_rejected & ~batch.is_known).any()
    nowhere = batch._replace(is_rejected=torch.zeros_like(batch.is_rejected))
    with torch.no_grad():
        plain = HeadLoss(learner)(batch)
        assert TrafficLoss(learner)(nowhere) == plain
        found = TrafficLoss(learner)(batch)
        (drafts,) = runs.known_drafts(learner, batch)
        laws = torch.softmax(drafts.logits.float(), dim=-1)[drafts.is_rejected]
    shared = torch.minimum(
        batch.probs[batch.is_rejected], laws.gather(1, batch.candidates[batch.is_rejected])
    ).sum(dim=1)
    assert float(found - plain) == pytest.approx(float(-(shared + 1e-4).log().mean()), rel=1e-4)


GONE = "this option is gone but for --from-traffic; drafters learn by kl, so leave it out"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("drafter", "--from-traffic", "here"), "--starts-from"),
        (("drafter", "--from-traffic", "x", "--starts-from", "y", "--layers", "1"), "--layers"),
        (("drafter", "--loss", "acceptance"), f"--loss acceptance: {GONE}"),
        (("drafter", "--starts-from", "y", "--loss", "kl"), f"--loss kl: {GONE}"),
        (("medusa", "--loss", "acceptance"), f"--loss acceptance: {GONE}"),
    ],
)
def test_options_that_do_not_fit_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    kind, *options = words
    assert run(parse(kind, "x", "--target", "y", "--steps", "1", *options)) == 2
    assert complaint in capsys.readouterr().err
