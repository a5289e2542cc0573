"""Messages between processes: workers' descriptions, and frames about objects of `cluster.core`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np
import numpy.typing as npt

from cluster.core import (
    EMPTY_TOKENS,
    Commit,
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
from cluster.errors import CapacityError, DrafthouseError
from cluster.models.engine_state import EngineState
from cluster.models.made_for import MadeFor
from cluster.records import frozen, record
from cluster.requests.fields import BeamEnd, DraftStep, PlainWhy, Redraw

# What this release speaks, and the oldest that it still understands: while a cluster is updated,
# its parts are of two releases.  Peers that share no version refuse each other in Describe.
PROTOCOL_VERSION = 5
OLDEST_PROTOCOL_VERSION = 5


@record
class Open:
    """A text that a target is to run to its end; it is complete, so the target asks nothing back.

    token_ids: prompt and output so far.  prefix_hash: poly64 of them.  drafters: names, in the
    order of their bits in trees and verdicts.  max_draft_tokens: limit for one step.
    latency_class: gives the weight of its speed, "" = weight 1.  max_len: limit for prompt and
    output.  return_draft_trees: verdicts have a step.
    is_audit: the text is given, as `forced_ids`, and its verdicts name the places where the target
    draws other tokens.
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
    latency_class: str = ""
    return_draft_trees: bool = False
    is_audit: bool = False


@record
class PoolTree:
    """The pool's merged tree for a text; it continues the first base_len tokens.

    prefix_hash: poly64 of these tokens.  survival: float32[n], calibrated.  sources: uint32[n], the
    drafters that proposed each node, as bits over the names of its `Open`.  weights: the trust in
    each of these names, 0 = not a drafter of the pool.
    """

    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    tree: TokenTree
    survival: FloatArray
    sources: npt.NDArray[np.uint32]
    weights: tuple[float, ...] = ()


@record
class TextVerdict:
    """A step's result for one text.

    context_len: tokens before the first of token_ids, which include no stop token.  sources:
    uint32[accepted], the drafters that had proposed each accepted node among token_ids, as bits
    over the names of its `Open`; owners: the one that it is credited to (`Text.owners`).
    num_nodes: number of verified nodes.  verified, credited: by name, how many of these nodes it
    had proposed, and how many are credited to it; empty = none.  why: the reason if num_nodes is 0.
    num_cached: tokens of the prompt found in the prefix cache.  step: where it was asked for.
    redraws: of an audit, among token_ids.
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
    step: DraftStep | None = None
    redraws: tuple[Redraw, ...] = ()


@frozen
class WorkerDescription:
    """A worker's description of itself in Describe; a mismatch is refused at connect.

    model_hash: of the checkpoint as it is served.  tokenizer_hash: over the token strings in id
    order, "" for drafters that serve any vocabulary.  devices: names of those that it computes on,
    unique among all machines; empty = unknown.  native_build: the build of its own machine code, ""
    = none; targets of the same build that are is_reproducible give the same bits.  residents: names
    of the drafters that run inside a target; refused: drafters that cannot run inside, and why.
    made_for: by the name of a drafter that is here, the target that it was made for.  engines: the
    worker's own, and those of a target's residents.  oldest_protocol_version: that it still
    understands, 0 = its own alone.  written_at: of a drafter, when its model's weights were, in
    seconds since 1970; 0 = not known.
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
    refused: Mapping[str, str] = field(default_factory=dict)
    made_for: Mapping[str, MadeFor] = field(default_factory=dict)
    engines: tuple[EngineState, ...] = ()
    oldest_protocol_version: int = OLDEST_PROTOCOL_VERSION
    written_at: float = 0.0

    @property
    def shares_protocol(self) -> bool:
        """True if one of the two understands what the other speaks."""
        oldest = self.oldest_protocol_version or self.protocol_version
        return oldest <= PROTOCOL_VERSION and self.protocol_version >= OLDEST_PROTOCOL_VERSION


@frozen
class Refusal:
    """An item the worker cannot serve, and why (an error code of `cluster.errors`)."""

    request_id: str
    generation: int
    code: str
    message: str


def error_event(request_id: str, why: Refusal | DrafthouseError, position: int = 0) -> TokenEvent:
    """Return the event that ends a request with an error."""
    return TokenEvent(
        request_id,
        position,
        EMPTY_TOKENS,
        finish_reason=FinishReason.ERROR,
        error_code=why.code,
        error_message=why.message,
        retry_after_s=why.retry_after_s if isinstance(why, CapacityError) else 0.0,
    )


@frozen
class TextName:
    """A text under one owner."""

    request_id: str
    generation: int


# The interval at which each side says that it is there.  It is short enough that several missing
# heartbeats in a row mean silence, and long enough to cost nothing.
HEARTBEAT_S = 1.0
# The frames of a target that a coordinator may leave unacknowledged before its texts are parked.
# That is half a second of quick steps, so one that was only busy loses nothing.
MAX_UNACKNOWLEDGED = 64


@frozen
class Heartbeat:
    """Sent once a second by either side: the texts that it runs for the other.

    heard: serial of the last frame of the other side that was applied.  A text that a later frame
    opens may be missing here without being lost.  is_plain: from a coordinator, its texts are to
    have no drafts at present.
    """

    texts: tuple[TextName, ...] = ()
    heard: int = 0
    is_plain: bool = False


@frozen
class Load:
    """The load of a target or of a coordinator, with the texts of all its peers.

    seats: of a target, the most texts of the receiver, 0 = any number; of a coordinator, the most
    at all its targets.  num_waiting: texts without a verdict yet, or without a target.
    """

    seats: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    pages_in_use: int = 0
    pages_total: int = 0


@frozen
class StepReport:
    """The times of one target step, and the engine's pages after it.

    step_time_s: forward, draw and walk.  period_s: since the step before began, 0 if this one did
    not follow at once.  draft_time_s: residents' time in that period.  num_sequences: texts that
    drew.  num_nodes: draft nodes verified.  num_prefill_tokens: rows of prefill chunks in the same
    step, of long prompts and of beam searches.  num_rows: of the forward.  num_prompt_tokens: of
    prompts of any length, read or scored.  num_emitted_tokens: of the texts that drew.
    num_preempted: texts whose pages were taken.  why: of a text without nodes.
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
    num_emitted_tokens: int = 0
    num_preempted: int = 0
    why: PlainWhy = PlainWhy.NONE
    num_rows: int = 0
    num_prompt_tokens: int = 0


@frozen
class AdapterList:
    """The LoRA adapters that new requests may ask for.

    served: for each its name, "@" and a digest of its content, so that a request does not continue
    with another content.  refused: why the last change was refused, "" = it was not.
    """

    served: tuple[str, ...] = ()
    refused: str = ""


@record
class StepFrame:
    """Coordinator to target: texts to run, texts to end, and trees of the pool.

    cancels apply before opens.  serial: grows by one with every frame of the stream.  acknowledged:
    the greatest serial that was received.
    """

    opens: tuple[Open, ...] = ()
    cancels: tuple[TextName, ...] = ()
    trees: tuple[PoolTree, ...] = ()
    serial: int = 0
    acknowledged: int = 0
    heartbeat: Heartbeat | None = None


@record
class CommitFrame:
    """Coordinator to drafter."""

    commits: tuple[Commit, ...] = ()
    released: tuple[str, ...] = ()


@record
class ProposalFrame:
    """Drafter to coordinator.  pages_*: of its engine, or 0."""

    proposals: tuple[Proposal, ...] = ()
    observations: tuple[Observation, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    pages_in_use: int = 0
    pages_total: int = 0
    num_requests: int = 0
    draft_time_s: float = 0.0


@record
class VerdictFrame:
    """Target to coordinator: a step's results for the coordinator's texts.

    refusals: texts that the target does not run, or not any more.  serial: as in `StepFrame`.
    load: sent with every heartbeat.  load, adapters, engines (empty = as described): sent when the
    target is reconfigured, and when coordinators come or go.  report: of the step; page: the
    target's own metrics, in Prometheus' text format; status: a JSON object.  These three go to only
    one of the coordinators, which counts them.
    """

    verdicts: tuple[TextVerdict, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    report: StepReport | None = None
    serial: int = 0
    heartbeat: Heartbeat | None = None
    adapters: AdapterList | None = None
    page: bytes = b""
    status: str = ""
    load: Load | None = None
    engines: tuple[EngineState, ...] = ()


@record
class SubmitFrame:
    """Ingress to coordinator: new requests, and ids of requests whose client went away.

    ended: ids of those whose text is complete, at a stop string.  Unknown ids are no error.
    A request that cannot be admitted is answered by a finished TokenEvent with an error code.
    """

    requests: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@record
class EventFrame:
    """Coordinator to ingress: events of this stream's requests since the last frame.

    adapters: the adapters that every target serves; None = unchanged.  load: sent once a second, so
    that silence is noticed.
    """

    events: tuple[TokenEvent, ...] = ()
    adapters: AdapterList | None = None
    load: Load | None = None
