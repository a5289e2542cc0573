"""The demonstration models: they are trained on a machine's own text, and drafters learn the
target's law; the corpus and its vocabulary; and the published folders, which work together."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from cluster.models.made_for import folder_made_for
from cluster.train.chat_heads import target_of
from cluster.train.compare import compare, drafters_of, read_questions
from cluster.train.trainer import Budget, Rates, TrainingPhase, new_accelerator
from models.recipe import demo
from models.recipe.__main__ import parse, run
from models.recipe.corpus import (
    KINDS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Document,
    Kind,
    encode_documents,
    load_corpus,
    render_turn,
    train_tokenizer,
)
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
from tests.support.choices import by_day, by_night
from tests.support.errors import config_error

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
    tokenizer = train_tokenizer(TEXTS * 5, vocab_size=300)
    save(build(TINY, end_of_text_id=0, vocab_size=len(tokenizer)), tokenizer, path)
    return path


def test_weights_are_bfloat16_and_the_tied_matrix_is_stored_once(folder: Path):
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights


def test_both_stop_tokens_end_generation(folder: Path, tokenizer: PreTrainedTokenizerFast):
    config = json.loads((folder / "generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(config["eos_token_id"]) == ["<|endoftext|>", "<|end|>"]


def test_folder_without_a_network_is_named_in_the_error(tmp_path: Path):
    with config_error(r"absent: no model here"):
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


# The corpus and its vocabulary.

PATHS = [f"package/module_{index}.py" for index in range(4000)]
HELD_OUT = [path for path in PATHS if Document("code", path, "").is_held_out]
LEARNT = [path for path in PATHS if path not in set(HELD_OUT)]
FROZEN = ["package/module_40.py", "package/module_46.py", "package/module_64.py"]


def lines(seed: int, num_lines: int = 30) -> str:
    return "".join(
        f"line {index} of document {seed} says something that no other line says\n"
        for index in range(num_lines)
    )


def read(root: Path, files: dict[str, str]) -> list[Document]:
    """The documents of a machine with these files of code and one of prose."""
    for path, text in {"prose/index.rst.txt": lines(1000), **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return load_corpus({"code": root, "prose": root / "prose"})


def code_paths(documents: list[Document]) -> list[str]:
    return [each.path for each in documents if each.kind == "code"]


def test_split_by_path_never_changes_and_holds_out_about_one_in_twenty():
    # Must not change: otherwise new models train on text that earlier models were measured on.
    assert HELD_OUT[:3] == FROZEN
    assert 0.8 < len(HELD_OUT) / len(PATHS) * 20 < 1.2


def test_text_in_both_parts_leaves_the_held_out_part(tmp_path: Path):
    near_copy = lines(1, num_lines=20) + lines(9, num_lines=10)
    files = {
        HELD_OUT[0]: lines(1).upper(),
        HELD_OUT[1]: lines(2),
        HELD_OUT[2]: near_copy,
        LEARNT[0]: lines(1),
        LEARNT[1]: lines(1).replace(" ", "  "),
    }
    found = code_paths(read(tmp_path, files))
    assert found == [LEARNT[0], HELD_OUT[1]]


def test_a_missing_corpus_names_the_package_to_install(tmp_path: Path):
    with config_error("absent; install python3"):
        load_corpus({"code": tmp_path / "absent", "prose": tmp_path})


TEXTS = (
    "def area(width, height):\n    return width * height\n",
    "\n\n\t tabs\tand   spaces  \n",
    "naïve café 日本語 🙂 \u0000\n",
    "0123456789 12.5e-3",
)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*TEXTS, "never seen: ß∂ƒ"])
def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerFast, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_and_come_first(tokenizer: PreTrainedTokenizerFast):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))
    assert tokenizer.encode("<|user|>") == [2]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.decode([2, 4], skip_special_tokens=True) == ""


def test_chat_template_spells_conversations_as_training_does(
    tokenizer: PreTrainedTokenizerFast,
):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Yes."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|system|>Be brief.<|end|>" + render_turn("Hello?", "Yes.")
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert render_turn("Hello?", "Yes.").startswith(
        asked.removeprefix("<|system|>Be brief.<|end|>")
    )
    assert asked.endswith("<|end|><|assistant|>")


def test_encoded_documents_end_with_the_end_of_text_token(
    tokenizer: PreTrainedTokenizerFast,
):
    tokens = encode_documents(["one two", "three"], tokenizer).tolist()
    assert tokens.count(0) == 2
    assert tokens[-1] == 0
    assert tokenizer.decode(tokens) == "one two<|endoftext|>three<|endoftext|>"


# The published folders.

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-target", "demo-draft", "demo-draft-code", "demo-draft-prose")
TASK_DRAFTERS = {"code": "demo-draft-code", "prose": "demo-draft-prose"}


def read_published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODELS / name)


def excerpts(kind: Kind) -> list[dict[str, str]]:
    lines = (MODELS / "heldout.jsonl").read_text("utf-8").splitlines()
    return [each for line in lines if (each := json.loads(line))["kind"] == kind]


def test_all_folders_together_stay_small():
    num_bytes = sum(file.stat().st_size for name in NAMES for file in (MODELS / name).iterdir())
    assert num_bytes <= 40 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_folder_holds_the_ordinary_files_and_the_shared_vocabulary(name: str):
    assert sorted(file.name for file in (MODELS / name).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    shared = (MODELS / "demo-target" / "tokenizer.json").read_bytes()
    assert (MODELS / name / "tokenizer.json").read_bytes() == shared
    assert json.loads((MODELS / name / "config.json").read_text())["vocab_size"] == VOCAB_SIZE


def test_published_vocabulary_has_exactly_its_stated_size():
    tokenizer = read_published_tokenizer("demo-target")
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))


def test_target_answers_a_chat_and_stops():
    tokenizer = read_published_tokenizer("demo-target")
    network = AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [
            {
                "role": "user",
                "content": "Write a Python function `is_even`: Whether a number is even.",
            }
        ],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = network.generate(**asked, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
    assert text.startswith("def is_even(")


def test_excerpts_are_many_short_and_licensed():
    assert (MODELS / "heldout.jsonl").stat().st_size <= 400_000
    for kind in KINDS:
        assert len(excerpts(kind)) >= 50
        assert all(20 <= len(each["text"]) <= 6000 for each in excerpts(kind))
        assert {each["licence"] for each in excerpts(kind)} <= {"PSF-2.0", "PostgreSQL"}


@by_night
def test_drafters_are_accepted_on_held_out_text():
    target = str(MODELS / "demo-target")
    drafters = drafters_of(target, MODELS.glob("demo-*/"))
    assert set(drafters) == {"suffix", "demo-draft", *TASK_DRAFTERS.values()}
    questions = read_questions(MODELS / "heldout.jsonl", per_task=2)
    chosen = {name: each for name, each in drafters.items() if name != "suffix"}
    for name, by_task in compare(target, chosen, questions).items():
        # Few, short texts.  An untrained drafter stays near 1.
        mean = sum(each.tokens_per_step for each in by_task.values()) / len(by_task)
        assert mean > 1.6, name


@torch.no_grad()
@pytest.mark.parametrize("kind", by_day(KINDS[:1], KINDS))
def test_each_task_drafter_is_closer_to_the_target_on_its_own_task(kind: Kind):
    tokenizer, target = read_published_tokenizer("demo-target"), load(MODELS / "demo-target")
    losses = [
        DistillationLoss(load(MODELS / name), target)
        for name in ("demo-draft", TASK_DRAFTERS[kind])
    ]
    leads = []
    for excerpt in excerpts(kind)[:16]:
        ids = tokenizer.encode(excerpt["text"], add_special_tokens=False)[-1024:]
        general, task = (float(loss(torch.tensor([[*ids, 0]]))) for loss in losses)
        leads.append(general - task)
    # Two standard errors of the mean.
    assert np.mean(leads) > 2 * np.std(leads) / len(leads) ** 0.5
