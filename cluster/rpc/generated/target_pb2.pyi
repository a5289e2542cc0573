from cluster.client.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlainWhy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAIN_WHY_UNSPECIFIED: _ClassVar[PlainWhy]
    PLAIN_WHY_GUARD: _ClassVar[PlainWhy]
    PLAIN_WHY_NO_DRAFTS: _ClassVar[PlainWhy]
    PLAIN_WHY_NOT_WORTH_IT: _ClassVar[PlainWhy]
    PLAIN_WHY_UNMEASURED: _ClassVar[PlainWhy]
    PLAIN_WHY_FAULT: _ClassVar[PlainWhy]
    PLAIN_WHY_SCHEDULE: _ClassVar[PlainWhy]
    PLAIN_WHY_SWITCHBACK: _ClassVar[PlainWhy]
PLAIN_WHY_UNSPECIFIED: PlainWhy
PLAIN_WHY_GUARD: PlainWhy
PLAIN_WHY_NO_DRAFTS: PlainWhy
PLAIN_WHY_NOT_WORTH_IT: PlainWhy
PLAIN_WHY_UNMEASURED: PlainWhy
PLAIN_WHY_FAULT: PlainWhy
PLAIN_WHY_SCHEDULE: PlainWhy
PLAIN_WHY_SWITCHBACK: PlainWhy

class StepFrame(_message.Message):
    __slots__ = ("opens", "cancels", "trees", "serial", "acknowledged", "heartbeat")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    cancels: _containers.RepeatedCompositeFieldContainer[TextName]
    trees: _containers.RepeatedCompositeFieldContainer[PoolTree]
    serial: int
    acknowledged: int
    heartbeat: Heartbeat
    def __init__(self, opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[TextName, _Mapping]]] = ..., trees: _Optional[_Iterable[_Union[PoolTree, _Mapping]]] = ..., serial: _Optional[int] = ..., acknowledged: _Optional[int] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class TextName(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("texts", "heard", "is_plain")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    IS_PLAIN_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedCompositeFieldContainer[TextName]
    heard: int
    is_plain: bool
    def __init__(self, texts: _Optional[_Iterable[_Union[TextName, _Mapping]]] = ..., heard: _Optional[int] = ..., is_plain: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("seats", "num_running", "num_waiting", "num_steps", "pages_in_use", "pages_total")
    SEATS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    seats: int
    num_running: int
    num_waiting: int
    num_steps: int
    pages_in_use: int
    pages_total: int
    def __init__(self, seats: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_steps: _Optional[int] = ..., pages_in_use: _Optional[int] = ..., pages_total: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request_id", "generation", "token_ids", "prefix_hash", "prompt_len", "params", "max_len", "task", "tenant", "adapter", "drafters", "max_draft_tokens", "latency_class", "return_draft_trees", "is_audit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    RETURN_DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    IS_AUDIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    token_ids: bytes
    prefix_hash: int
    prompt_len: int
    params: _common_pb2.SamplingParams
    max_len: int
    task: str
    tenant: bytes
    adapter: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_draft_tokens: int
    latency_class: str
    return_draft_trees: bool
    is_audit: bool
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., prefix_hash: _Optional[int] = ..., prompt_len: _Optional[int] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_len: _Optional[int] = ..., task: _Optional[str] = ..., tenant: _Optional[bytes] = ..., adapter: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ..., max_draft_tokens: _Optional[int] = ..., latency_class: _Optional[str] = ..., return_draft_trees: _Optional[bool] = ..., is_audit: _Optional[bool] = ...) -> None: ...

class PoolTree(_message.Message):
    __slots__ = ("request_id", "generation", "base_len", "prefix_hash", "token_ids", "parents", "survival", "sources", "weights")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    token_ids: bytes
    parents: bytes
    survival: bytes
    sources: bytes
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., survival: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class VerdictFrame(_message.Message):
    __slots__ = ("verdicts", "refusals", "report", "serial", "heartbeat", "adapters", "status", "load", "engines", "page")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[TextVerdict]
    refusals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Refusal]
    report: StepReport
    serial: int
    heartbeat: Heartbeat
    adapters: AdapterList
    status: str
    load: Load
    engines: _containers.RepeatedCompositeFieldContainer[_common_pb2.EngineState]
    page: bytes
    def __init__(self, verdicts: _Optional[_Iterable[_Union[TextVerdict, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_common_pb2.Refusal, _Mapping]]] = ..., report: _Optional[_Union[StepReport, _Mapping]] = ..., serial: _Optional[int] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., status: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[_common_pb2.EngineState, _Mapping]]] = ..., page: _Optional[bytes] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("served", "refused")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    served: _containers.RepeatedScalarFieldContainer[str]
    refused: str
    def __init__(self, served: _Optional[_Iterable[str]] = ..., refused: _Optional[str] = ...) -> None: ...

class TextVerdict(_message.Message):
    __slots__ = ("request_id", "generation", "context_len", "token_ids", "sources", "num_nodes", "verified", "why", "finish_reason", "logprobs", "num_cached", "beams", "owners", "credited", "step", "redraws")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    CREDITED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REDRAWS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    context_len: int
    token_ids: bytes
    sources: bytes
    num_nodes: int
    verified: _containers.RepeatedScalarFieldContainer[int]
    why: PlainWhy
    finish_reason: _common_pb2.FinishReason
    logprobs: _common_pb2.Logprobs
    num_cached: int
    beams: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamEnd]
    owners: _containers.RepeatedScalarFieldContainer[int]
    credited: _containers.RepeatedScalarFieldContainer[int]
    step: _common_pb2.DraftStep
    redraws: _containers.RepeatedCompositeFieldContainer[Redraw]
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., context_len: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., num_nodes: _Optional[int] = ..., verified: _Optional[_Iterable[int]] = ..., why: _Optional[_Union[PlainWhy, str]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., num_cached: _Optional[int] = ..., beams: _Optional[_Iterable[_Union[_common_pb2.BeamEnd, _Mapping]]] = ..., owners: _Optional[_Iterable[int]] = ..., credited: _Optional[_Iterable[int]] = ..., step: _Optional[_Union[_common_pb2.DraftStep, _Mapping]] = ..., redraws: _Optional[_Iterable[_Union[Redraw, _Mapping]]] = ...) -> None: ...

class Redraw(_message.Message):
    __slots__ = ("position", "token_id", "gap")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    gap: float
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ..., gap: _Optional[float] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step_time_s", "forward_time_s", "period_s", "num_sequences", "num_nodes", "num_prefill_tokens", "pages_in_use", "pages_total", "draft_time_s", "num_emitted_tokens", "num_preempted", "why", "num_rows", "num_prompt_tokens")
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_time_s: float
    forward_time_s: float
    period_s: float
    num_sequences: int
    num_nodes: int
    num_prefill_tokens: int
    pages_in_use: int
    pages_total: int
    draft_time_s: float
    num_emitted_tokens: int
    num_preempted: int
    why: PlainWhy
    num_rows: int
    num_prompt_tokens: int
    def __init__(self, step_time_s: _Optional[float] = ..., forward_time_s: _Optional[float] = ..., period_s: _Optional[float] = ..., num_sequences: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., pages_in_use: _Optional[int] = ..., pages_total: _Optional[int] = ..., draft_time_s: _Optional[float] = ..., num_emitted_tokens: _Optional[int] = ..., num_preempted: _Optional[int] = ..., why: _Optional[_Union[PlainWhy, str]] = ..., num_rows: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...
