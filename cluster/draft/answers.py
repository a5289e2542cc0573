"""Checks of what a drafter answers, before anything relies on it: it may be anything at all."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.draft.inside import StepReader, StepWants
from cluster.errors import CapacityError, DrafthouseError, ProtocolError
from cluster.rpc.messages import Refusal

# Counts travel in 32 bits.
MAX_COUNT = (1 << 32) - 1


def checked_observation(commit: Commit, answer: object) -> Observation | Refusal:
    """The answer to the commit, or a refusal where the drafter takes nothing of the request.

    It would not take the text next time either, and without a refusal the prompt would be sent
    again and again.  Raises ProtocolError for what is no possible answer.
    """
    if not isinstance(answer, Observation):
        raise ProtocolError(f"a drafter answered a commit with a {type(answer).__name__}")
    if not type(answer.generation) is type(answer.have_len) is int:
        answer = _in_plain_numbers(answer)
    generation, have_len, name = answer.generation, answer.have_len, answer.request_id
    is_named = isinstance(name, str) and name == commit.request_id
    if not (is_named and generation >= 0 and 0 <= have_len <= MAX_COUNT):
        raise ProtocolError("a drafter's observation names another request, or counts no tokens")
    is_opened = commit.base_len == 0 and len(commit.token_ids) > 0
    if have_len > 0 or not is_opened or generation > commit.generation:
        return answer
    error: DrafthouseError = CapacityError(
        "the drafter holds as many requests as it may; raise its max_requests or add a replica"
    )
    if commit.prefix_hash != 0:
        error = ProtocolError(
            f"a commit from the start has prefix hash {commit.prefix_hash}; that of no token is 0"
        )
    return Refusal(name, commit.generation, error.code, error.message)


def _in_plain_numbers(answer: Observation) -> Observation:
    counts = answer.generation, answer.have_len
    if not all(isinstance(each, (int, np.integer)) for each in counts):
        raise ProtocolError("a drafter's observation counts no tokens")
    return replace(answer, generation=int(counts[0]), have_len=int(counts[1]))


def narrowed(proposal: Proposal) -> Proposal:
    """The proposal with int32 and float32 arrays, where that loses nothing.

    NumPy makes wider ones by default."""
    if not (isinstance(proposal, Proposal) and isinstance(proposal.tree, TokenTree)):
        return proposal
    tree = TokenTree(
        _narrow(proposal.tree.token_ids, np.int32), _narrow(proposal.tree.parents, np.int32)
    )
    return replace(proposal, tree=tree, survival=_narrow(proposal.survival, np.float32))


def _narrow(array: Any, dtype: type) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype.kind != np.dtype(dtype).kind:
        return array
    narrow: npt.NDArray[Any] = array.astype(dtype)
    return narrow if array.dtype.kind == "f" or np.array_equal(narrow, array) else array


def cut(proposal: Proposal, max_nodes: int) -> Proposal:
    """Keep only as many nodes as were asked for: choosing among more of them takes longer."""
    if len(proposal.tree) <= max_nodes:
        return proposal
    # Parents stand before their children.
    return replace(
        proposal, tree=proposal.tree.first(max_nodes), survival=proposal.survival[:max_nodes]
    )


def told_of(error: Exception, drafter: object, ours: frozenset[str]) -> str:
    """Return an error's type and the place in or below the drafter's own file that raised it.

    The message is left out, because it may quote the prompt; only our own messages about
    malformed answers, which the files `ours` raise, do not.
    """
    kind = type(error).__name__
    frames = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    theirs = [place for place in places if place[0] not in ours]
    if not theirs:
        is_ours = isinstance(error, ProtocolError)
        return f"{kind}: {error}" if is_ours else f"{kind} over what it answered"
    own = getattr(sys.modules.get(type(drafter).__module__), "__file__", None)
    path, line = next((place for place in reversed(theirs) if place[0] == own), theirs[-1])
    return f"{kind} ({path}, line {line})"


def reader_of(drafter: object) -> tuple[StepReader, StepWants] | None:
    """The drafter as a reader of steps, with what it wants of them; None = it is none."""
    if not isinstance(drafter, StepReader):
        return None
    wants = drafter.wants
    return drafter, StepWants(tuple(map(index, wants.taps)), max(index(wants.num_top), 0))
