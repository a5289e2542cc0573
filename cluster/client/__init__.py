"""The client of the public gRPC service, blocking and asyncio; it needs grpcio and protobuf alone.

    with Client("127.0.0.1:9000") as client:
        request = GenerateRequest(model="drafthouse-demo", text="def main():")
        for response in client.generate(request):
            for choice in response.choices:
                print(choice.text, end="", flush=True)

Requests and responses are the messages of protos/drafthouse/v1, which documents their fields.  This
folder is also the distribution `drafthouse-client`, where the package is `drafthouse_client`: its
modules import each other by place, and nothing else of Drafthouse.
"""

from .asynchronous import AsyncClient
from .blocking import Client, Stream
from .endpoint import Endpoint
from .errors import (
    BusyError,
    CancelledError,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    UnavailableError,
)
from .generated.common_pb2 import DrafterNames, FinishReason, Grammar, Logprobs
from .generated.generation_pb2 import (
    ChatMessage,
    ChatMessages,
    ChoiceDelta,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    ResumedChoice,
    SamplingOptions,
    SpeculationRequest,
    SpeculativeDecoding,
    TokenIds,
    TokenizeRequest,
    TokenizeResponse,
    Usage,
)

__all__ = [
    "AsyncClient",
    "BusyError",
    "CancelledError",
    "ChatMessage",
    "ChatMessages",
    "ChoiceDelta",
    "Client",
    "ClientError",
    "DeadlineError",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "DrafterNames",
    "Endpoint",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "Grammar",
    "InvalidRequestError",
    "ListModelsRequest",
    "ListModelsResponse",
    "Logprobs",
    "Model",
    "ProtocolError",
    "ResumedChoice",
    "SamplingOptions",
    "SpeculationRequest",
    "SpeculativeDecoding",
    "Stream",
    "TokenIds",
    "TokenizeRequest",
    "TokenizeResponse",
    "UnavailableError",
    "Usage",
]
