from cluster.client.generated import common_pb2 as _common_pb2
from cluster.rpc.generated import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyFrame(_message.Message):
    __slots__ = ("items", "released", "apart")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    released: _containers.RepeatedScalarFieldContainer[str]
    apart: bool
    def __init__(self, items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ..., released: _Optional[_Iterable[str]] = ..., apart: _Optional[bool] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("request_id", "generation", "base_len", "prefix_hash", "delta", "tree_token_ids", "tree_parents", "prompt_len", "params", "tenant", "draft_nodes", "task", "residents", "adapter", "only_look_ups")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TREE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TREE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ONLY_LOOK_UPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    delta: bytes
    tree_token_ids: bytes
    tree_parents: bytes
    prompt_len: int
    params: _common_pb2.SamplingParams
    tenant: bytes
    draft_nodes: int
    task: str
    residents: _containers.RepeatedScalarFieldContainer[str]
    adapter: str
    only_look_ups: bool
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., delta: _Optional[bytes] = ..., tree_token_ids: _Optional[bytes] = ..., tree_parents: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[bytes] = ..., draft_nodes: _Optional[int] = ..., task: _Optional[str] = ..., residents: _Optional[_Iterable[str]] = ..., adapter: _Optional[str] = ..., only_look_ups: _Optional[bool] = ...) -> None: ...

class VerdictFrame(_message.Message):
    __slots__ = ("verdicts", "misses", "refusals", "report", "in_hand", "drafts", "adapters")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    misses: _containers.RepeatedCompositeFieldContainer[CacheMiss]
    refusals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Refusal]
    report: StepReport
    in_hand: _containers.RepeatedCompositeFieldContainer[InHand]
    drafts: DraftReport
    adapters: AdapterList
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., misses: _Optional[_Iterable[_Union[CacheMiss, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_common_pb2.Refusal, _Mapping]]] = ..., report: _Optional[_Union[StepReport, _Mapping]] = ..., in_hand: _Optional[_Iterable[_Union[InHand, _Mapping]]] = ..., drafts: _Optional[_Union[DraftReport, _Mapping]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("served", "refused")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    served: _containers.RepeatedScalarFieldContainer[str]
    refused: str
    def __init__(self, served: _Optional[_Iterable[str]] = ..., refused: _Optional[str] = ...) -> None: ...

class DraftReport(_message.Message):
    __slots__ = ("frames", "draft_time_s", "num_sequences", "num_nodes", "stalled", "num_read")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[ResidentFrame]
    draft_time_s: float
    num_sequences: int
    num_nodes: int
    stalled: _containers.RepeatedScalarFieldContainer[str]
    num_read: int
    def __init__(self, frames: _Optional[_Iterable[_Union[ResidentFrame, _Mapping]]] = ..., draft_time_s: _Optional[float] = ..., num_sequences: _Optional[int] = ..., num_nodes: _Optional[int] = ..., stalled: _Optional[_Iterable[str]] = ..., num_read: _Optional[int] = ...) -> None: ...

class ResidentFrame(_message.Message):
    __slots__ = ("drafter", "frame")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    frame: _draft_pb2.ProposalFrame
    def __init__(self, drafter: _Optional[str] = ..., frame: _Optional[_Union[_draft_pb2.ProposalFrame, _Mapping]] = ...) -> None: ...

class InHand(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("request_id", "generation", "context_len", "path", "token_ids", "logprobs", "num_cached", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    context_len: int
    path: bytes
    token_ids: bytes
    logprobs: _common_pb2.Logprobs
    num_cached: int
    beams: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamEnd]
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., context_len: _Optional[int] = ..., path: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., num_cached: _Optional[int] = ..., beams: _Optional[_Iterable[_Union[_common_pb2.BeamEnd, _Mapping]]] = ...) -> None: ...

class CacheMiss(_message.Message):
    __slots__ = ("request_id", "generation", "have_len")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    have_len: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., have_len: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step_time_s", "forward_time_s", "queue_time_s", "num_sequences", "num_nodes", "num_prefill_tokens", "pages_in_use", "pages_total")
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIME_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    step_time_s: float
    forward_time_s: float
    queue_time_s: float
    num_sequences: int
    num_nodes: int
    num_prefill_tokens: int
    pages_in_use: int
    pages_total: int
    def __init__(self, step_time_s: _Optional[float] = ..., forward_time_s: _Optional[float] = ..., queue_time_s: _Optional[float] = ..., num_sequences: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., pages_in_use: _Optional[int] = ..., pages_total: _Optional[int] = ...) -> None: ...
