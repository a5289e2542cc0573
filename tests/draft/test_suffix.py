from __future__ import annotations

import numpy as np
import pytest

from cluster.draft.base import DrafterContext
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter, SuffixOptions
from cluster.errors import ConfigError
from tests.support.draft.author import Author, write

CONTEXT = DrafterContext("suffix", 16, 8)
CIRCLE = (b"", "default")  # of most authors


def drafter(max_nodes: int = 16, **options: object) -> SuffixDrafter:
    context = DrafterContext("suffix", max_nodes, 8)
    return SuffixDrafter(context, SuffixOptions(**options))  # type: ignore[arg-type]


def text_of(seed: int, length: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, length).astype(np.int32)


def finish(suffix: SuffixDrafter, author: Author, output: list[int]) -> None:
    write(suffix, author, [])
    write(suffix, author, output)
    suffix.release([author.request_id])


def test_a_past_output_is_drafted_again() -> None:
    suffix = drafter(max_nodes=4)
    finish(suffix, Author([7, 8, 9]), [50, 51, 52, 53, 54, 55, 56])
    proposal = write(suffix, Author([1, 2, 52, 53], request_id="next"), [])
    assert proposal.tree.token_ids.tolist() == [54, 55, 56]
    assert proposal.tree.parents.tolist() == [-1, 0, 1]


def test_the_same_prompt_gets_the_same_output_from_its_first_token_on() -> None:
    suffix = drafter(max_nodes=3)
    finish(suffix, Author([7, 8, 9]), [50, 51, 52, 53])
    proposal = write(suffix, Author([7, 8, 9], request_id="next"), [])
    assert proposal.tree.token_ids.tolist() == [50, 51, 52]


def test_other_tasks_do_not_see_an_output_and_a_prompt_is_not_one() -> None:
    suffix = drafter(min_ngram=2)
    finish(suffix, Author([7, 8, 9, *range(100, 150), 3], task="code"), [50, 51, 52, 53, 54])
    assert write(suffix, Author([1, 51, 52], task="prose", request_id="other"), []) is None
    assert write(suffix, Author([1, 7, 8], task="code", request_id="same"), []) is None
    assert write(suffix, Author([1, 51, 52], task="code", request_id="again"), []) is not None


def test_other_tenants_do_not_see_an_output() -> None:
    suffix = drafter()
    finish(suffix, Author([7, 8, 9], tenant=b"a"), [50, 51, 52, 53, 54])
    for tenant in (b"", b"b"):
        other = Author([1, 51, 52], request_id=f"other {tenant!r}", tenant=tenant)
        assert write(suffix, other, []) is None
    own = Author([1, 51, 52], request_id="own", tenant=b"a")
    assert write(suffix, own, []) is not None


def test_what_is_kept_is_bounded_over_tenants() -> None:
    suffix = drafter(max_tokens=100, max_stores=3)
    for number in range(20):
        author = Author([7, 8], request_id=f"r{number}", tenant=b"%d" % number)
        finish(suffix, author, text_of(number, 40).tolist())
    for number, is_known in ((19, True), (17, True), (16, False)):
        text = text_of(number, 40)[:10].tolist()
        author = Author(text, request_id=f"next {number}", tenant=b"%d" % number)
        assert (write(suffix, author, []) is not None) == is_known


def test_an_end_of_the_text_that_is_never_looked_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_ngram: 9 exceeds max_ngram, 8"):
        SuffixOptions(min_ngram=9)


def test_prompt_lookup_keeps_no_outputs() -> None:
    lookup = SuffixDrafter(CONTEXT, PromptLookupOptions())
    finish(lookup, Author([7, 8, 9]), [50, 51, 52])
    assert len(lookup._outputs(CIRCLE)) == 0
    assert write(lookup, Author([7, 8, 9], request_id="next"), []) is None
    assert write(lookup, Author([7, 8, 9, 7], request_id="own"), []) is not None
