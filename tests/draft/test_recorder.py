"""The recorder: what it keeps of answers, of whom, where, and for how long."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cluster.core import SamplingParams
from cluster.draft.options import RecorderOptions
from cluster.draft.recorded import (
    UNSALTED,
    Origin,
    RecordedAnswer,
    encode,
    read_answer,
    read_folder,
    tenant_name,
    tokens_in,
)
from cluster.draft.recorder import RELEASE, SPILL, Keeper
from cluster.worker.residents import Residents
from tests.support.clock import FakeClock
from tests.support.draft.recording import ORIGIN, PER_TENANT, STOP, K, World, law
from tests.support.errors import config_error
from tests.support.worker.residents import LONG_STEP, resident, resident_text


def recorded(world: World) -> World:
    """Closed behind texts of three tenants, side by side."""
    names = [f"r{index}" for index in range(12)]
    for index, name in enumerate(names):
        world.open(name, index % 3, prompt_len=3 + index)
    for _ in range(4):
        for name in names:
            world.step(name)
    world.close(*names)
    return world


def ids_in(answer: RecordedAnswer) -> np.ndarray[Any, Any]:
    parts = (
        answer.prompt,
        answer.token_ids,
        answer.candidates,
        answer.rejected_token_ids,
        answer.rejected_candidates,
    )
    return np.concatenate([each.ravel() for each in parts])


def path_of(answer: RecordedAnswer, node: int) -> tuple[int, ...]:
    words = list[int]()
    while True:
        words.insert(0, int(answer.rejected_token_ids[node]))
        parent = int(answer.rejected_parents[node])
        if parent < 0:
            before = answer.token_ids[: answer.rejected_places[node]].tolist()
            return (*answer.prompt.tolist(), *before, *words)
        assert answer.rejected_places[node] == answer.rejected_places[parent] + 1
        node = parent


@pytest.mark.parametrize("seed", range(2))
def test_every_token_and_every_rejected_node_has_the_law_behind_it(tmp_path: Path, seed: int):
    world = recorded(World(tmp_path, seed))
    answers = read_folder(tmp_path, ORIGIN)
    texts = {tuple(text.prompt): text for text in world.texts.values()}
    assert len(answers) == len(texts)
    num_rejected = 0
    for answer in answers:
        text = texts[tuple(answer.prompt.tolist())]
        assert [*answer.prompt.tolist(), *answer.token_ids.tolist()] == text.tokens
        for place, candidates in enumerate(answer.candidates):
            expected = law(tuple(text.tokens[: len(answer.prompt) + place]))
            assert candidates.tolist() == expected.tolist()
        for node, candidates in enumerate(answer.rejected_candidates):
            assert candidates.tolist() == law(path_of(answer, node)).tolist()
        num_rejected += len(answer.rejected_token_ids)
        assert answer.temperature == 0.5
        for place in answer.first_rejected:
            assert not answer.is_accepted[place]
    assert num_rejected > 10


@pytest.mark.parametrize("keep", ["disk", "memory"])
def test_one_tenants_tokens_are_never_in_anothers_file(tmp_path: Path, keep: str):
    """Nor after one tenant was released, whose tokens are nowhere then."""
    world = recorded(World(tmp_path, keep=keep))
    assert keep == "disk" or not list(tmp_path.iterdir())
    request = tmp_path / f"{tenant_name(bytes([1]) * 16)}{RELEASE}"
    request.touch()
    if keep == "memory":
        (tmp_path / SPILL).touch()
    world.recorder.keeper.obey()
    assert request.exists(), "other targets have to see it too"
    os.utime(request, (time.time() - 30.0,) * 2)
    world.recorder.keeper.obey()
    assert not request.exists()
    found = {}
    for tenant in range(3):
        name = tenant_name(bytes([tenant]) * 16 if tenant else b"")
        for path in tmp_path.glob(f"{name}/*"):
            ids = ids_in(read_answer(path, ORIGIN))
            assert set(ids // PER_TENANT) == {tenant}
            found[path] = tenant
    assert sorted(set(found.values())) == [0, 2]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == found.keys()


def test_files_are_the_owners_alone(tmp_path: Path):
    """Where others could read a tenant's folder, it is closed."""
    folder = tmp_path / "recorded"
    folder.mkdir(mode=0o700)
    (folder / UNSALTED).mkdir()
    os.chmod(folder / UNSALTED, 0o755)
    recorded(World(folder))
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("tenants", ["none", "unsalted"])
def test_nobody_is_recorded_who_is_not_meant(tmp_path: Path, tenants: str):
    """What was recorded of them before is deleted."""
    recorded(World(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    world = World(tmp_path, tenants=tenants)
    world.recorder.begin()
    recorded(world)
    assert [each.name for each in tmp_path.iterdir()] == ([UNSALTED] * (tenants == "unsalted"))
    assert world.recorder.wants.num_top == (32 if tenants == "unsalted" else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"params": SamplingParams(forced_ids=(1, 2))},
        {"adapter": "other"},
        {"tenant": b"draft-profile"},
    ],
    ids=["given", "adapter", "profile"],
)
def test_what_the_target_did_not_write_for_a_client_is_not_recorded(
    tmp_path: Path, changes: dict[str, Any]
):
    world = World(tmp_path)
    world.open("a")
    world.step("a", **changes)
    world.close("a")
    assert not list(tmp_path.iterdir())


def test_only_the_steps_of_what_is_recorded_have_their_likeliest_tokens_found(
    tmp_path: Path,
):
    reader = resident(World(tmp_path, share=0.25).recorder)
    together = Residents([reader])
    texts = [resident_text(name=f"r{index}") for index in range(80)]
    found = [reader.num_top(text.id, text.opened.tenant) for text in texts]
    assert set(found) == {0, 32}
    assert 8 <= found.count(32) <= 32
    # It is no drafter that a plan could count on.
    assert together.usable(0.0) == ()
    assert together.draft(texts, LONG_STEP).trees == []


def test_an_answer_ends_with_its_stop_token_and_before_steps_that_were_missed(
    tmp_path: Path,
):
    world = World(tmp_path)
    world.open("stopped")
    world.step("stopped")
    world.step("stopped", num_nodes=0, next_token=STOP)
    world.step("stopped")
    world.open("missed")
    world.step("missed", num_nodes=0)
    world.texts["missed"].tokens += [9, 9]
    world.step("missed")
    world.close("stopped", "missed")
    stopped, missed = read_folder(tmp_path, ORIGIN)
    assert stopped.token_ids[-1] == STOP
    assert len(missed.token_ids) == 1


def answer(folder: Path) -> RecordedAnswer:
    """One whose tokens are 12 at least."""
    world = World(folder / "other")
    world.open("a")
    for _ in range(4):
        world.step("a")
    return world.recorder._recordings["a"].answer()


@pytest.mark.parametrize("keep", ["disk", "memory"])
def test_each_tenant_keeps_the_newest_within_the_bounds(tmp_path: Path, keep: Any):
    one = answer(tmp_path)
    clock = FakeClock(1e9, tick_s=1.0)
    options = RecorderOptions(
        "all", 1.0, keep, str(tmp_path / "here"), 5 * one.num_tokens, 1.0, max_tenants=2
    )
    keeper = Keeper(options, ORIGIN, clock)
    for tenant in (b"a" * 16, b"", b"b" * 16):
        for _ in range(8):
            keeper.keep(tenant, one)
    keeper.close(60.0)
    kept = keeper._folder if keep == "disk" else keeper._memory
    assert sorted(kept.tenants()) == sorted([UNSALTED, (b"b" * 16).hex()])
    for tenant in kept.tenants():
        names = kept.names(tenant)
        assert len(names) == 5
        assert sum(map(tokens_in, names)) <= options.max_tokens
    for _ in range(300):  # within a minute
        keeper._put(b"", one)
    assert len(kept.names(UNSALTED)) < 100
    clock.now += 3600.0
    keeper.trim()
    assert not kept.tenants()


def test_one_that_is_refused_in_a_live_change_deletes_nothing(tmp_path: Path):
    recorded(World(tmp_path))
    kept = sorted(tmp_path.rglob("*.npz"))
    other = World(tmp_path, tenants="none")
    other.close()
    assert sorted(tmp_path.rglob("*.npz")) == kept
    other.recorder.begin()
    other.close()
    assert not list(tmp_path.rglob("*.npz"))


def test_an_answer_that_cannot_be_kept_does_not_end_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    one, outcomes = answer(tmp_path), iter([ValueError("no such array"), b"bytes"])
    monkeypatch.setattr("cluster.draft.recorder.encode", Mock(side_effect=outcomes))
    keeper = Keeper(RecorderOptions("all", 1.0, "memory", str(tmp_path), 1000, 1.0), ORIGIN)
    keeper.keep(b"", one)
    keeper.keep(b"", one)
    keeper.close(60.0)
    assert len(keeper._memory.names(UNSALTED)) == 1
    assert "could not keep an answer" in caplog.text


def test_a_file_that_is_deleted_while_all_are_read_is_left_out(tmp_path: Path):
    recorded(World(tmp_path))
    num_answers = len(read_folder(tmp_path, ORIGIN))
    first = min(tmp_path.rglob("*.npz"), key=lambda path: path.name)
    (tmp_path / UNSALTED / first.name.replace(first.name[:20], "9" * 20)).symlink_to("gone")
    assert len(read_folder(tmp_path, ORIGIN)) == num_answers


def test_another_peoples_file_in_the_folder_is_left_alone(tmp_path: Path):
    (tmp_path / UNSALTED).mkdir()
    for path in (tmp_path / "notes.txt", tmp_path / UNSALTED / "mine.npz"):
        path.write_text("mine")
    world = World(tmp_path, tenants="none")
    world.recorder.begin()
    world.close()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_a_disk_that_takes_nothing_costs_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "full").write_text("no folder")
    recorded(World(tmp_path / "full"))
    assert "recorder cannot write" in caplog.text
    assert caplog.text.count("recorder cannot write") == 1


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"candidates.npy") + 200] ^= 0xFF
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    np.savez(path, answers=np.arange(3))


def _pickled(path: Path) -> None:
    np.savez(path, format=np.array([{}], object))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_flipped, "cannot be read"),
        (_foreign, "is no draft"),
        (_pickled, "cannot be read"),
        (lambda path: path.write_text("text"), "cannot be read"),
    ],
    ids=["flipped", "foreign", "pickled", "text"],
)
def test_a_damaged_or_foreign_file_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], told: str
):
    recorded(World(tmp_path))
    path = next(tmp_path.rglob("*.npz"))
    damage(path)
    with config_error(told) as raised:
        read_folder(tmp_path, ORIGIN)
    assert str(path) in raised.value.message


@pytest.mark.parametrize(
    "origin",
    [
        Origin("other", "tokenizer", ORIGIN.vocab_size),
        Origin("model", "other", ORIGIN.vocab_size),
        Origin("model", "tokenizer", PER_TENANT),
    ],
    ids=["model", "tokenizer", "size"],
)
def test_another_targets_answers_are_refused_by_name(tmp_path: Path, origin: Origin):
    path = tmp_path / "answer.npz"
    path.write_bytes(encode(answer(tmp_path), ORIGIN))
    with config_error("another target wrote it") as raised:
        read_answer(path, origin)
    assert str(path) in raised.value.message
    # In whatever format its weights are served, it is the same checkpoint.
    served = Origin(f"{ORIGIN.model_hash}|weights=int8", ORIGIN.tokenizer_hash, ORIGIN.vocab_size)
    assert read_answer(path, served).candidates.shape[1] == K


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path):
    found = answer(tmp_path)
    found.token_ids[0] = ORIGIN.vocab_size
    path = tmp_path / "answer.npz"
    path.write_bytes(encode(found, ORIGIN))
    with config_error("outside the vocabulary"):
        read_answer(path, ORIGIN)


def test_a_folder_is_needed_where_anything_is_recorded():
    with config_error("folder"):
        RecorderOptions("all")
