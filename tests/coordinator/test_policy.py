"""A policy switches drafts off by task class and law, says so, and changes while it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core import SpeculationOptions
from cluster.errors import ConfigError
from tests.support.coordinator.house import GREEDY, SEEDED, House, collect, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain, plain_text

OFF = "rules: [{task: default, law: greedy, drafts: off}]"


def written(folder: Path, rules: str) -> str:
    path = folder / "policy.yaml"
    # In place of the former one at a stroke, as an operator should; also another inode.
    (folder / "new.yaml").write_text(rules)
    (folder / "new.yaml").rename(path)
    return str(path)


def plain_steps(stage: House) -> list[str]:
    page = stage.coordinator.render_metrics().decode()
    return [line for line in page.splitlines() if "plain_steps_total{" in line and "policy" in line]


async def test_off_gives_the_same_text_without_drafts_and_says_why(tmp_path: Path) -> None:
    async with house(policy=written(tmp_path, OFF)) as stage:
        drafter = ToyDrafter("a", oracle_chain())
        stage.add_target(ToyTarget())
        stage.add_drafter(drafter)
        events = await collect(stage.coordinator, request())
        assert text_of(events) == plain_text([1, 2, 3], GREEDY)
        stats = events[-1].stats
        assert stats is not None
        assert (stats.num_spec_steps, stats.idle_because) == (0, "policy")
        assert not drafter.opened, "nobody is asked"
        # The step of the prompt and that of the last token could have had none.
        (line,) = plain_steps(stage)
        assert float(line.split()[-1]) == stats.num_steps - 2
        sampled = await collect(stage.coordinator, request(params=SEEDED, id="sampled"))
        assert sampled[-1].stats is not None
        assert sampled[-1].stats.idle_because != "policy"
        assert "sampled" in str(drafter.opened)


async def test_a_changed_file_holds_for_the_next_request_and_a_wrong_one_does_not(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, OFF)
    async with house(policy=path) as stage:
        target = ToyTarget()
        stage.add_target(target)

        async def opened(**fields: object) -> tuple[tuple[str, ...], int]:
            await collect(stage.coordinator, request([1, 2], **fields))
            last = [each for frame in target.frames for each in frame.opens][-1]
            return last.drafters, last.max_draft_tokens

        assert await opened() == ((), 0)
        written(tmp_path, "rules: [{drafts: measure, drafters: [b]}]")
        assert await opened() == (("b",), 16)
        asked = SpeculationOptions(drafters=("a",))
        assert await opened(speculation=asked) == ((), 16), "the policy is above the request"
        written(tmp_path, "rules: [{drafters: [nobody]}]")
        assert await opened() == (("b",), 16)


async def test_a_request_that_wants_no_drafts_is_not_the_policys(tmp_path: Path) -> None:
    async with house(policy=written(tmp_path, OFF)) as stage:
        stage.add_target(ToyTarget())
        asked = request(speculation=SpeculationOptions(enabled=False))
        stats = (await collect(stage.coordinator, asked))[-1].stats
        assert stats is not None
        assert stats.idle_because == "disabled"
        assert not plain_steps(stage)


async def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.yaml: cannot be read"):
        async with house(policy=str(tmp_path / "policy.yaml")):
            pass
