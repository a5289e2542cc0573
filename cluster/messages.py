"""What processes say to each other: who they are, and the frames of their streams.

What the frames are about stands in `cluster.core`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.core import (
    Commit,
    Completion,
    Observation,
    Proposal,
    Request,
    TokenEvent,
    Verdict,
    VerifyItem,
)
from cluster.made_for import MadeFor

# Frames between peers carry this number; peers with another one refuse each other in Describe.
PROTOCOL_VERSION = 4


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What a turn of a target's residents took: for so many sequences, nodes of each.

    num_read: texts that models read before.
    """

    num_sequences: int
    num_nodes: int
    with_models: bool
    time_s: float
    num_read: int = 0


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
    computes on, unique among all machines; empty = unknown.  step_rows, step_times_s: a target's
    `StepProfile`, empty = not measured; draft_times: what its residents took before it served.
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
    step_rows: tuple[int, ...] = ()
    step_times_s: tuple[float, ...] = ()
    draft_times: tuple[DraftTime, ...] = ()
    native_build: str = ""
    is_reproducible: bool = False
    residents: tuple[str, ...] = ()
    look_ups: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    made_for: Mapping[str, MadeFor] = field(default_factory=dict)
    engines: tuple[EngineState, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """ "I have `have_len` tokens": the worker lost or never had the rest.  Send from there."""

    request_id: str
    generation: int
    have_len: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item the worker cannot serve, and why (an error code of `cluster.errors`)."""

    request_id: str
    generation: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class InHand:
    """The target has the item of this request and will answer it."""

    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """Where one target step's time went, and what the engine holds after it.

    step_time_s: forward, draw and walk.  queue_time_s: from the frame's arrival to the step.
    num_sequences: items that drew (decode or verify).  num_nodes: draft nodes verified.
    num_prefill_tokens: rows of prefill chunks in the same step.
    """

    step_time_s: float = 0.0
    forward_time_s: float = 0.0
    queue_time_s: float = 0.0
    num_sequences: int = 0
    num_nodes: int = 0
    num_prefill_tokens: int = 0
    pages_in_use: int = 0
    pages_total: int = 0


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The LoRA adapters that new requests may ask for.

    served: of each its name, "@" and a digest of its content, so that what began with one content
    does not go on with another.  refused: why the last change of them was, "" = it was not.
    """

    served: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyFrame:
    """Coordinator to target: a batch that runs as one step, and requests to forget.

    is_apart: it does not join the step of frames that came before it.
    """

    items: tuple[VerifyItem, ...] = ()
    released: tuple[str, ...] = ()
    is_apart: bool = False


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
class DraftReport:
    """What the resident drafters of a target made of its last verdicts.

    frames: by drafter's name, as the pool sends them.  Every request that a drafter was asked for
    is named by a complete proposal, a completion or a refusal: nothing else comes for it.
    draft_time_s: of all of them but those that have stalled, texts included.  num_sequences:
    requests that nodes were asked for.  num_nodes: what each drafter was asked for, over these
    requests.  stalled: names of the drafters that took far too long and rest now.  num_read: texts
    that models read first; then the time is not that of drafting alone.
    """

    frames: tuple[tuple[str, ProposalFrame], ...] = ()
    draft_time_s: float = 0.0
    num_sequences: int = 0
    num_nodes: int = 0
    stalled: tuple[str, ...] = ()
    num_read: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VerdictFrame:
    """Target to coordinator.  Every item of a VerifyFrame is answered once, in some frame.

    in_hand: every item that is still to be answered, in a frame of its own, said once a second
    while there are any, however long a step takes.
    drafts: in a frame of its own, after that with the verdicts of items with draft_nodes.
    adapters: in the first frame, and in one of its own when they change.
    """

    verdicts: tuple[Verdict, ...] = ()
    misses: tuple[CacheMiss, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    report: StepReport | None = None
    in_hand: tuple[InHand, ...] = ()
    drafts: DraftReport | None = None
    adapters: AdapterList | None = None

    @property
    def is_heartbeat(self) -> bool:
        """Whether it answers nothing and tells of no step."""
        return not (self.verdicts or self.misses or self.refusals or self.report or self.drafts)


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

    adapters: those that every target serves; None = they are as they were.
    """

    events: tuple[TokenEvent, ...] = ()
    adapters: AdapterList | None = None
