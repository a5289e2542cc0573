from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceLaw(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_LAW_UNSPECIFIED: _ClassVar[AcceptanceLaw]
    ACCEPTANCE_LAW_REJECTION: _ClassVar[AcceptanceLaw]
    ACCEPTANCE_LAW_MULTI_STEP: _ClassVar[AcceptanceLaw]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_ALWAYS: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
ACCEPTANCE_LAW_UNSPECIFIED: AcceptanceLaw
ACCEPTANCE_LAW_REJECTION: AcceptanceLaw
ACCEPTANCE_LAW_MULTI_STEP: AcceptanceLaw
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_ALWAYS: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "role", "name", "protocol_version", "model_hash", "tokenizer_hash", "vocab_size", "max_context_len", "max_running_sequences", "max_batch_tokens", "devices", "native_build", "is_reproducible", "residents", "refused", "made_for", "engines", "oldest_protocol_version", "written_at")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MadeForEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MadeFor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MadeFor, _Mapping]] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NATIVE_BUILD_FIELD_NUMBER: _ClassVar[int]
    IS_REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MADE_FOR_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    name: str
    protocol_version: int
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    max_running_sequences: int
    max_batch_tokens: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    native_build: str
    is_reproducible: bool
    residents: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.ScalarMap[str, str]
    made_for: _containers.MessageMap[str, MadeFor]
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    oldest_protocol_version: int
    written_at: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., protocol_version: _Optional[int] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_len: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., native_build: _Optional[str] = ..., is_reproducible: _Optional[bool] = ..., residents: _Optional[_Iterable[str]] = ..., refused: _Optional[_Mapping[str, str]] = ..., made_for: _Optional[_Mapping[str, MadeFor]] = ..., engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., oldest_protocol_version: _Optional[int] = ..., written_at: _Optional[float] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("name", "device", "attention", "graphs", "kernels", "kv_bytes", "kv_tokens", "fallbacks", "weights", "products")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    attention: str
    graphs: str
    kernels: str
    kv_bytes: int
    kv_tokens: int
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    weights: str
    products: str
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., attention: _Optional[str] = ..., graphs: _Optional[str] = ..., kernels: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., fallbacks: _Optional[_Iterable[str]] = ..., weights: _Optional[str] = ..., products: _Optional[str] = ...) -> None: ...

class MadeFor(_message.Message):
    __slots__ = ("name", "model_hash")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_hash: str
    def __init__(self, name: _Optional[str] = ..., model_hash: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_token_ids", "logit_bias_values", "seed", "stream", "max_tokens", "min_tokens", "stop_token_ids", "logprobs", "prediction", "grammar", "forced_ids", "beam_search", "law")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FORCED_IDS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    stream: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prediction: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    forced_ids: _containers.RepeatedScalarFieldContainer[int]
    beam_search: BeamSearch
    law: AcceptanceLaw
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., stream: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prediction: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., forced_ids: _Optional[_Iterable[int]] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., law: _Optional[_Union[AcceptanceLaw, str]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("num_beams", "length_penalty", "early_stopping")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class BeamEnd(_message.Message):
    __slots__ = ("num_tokens", "stopped", "logprob", "score")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    stopped: bool
    logprob: float
    score: float
    def __init__(self, num_tokens: _Optional[int] = ..., stopped: _Optional[bool] = ..., logprob: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "reasoning_start", "reasoning_end")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    reasoning_start: _containers.RepeatedScalarFieldContainer[int]
    reasoning_end: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., reasoning_start: _Optional[_Iterable[int]] = ..., reasoning_end: _Optional[_Iterable[int]] = ...) -> None: ...

class DrafterNames(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("token_ids", "parents")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprobs", "num_top", "top_token_ids", "top_logprobs", "ranks")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_top: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., num_top: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("request_id", "generation", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    code: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DraftStep(_message.Message):
    __slots__ = ("drafters", "token_ids", "parents", "survival", "sources", "path", "own_token_ids", "draft_time_s", "step_time_s", "num_sequences", "why", "number", "at_s")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    survival: _containers.RepeatedScalarFieldContainer[float]
    sources: _containers.RepeatedScalarFieldContainer[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    own_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_time_s: float
    step_time_s: float
    num_sequences: int
    why: str
    number: int
    at_s: float
    def __init__(self, drafters: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., survival: _Optional[_Iterable[float]] = ..., sources: _Optional[_Iterable[int]] = ..., path: _Optional[_Iterable[int]] = ..., own_token_ids: _Optional[_Iterable[int]] = ..., draft_time_s: _Optional[float] = ..., step_time_s: _Optional[float] = ..., num_sequences: _Optional[int] = ..., why: _Optional[str] = ..., number: _Optional[int] = ..., at_s: _Optional[float] = ...) -> None: ...
