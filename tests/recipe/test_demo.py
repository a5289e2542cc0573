"""The demonstration models are trained on a machine's own text, and drafters learn the target's
law; what is saved is an ordinary Hugging Face folder, and wrong options are explained."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from cluster.errors import ConfigError
from cluster.models.made_for import folder_made_for
from cluster.train.made_for import target_of
from cluster.train.processes import new_accelerator
from cluster.train.trainer import Budget, Rates, TrainingPhase
from models.recipe import demo
from models.recipe.__main__ import parse, run
from models.recipe.corpus import Document, train_tokenizer
from models.recipe.demo import (
    DistillationLoss,
    Recipe,
    Shape,
    bits_per_byte,
    build,
    heldout_bits,
    load,
    save,
    train_demo,
)

VOCAB = 64
TINY = Shape(32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)
SMALLER = Shape(16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
PHASES = (TrainingPhase(0.0, 16, 2),)


def toy(seed: int, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    network = build(TINY, end_of_text_id=0, vocab_size=vocab_size)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network.eval()


WINDOWS = torch.randint(VOCAB, (8, 33), generator=torch.Generator().manual_seed(0))


def test_a_network_does_not_diverge_from_itself_and_does_from_another():
    with torch.no_grad():
        same = DistillationLoss(toy(seed=1), toy(seed=1))(WINDOWS)
        other = DistillationLoss(toy(seed=2), toy(seed=1))(WINDOWS)
    assert same.item() == pytest.approx(0.0, abs=1e-6)
    assert other.item() > 0.1


def test_one_window_over_the_whole_text_is_the_plain_loss():
    """Every byte of a document is scored once."""
    tokenizer = train_tokenizer(["windows slide over the text\n"] * 3, vocab_size=270)
    text = "windows slide over text, and the text is longer than any window\n" * 3
    model, ids = toy(0, len(tokenizer)), [0, *tokenizer.encode(text)]
    cost = bits_per_byte(model, tokenizer, [Document("prose", "a", text)])
    batch = torch.tensor([ids])
    with torch.no_grad(), new_accelerator().autocast():
        loss = model(input_ids=batch, labels=batch).loss.item()
    assert cost.bits == pytest.approx(loss * (len(ids) - 1) / math.log(2.0), rel=1e-2)


def tiny_corpus() -> list[Document]:
    code = "".join(
        f'def double_{index}(number):\n    """Twice a number, as it is in class {index}.\n\n'
        f"    Numbers of any size are allowed; nothing is rounded, nothing is kept anywhere.\n"
        f'    """\n    return 2 * number\n\n'
        for index in range(60)
    )
    prose = "".join(
        f"Chapter {index}\n=========\n\nThis chapter is about the number {index}, and it says "
        "nothing that others did not say before it, in other words.\n\n"
        for index in range(60)
    )
    held_out = "package/module_40.py"
    return [
        Document("code", "a.py", code),
        Document("prose", "a.rst", prose),
        Document("code", held_out, code),
        Document("prose", held_out, prose),
    ]


def test_target_and_drafters_are_trained_from_text_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipes = (
        Recipe("demo-target", TINY, ("code", "prose", "chat"), 0.6, PHASES, 64, Rates()),
        Recipe("demo-draft", SMALLER, ("code", "prose"), 0.3, PHASES, 64, Rates()),
        Recipe("demo-draft-code", "demo-draft", ("code",), 0.1, PHASES, 64, Rates()),
    )
    monkeypatch.setattr(demo, "RECIPES", recipes)
    monkeypatch.setattr(demo, "load_corpus", tiny_corpus)
    monkeypatch.setattr(demo, "compile_for_each_shape", lambda objective: None)
    work, models = tmp_path / "work", tmp_path / "models"
    train_demo(work, models, (), Budget(steps=20), 1, 0)
    assert sorted(each.name for each in models.iterdir()) == [each.name for each in recipes[1:]] + [
        "demo-target"
    ]
    target = target_of(str(models / "demo-target"))
    assert folder_made_for(models / "demo-draft") == target
    assert folder_made_for(models / "demo-draft-code") == target
    costs = heldout_bits(models / "demo-target", None)
    assert all(0.0 < each.rate < 8.0 for each in costs.values())

    # What is trained stays as it is; a longer budget goes on.
    weights = (models / "demo-draft" / "model.safetensors").read_bytes()
    train_demo(work, models, ("demo-draft",), Budget(steps=6), 1, 0)
    assert (models / "demo-draft" / "model.safetensors").read_bytes() == weights
    train_demo(work, models, ("demo-draft",), Budget(steps=12), 1, 0)
    assert (models / "demo-draft" / "model.safetensors").read_bytes() != weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("network")
    tokenizer = train_tokenizer(["for every text there is a network\n"] * 5, vocab_size=280)
    save(build(TINY, end_of_text_id=0, vocab_size=len(tokenizer)), tokenizer, path)
    return path


def test_weights_are_bfloat16_and_the_tied_matrix_is_stored_once(folder: Path):
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights


def test_both_stop_tokens_end_generation(folder: Path):
    config = json.loads((folder / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(config["eos_token_id"]) == ["<|endoftext|>", "<|end|>"]


def test_folder_without_a_network_is_named_in_the_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent: no model here"):
        load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "STEP"),
        (("train",), "--steps --minutes"),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        parse([*words])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("train", "demo-draft-poetry", "--steps", "5"), "known: demo-target"),
        (("bits",), "`make train`"),
    ],
)
def test_wrong_names_and_missing_models_are_named(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(parse([*words, "--models", str(tmp_path)])) == 2
    assert complaint in capsys.readouterr().err
