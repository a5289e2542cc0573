"""What processes say to each other: who they are, and the frames of their streams.

What the frames are about stands in `cluster.core`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from cluster.core import (
    Commit,
    Completion,
    FinishReason,
    FloatArray,
    Observation,
    Proposal,
    Request,
    SamplingParams,
    TokenArray,
    TokenEvent,
    TokenLogprob,
    TokenTree,
)
from cluster.models.made_for import MadeFor
from cluster.records import record
from cluster.requests.beam_spec import BeamEnd

# Frames between peers carry this number; peers with another one refuse each other in Describe.
PROTOCOL_VERSION = 5


@record(frozen=True, slots=True, eq=False)
class Open:
    """A text that a target is to run until it ends: the whole of it, so that nothing is asked back.

    token_ids: prompt and output so far.  prefix_hash: poly64 of them.  drafters: names, whose bits
    stand for them in trees and verdicts.  max_draft_tokens: of one step.  weight: what its speed
    counts for.  max_len: of prompt and output together, as fixed when the request was admitted.
    """

    request_id: str
    generation: int
    token_ids: TokenArray
    prefix_hash: int
    prompt_len: int
    params: SamplingParams
    max_len: int
    task: str = "default"
    tenant: bytes = b""
    adapter: str = ""
    drafters: tuple[str, ...] = ()
    max_draft_tokens: int = 0
    weight: float = 1.0


@record(frozen=True, slots=True, eq=False)
class PoolTree:
    """What the pool guesses for a text, merged: it continues its first base_len tokens.

    prefix_hash: poly64 of these.  survival: float32[n], calibrated.  sources: uint32[n], which
    drafters proposed each node, as bits over the names of its `Open`.  weights: trust in each of
    these names, 0 = in none of the pool.
    """

    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    tree: TokenTree
    survival: FloatArray
    sources: npt.NDArray[np.uint32]
    weights: tuple[float, ...] = ()


class PlainWhy(enum.IntEnum):
    """Why a step verified no drafts for a text."""

    NONE = 0  # it verified some, or none were wanted
    GUARD = 1  # drafts have cost more than they brought, as much as they may
    NO_DRAFTS = 2  # none were at hand
    NOT_WORTH_IT = 3  # to verify those at hand, or to make some, would not have paid
    TIMED = 4  # now and then a plain step is timed, to know what drafts bring
    UNMEASURED = 5  # it is not known yet what steps take
    FAULT = 6  # the choice of nodes failed, or a step with drafts did


@record(frozen=True, slots=True, eq=False)
class TextVerdict:
    """What a step said of a text.

    context_len: tokens before the first of token_ids, which belong to the text: an end token does
    not.  sources: uint32[accepted], which drafters had proposed each accepted node, as bits over
    the names of its `Open`; owners: the one for which it counts (`cluster.spec.credit`).
    num_nodes: that were verified.  verified, credited: of these, those that each of the names had
    proposed, and those that count for it; empty = of none.  why: where num_nodes is 0.
    num_cached: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    generation: int
    context_len: int
    token_ids: TokenArray
    sources: npt.NDArray[np.uint32]
    owners: tuple[int, ...] = ()
    num_nodes: int = 0
    verified: tuple[int, ...] = ()
    credited: tuple[int, ...] = ()
    why: PlainWhy = PlainWhy.NONE
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached: int = 0
    beams: tuple[BeamEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine computes with, once it has settled that.

    name: of the resident whose engine it is, "" = the worker's own.  device: cpu or cuda:N.
    attention: native, triton or sdpa.  graphs: cuda or none.  kernels: of the other layers on a
    CPU (native, packed, compiled or torch), of the draws on a GPU (triton or torch).  kv_bytes,
    kv_tokens: size of the KV cache.  fallbacks: what runs in a slower way than was wanted, and why.
    """

    name: str
    device: str
    attention: str
    graphs: str
    kernels: str
    kv_bytes: int
    kv_tokens: int
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker says of itself in Describe; a mismatch is refused at connect.

    model_hash: of the checkpoint's config and weights index.  tokenizer_hash: over the token
    strings in id order, "" for drafters that serve any vocabulary.  devices: names of what it
    computes on, unique among all machines; empty = unknown.
    native_build: of its own machine code, "" = none; a target that is_reproducible gives the same
    bits as another of the same build.  residents: names of the drafters that run inside a target;
    look_ups: of those, the ones that run no model; refused: those that should and cannot, and why.
    made_for: of drafters that are here, by name, the target that each was made for.
    engines: the worker's own, and those of a target's residents.
    """

    worker_id: str
    role: str  # "target" | "drafter" | "coordinator"
    name: str
    protocol_version: int = PROTOCOL_VERSION
    model_hash: str = ""
    tokenizer_hash: str = ""
    vocab_size: int = 0
    max_context_len: int = 0
    max_running_sequences: int = 0
    max_batch_tokens: int = 0
    devices: tuple[str, ...] = ()
    native_build: str = ""
    is_reproducible: bool = False
    residents: tuple[str, ...] = ()
    look_ups: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    made_for: Mapping[str, MadeFor] = field(default_factory=dict)
    engines: tuple[EngineState, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item the worker cannot serve, and why (an error code of `cluster.errors`)."""

    request_id: str
    generation: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TextName:
    """A text under one owner."""

    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Said once a second by either side: the texts that it runs for the other.

    heard: serial of the last frame of the other side that was taken in.  What came later may be
    missing here, and is not missed.
    """

    texts: tuple[TextName, ...] = ()
    heard: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a target or a coordinator is, with the texts of all its peers.

    seats: texts that a target runs at most for whom it tells this, 0 = any number; texts that all
    targets run for a coordinator.  num_waiting: without a verdict yet; without a target.
    """

    seats: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    pages_in_use: int = 0
    pages_total: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Where one target step's time went, and what the engine holds after it.

    step_time_s: forward, draw and walk.  period_s: since the step before began, 0 where it did not
    follow at once.  draft_time_s: what residents took in that time.  num_sequences: texts that
    drew (decode or verify).  num_nodes: draft nodes verified.  num_prefill_tokens: rows of prefill
    chunks in the same step.
    """

    step_time_s: float = 0.0
    forward_time_s: float = 0.0
    period_s: float = 0.0
    draft_time_s: float = 0.0
    num_sequences: int = 0
    num_nodes: int = 0
    num_prefill_tokens: int = 0
    pages_in_use: int = 0
    pages_total: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A change of one of a process's metrics, on its way to whoever exports them.

    metric: its name.  how: "add" to a counter, or "set" a gauge.  labels: their values, in the
    metric's order.
    """

    metric: str
    how: Literal["add", "set"]
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The LoRA adapters that new requests may ask for.

    served: of each its name, "@" and a digest of its content, so that what began with one content
    does not go on with another.  refused: why the last change of them was, "" = it was not.
    """

    served: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StepFrame:
    """Coordinator to target: what it is to run and to end, and what the pool guesses.

    cancels apply before opens.  serial: grows by one with every frame of the stream.  acknowledged:
    the greatest serial that was received.
    """

    opens: tuple[Open, ...] = ()
    cancels: tuple[TextName, ...] = ()
    trees: tuple[PoolTree, ...] = ()
    serial: int = 0
    acknowledged: int = 0
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CommitFrame:
    """Coordinator to drafter."""

    commits: tuple[Commit, ...] = ()
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ProposalFrame:
    """Drafter to coordinator.  pages_*: KV pages of the drafter's engine, 0 without one."""

    proposals: tuple[Proposal, ...] = ()
    observations: tuple[Observation, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    pages_in_use: int = 0
    pages_total: int = 0
    num_requests: int = 0
    draft_time_s: float = 0.0
    completions: tuple[Completion, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VerdictFrame:
    """Target to coordinator: what a step said of the coordinator's texts.

    refusals: texts that the target does not run, or not any more.  serial, acknowledged: as in
    `StepFrame`.  load: with every heartbeat.  load, adapters: when adapters change, and when
    coordinators come or go.  report: of the step; samples: the target's own metrics; status: a JSON
    object: these three to one of the coordinators, which counts them.
    """

    verdicts: tuple[TextVerdict, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    report: StepReport | None = None
    serial: int = 0
    acknowledged: int = 0
    heartbeat: Heartbeat | None = None
    adapters: AdapterList | None = None
    samples: tuple[Sample, ...] = ()
    status: str = ""
    load: Load | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubmitFrame:
    """Ingress to coordinator: new requests, and ids of requests whose client went away.

    A request that cannot be admitted is answered by a finished TokenEvent with an error code.
    Cancelling an unknown or finished request is no error.
    """

    requests: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EventFrame:
    """Coordinator to ingress: what the requests of this stream got since the last frame.

    adapters: those that every target serves; None = they are as they were.  load: once a second, so
    that silence is noticed.
    """

    events: tuple[TokenEvent, ...] = ()
    adapters: AdapterList | None = None
    load: Load | None = None
