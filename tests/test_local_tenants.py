"""`LLM`: whose text a request is, as drafters hear it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config.schema import DrafterConfig
from cluster.core import Commit, Observation, SamplingParams
from cluster.draft.suffix import SuffixDrafter
from cluster.local import LLM
from cluster.requests.fields import DEFAULT_TENANT, tenant_of
from tests.support.local_models import drafting

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_drafters_hear_the_tenant_of_a_salt_and_not_the_salt(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Commit] = []
    observe = SuffixDrafter.observe

    def noted(drafter: SuffixDrafter, commits: Sequence[Commit]) -> Sequence[Observation]:
        heard.extend(commits)
        return observe(drafter, commits)

    monkeypatch.setattr(SuffixDrafter, "observe", noted)
    with LLM(drafting(llama_folder, {"suffix": DrafterConfig("suffix")})) as llm:
        texts = {
            tuple(llm.generate([5, 6, 7], GREEDY, cache_salt=salt)[0].token_ids)
            for salt in ("secret", None)
        }
    assert len(texts) == 1, "a salt changes no text"
    opened = {commit.tenant for commit in heard if commit.params is not None}
    assert opened == {tenant_of("secret"), DEFAULT_TENANT}
    assert not any(b"secret" in commit.tenant for commit in heard)
