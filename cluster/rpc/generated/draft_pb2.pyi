from cluster.client.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CommitFrame(_message.Message):
    __slots__ = ("commits", "released")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    released: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., released: _Optional[_Iterable[str]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "generation", "base_len", "prefix_hash", "token_ids", "prompt_len", "max_nodes", "task", "params", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    max_nodes: int
    task: str
    params: _common_pb2.SamplingParams
    tenant: bytes
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., max_nodes: _Optional[int] = ..., task: _Optional[str] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class ProposalFrame(_message.Message):
    __slots__ = ("proposals", "observations", "refusals", "pages_in_use", "pages_total", "num_requests", "draft_time_s")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    refusals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Refusal]
    pages_in_use: int
    pages_total: int
    num_requests: int
    draft_time_s: float
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_common_pb2.Refusal, _Mapping]]] = ..., pages_in_use: _Optional[int] = ..., pages_total: _Optional[int] = ..., num_requests: _Optional[int] = ..., draft_time_s: _Optional[float] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("request_id", "generation", "base_len", "prefix_hash", "tree", "survival", "drafter", "is_complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    base_len: int
    prefix_hash: int
    tree: _common_pb2.TokenTree
    survival: _containers.RepeatedScalarFieldContainer[float]
    drafter: str
    is_complete: bool
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ..., survival: _Optional[_Iterable[float]] = ..., drafter: _Optional[str] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("request_id", "generation", "have_len")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    have_len: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ..., have_len: _Optional[int] = ...) -> None: ...
