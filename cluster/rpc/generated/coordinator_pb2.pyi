from cluster.rpc.generated import target_pb2 as _target_pb2
from cluster.client.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitFrame(_message.Message):
    __slots__ = ("requests", "cancelled", "ended")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    cancelled: _containers.RepeatedScalarFieldContainer[str]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., cancelled: _Optional[_Iterable[str]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "prompt_ids", "params", "task", "speculation", "output_ids", "was_admitted", "tenant", "adapter", "timeout_s", "segment", "counts_steps")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    WAS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COUNTS_STEPS_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt_ids: bytes
    params: _common_pb2.SamplingParams
    task: str
    speculation: SpeculationOptions
    output_ids: bytes
    was_admitted: bool
    tenant: bytes
    adapter: str
    timeout_s: float
    segment: str
    counts_steps: bool
    def __init__(self, id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., task: _Optional[str] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., output_ids: _Optional[bytes] = ..., was_admitted: _Optional[bool] = ..., tenant: _Optional[bytes] = ..., adapter: _Optional[str] = ..., timeout_s: _Optional[float] = ..., segment: _Optional[str] = ..., counts_steps: _Optional[bool] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("enabled", "max_draft_tokens", "drafters", "latency_class", "return_draft_sources", "law", "return_draft_trees")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    RETURN_DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    RETURN_DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_draft_tokens: int
    drafters: _common_pb2.DrafterNames
    latency_class: str
    return_draft_sources: bool
    law: _common_pb2.AcceptanceLaw
    return_draft_trees: bool
    def __init__(self, enabled: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ..., drafters: _Optional[_Union[_common_pb2.DrafterNames, _Mapping]] = ..., latency_class: _Optional[str] = ..., return_draft_sources: _Optional[bool] = ..., law: _Optional[_Union[_common_pb2.AcceptanceLaw, str]] = ..., return_draft_trees: _Optional[bool] = ...) -> None: ...

class EventFrame(_message.Message):
    __slots__ = ("events", "adapters", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    adapters: _target_pb2.AdapterList
    load: _target_pb2.Load
    def __init__(self, events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., adapters: _Optional[_Union[_target_pb2.AdapterList, _Mapping]] = ..., load: _Optional[_Union[_target_pb2.Load, _Mapping]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("request_id", "position", "token_ids", "logprobs", "finish_reason", "stats", "error_code", "error_message", "retry_after_s", "draft_sources", "queue_time_s", "num_cached", "beams", "draft_steps", "prefill_time_s", "steps")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    token_ids: bytes
    logprobs: _common_pb2.Logprobs
    finish_reason: _common_pb2.FinishReason
    stats: SpeculationStats
    error_code: str
    error_message: str
    retry_after_s: float
    draft_sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.DrafterNames]
    queue_time_s: float
    num_cached: int
    beams: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamEnd]
    draft_steps: _containers.RepeatedCompositeFieldContainer[_common_pb2.DraftStep]
    prefill_time_s: float
    steps: _containers.RepeatedCompositeFieldContainer[StepCount]
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[SpeculationStats, _Mapping]] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., draft_sources: _Optional[_Iterable[_Union[_common_pb2.DrafterNames, _Mapping]]] = ..., queue_time_s: _Optional[float] = ..., num_cached: _Optional[int] = ..., beams: _Optional[_Iterable[_Union[_common_pb2.BeamEnd, _Mapping]]] = ..., draft_steps: _Optional[_Iterable[_Union[_common_pb2.DraftStep, _Mapping]]] = ..., prefill_time_s: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[StepCount, _Mapping]]] = ...) -> None: ...

class StepCount(_message.Message):
    __slots__ = ("sources", "num_nodes", "verified", "decode_time_s")
    class VerifiedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.DrafterNames]
    num_nodes: int
    verified: _containers.ScalarMap[str, int]
    decode_time_s: float
    def __init__(self, sources: _Optional[_Iterable[_Union[_common_pb2.DrafterNames, _Mapping]]] = ..., num_nodes: _Optional[int] = ..., verified: _Optional[_Mapping[str, int]] = ..., decode_time_s: _Optional[float] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "accepted_by_drafter", "idle_because", "verified_by_drafter", "shared_by_drafter", "decode_time_s")
    class AcceptedByDrafterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class VerifiedByDrafterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SharedByDrafterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    IDLE_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BY_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SHARED_BY_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_drafter: _containers.ScalarMap[str, int]
    idle_because: str
    verified_by_drafter: _containers.ScalarMap[str, int]
    shared_by_drafter: _containers.ScalarMap[str, int]
    decode_time_s: float
    def __init__(self, num_steps: _Optional[int] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., accepted_by_drafter: _Optional[_Mapping[str, int]] = ..., idle_because: _Optional[str] = ..., verified_by_drafter: _Optional[_Mapping[str, int]] = ..., shared_by_drafter: _Optional[_Mapping[str, int]] = ..., decode_time_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("event", "json")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    event: str
    json: str
    def __init__(self, event: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
