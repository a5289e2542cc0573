"""The nouns of speculative serving.  NumPy only; every module speaks in these terms.

Lengths count tokens from the start of the prompt.  For one sequence
`base_len <= base_len + len(delta) = context_len`: the sender assumes that the worker holds
`base_len` tokens and sends `delta`; then the worker has the whole committed context.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from cluster.records import frozen, record
from cluster.requests.fields import (
    NO_LAWS,
    BeamEnd,
    BeamSpec,
    DraftStep,
    GrammarSpec,
    Law,
    Laws,
    StepCount,
)

TokenArray = npt.NDArray[np.int32]
# One bit per token of the vocabulary, the lowest bit first: uint32[rows, ceil(vocab / 32)], or one
# row of it.
TokenMask = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float32]
# Seconds of any one clock.
Clock = Callable[[], float]

# The task class of requests that name none that is configured.
DEFAULT_TASK = "default"


def token_array(token_ids: Iterable[int] | TokenArray) -> TokenArray:
    """Return `token_ids` as a contiguous int32 array; no copy when it is one already."""
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids, dtype=np.int32)
    return np.fromiter(token_ids, dtype=np.int32)


# Of bytes that never change, so that nobody writes what everybody shares.
EMPTY_TOKENS: TokenArray = np.frombuffer(b"", dtype=np.int32)
EMPTY_FLOATS: FloatArray = np.frombuffer(b"", dtype=np.float32)


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"
    ERROR = "error"


@frozen
class SamplingParams:
    """The rules for the target's draws; with the prompt and the target they determine the text.

    temperature 0 is greedy.  top_k 0 and top_p 1 and min_p 0 keep every candidate.
    Presence and frequency penalties count output tokens, repetition_penalty prompt and output.
    seed: key of the noise, None or negative = whoever takes the request draws one.
    stream: requests with one seed and different streams have independent noise.
    stop_token_ids end the text and are not part of it.
    logprobs: number of alternatives to report per token, None = no log-probabilities at all.
    prediction: output tokens that the client expects; drafts may come from them, the text does not.
    forced_ids: the whole output, which is then scored instead of drawn; max_tokens is their number.
    beams: a beam search replaces the draws; only limits, stops and logprobs still count.
    law: how drafts are accepted, which follows from the request's SpeculationOptions.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stream: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    beams: BeamSpec | None = None
    law: Law = "coupled"

    @property
    def noise_key(self) -> int:
        """The seed as the 64 unsigned bits that the noise is keyed with; 0 without a seed."""
        return (self.seed or 0) & ((1 << 64) - 1)

    @property
    def is_coupled(self) -> bool:
        """True if drafts are accepted where they are the target's own draws; so is greedy text."""
        return self.law == "coupled" or self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """True if draws drop candidates; then a few of them usually hold all of the law's mass."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)


@frozen
class SpeculationOptions:
    """The request's options for speculation; only the law may change its text.

    max_draft_tokens: upper bound of draft nodes per step, None = the controller decides.
    drafters: names allowed for this request, None = those of its task.
    latency_class: a name in `coordinator.latency_classes`, which gives the weight of the request's
    speed when a step's nodes are distributed; None = weight 1.
    return_draft_sources: events say which drafters had proposed each token; return_draft_trees:
    they hold every step with the tree that it verified.
    law: how drafts are accepted, None = the first of `coordinator.laws`.
    """

    enabled: bool = True
    max_draft_tokens: int | None = None
    drafters: tuple[str, ...] | None = None
    latency_class: str | None = None
    return_draft_sources: bool = False
    law: Law | None = None
    return_draft_trees: bool = False


@record
class Request:
    """A client's request, in tokens.  Immutable.

    output_ids: tokens already emitted, which the output continues.
    was_admitted: a former coordinator had admitted it, so it need not queue again.
    tenant: see `cluster.requests.fields`; only the tenant's own earlier texts may help.
    adapter: the adapter to run with, as in an `AdapterList` or by name alone, "" = none.
    timeout_s: what the client allows from now on, queueing included; 0 = any time.
    segment: a label of its metrics, "" = none are configured.
    counts_steps: its text may end before its tokens do, so that events have `steps`.
    """

    id: str
    prompt_ids: TokenArray
    params: SamplingParams
    task: str = DEFAULT_TASK
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    output_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    was_admitted: bool = False
    tenant: bytes = b""
    adapter: str = ""
    timeout_s: float = 0.0
    segment: str = ""
    counts_steps: bool = False


@record
class TokenTree:
    """Speculative tokens that continue a context; n = 0 is legal and means plain decoding.

    token_ids: int32[n].  parents: int32[n], parents[i] < i; -1 continues the context.
    Siblings carry different tokens.
    """

    token_ids: TokenArray
    parents: TokenArray

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, token_ids: Iterable[int], parents: Iterable[int]) -> TokenTree:
        return cls(token_array(token_ids), token_array(parents))

    @classmethod
    def chain(cls, token_ids: Sequence[int] | TokenArray) -> TokenTree:
        ids = token_array(token_ids)
        return cls(ids, np.arange(-1, len(ids) - 1, dtype=np.int32))

    def first(self, count: int) -> TokenTree:
        """The first `count` nodes, of which each has its parent."""
        return TokenTree(self.token_ids[:count], self.parents[:count])


EMPTY_TREE = TokenTree(EMPTY_TOKENS, EMPTY_TOKENS)


@record
class Proposal:
    """A tree that continues the first `base_len` tokens of a sequence.

    prefix_hash: poly64 of those tokens; a proposal whose hash differs is stale and dropped.
    survival: float32[n], probability that the emitted path passes through the node; it does not
    increase along a path.  A new proposal replaces the drafter's former one for the request.
    is_complete: the drafter proposes nothing else after these tokens.  laws: of the nodes, see
    `acceptance_law`.
    """

    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    tree: TokenTree
    survival: FloatArray
    drafter: str = ""
    is_complete: bool = False
    laws: Laws = field(default_factory=lambda: NO_LAWS)


@record
class Commit:
    """Committed tokens for a drafter: "append `token_ids` from `base_len`".

    prefix_hash: poly64 of the first base_len tokens.  max_nodes: the most nodes that the
    coordinator can use at present.  params, task and tenant come with the first commit of a
    (request, generation) and whenever base_len is 0.  A drafter that holds fewer than base_len
    tokens answers with their number (`Observation.have_len`) and is sent the rest.
    """

    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    token_ids: TokenArray
    prompt_len: int
    max_nodes: int
    task: str = DEFAULT_TASK
    params: SamplingParams | None = None
    tenant: bytes = b""


@frozen
class Observation:
    """A drafter's answer to one commit.

    have_len: tokens it now holds; less than base_len + len(token_ids) = send the rest.
    """

    request_id: str
    generation: int
    have_len: int


@frozen
class TokenLogprob:
    """Log-probabilities (natural log, raw model law) of one emitted token and its alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most probable first
    rank: int = 0  # among all tokens, 1 = most probable; 0 = not known


@frozen
class SpeculationStats:
    """Per-request statistics, in vLLM's definitions (see `docs` of the response field).

    As far as the text goes that the request's client is told: see `cluster.spec.statistics`.
    """

    num_steps: int = 0  # every target step that brought some of the text
    num_spec_steps: int = 0  # steps that verified at least one draft node
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()  # [k] = speculative steps that accepted k drafts
    accepted_by_drafter: Mapping[str, int] = field(default_factory=dict)  # credited to one each
    idle_because: str = ""  # an `IdleReason`; "" = there was such a step
    verified_by_drafter: Mapping[str, int] = field(default_factory=dict)  # counts for all drafters
    shared_by_drafter: Mapping[str, int] = field(default_factory=dict)  # credited to another one
    decode_time_s: float = 0.0  # from the first of these steps to the last

    @property
    def num_spec_tokens(self) -> int:
        """The most drafts that a step accepted; in vLLM the most that any step could accept."""
        return max(len(self.acceptance_histogram) - 1, 0)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)


@record
class TokenEvent:
    """Coordinator to ingress: new tokens of a request, in order; the last one is finished.

    position: index of token_ids[0] among the output tokens.  draft_sources: where asked for, one
    per token: the drafters that had proposed it, () for a token of the target's own.  draft_steps:
    likewise, the steps that brought the tokens.
    """

    request_id: str
    position: int
    token_ids: TokenArray
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: SpeculationStats | None = None  # with the last event
    error_code: str = ""  # with FinishReason.ERROR
    error_message: str = ""
    retry_after_s: float = 0.0  # with a CapacityError's code
    draft_sources: tuple[tuple[str, ...], ...] = ()
    queue_time_s: float = 0.0  # with the last event: until it first had a place at a target
    num_cached: int = 0  # prompt tokens that the prefix cache had when the request first came
    beams: tuple[BeamEnd, ...] = ()  # as in `Verdict`, in the only event of a beam search
    draft_steps: tuple[DraftStep, ...] = ()
    prefill_time_s: float = 0.0  # with the last event: from its place to its first tokens
    steps: tuple[StepCount, ...] = ()  # where asked for
