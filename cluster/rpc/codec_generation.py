"""The public Generation service's messages and our nouns for them, both ways.

Decoding a request raises RequestError naming the field: here the peer is a caller, not a colleague.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.client.generated import generation_pb2 as pb
from cluster.core import SpeculationStats
from cluster.errors import ProtocolError, RequestError
from cluster.requests.fields import REMOVED_LAWS
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_records import TOKENS, ByHand, record_codec
from cluster.rpc.generation import (
    ChatMessage,
    ChoiceDelta,
    GenerationRequest,
    ResumedChoice,
)

_TURN = record_codec(ChatMessage, pb.ChatMessage)
_PROMPTS = ("text", "chat", "tokens")
# Fields of a SpeculationRequest that are gone, by their numbers, and what replaces them.
_REMOVED = {6: ("speculation.min_tokens_per_s", "remove it; use speculation.latency_class")}
# An AcceptanceLaw that is gone.
_BLOCK = 3


def decode_prompt(message: Any) -> Any:
    """The text, conversation or tokens of a GenerateRequest or TokenizeRequest.

    Raises RequestError where there is none.
    """
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        return tuple(map(_TURN.decode, message.chat.messages))
    if kind == "tokens":
        return TOKENS.read(message.tokens.token_ids)
    kinds = [name for name in _PROMPTS if name in message.DESCRIPTOR.fields_by_name]
    listed = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    raise RequestError(f"prompt: absent; set {listed}", param="prompt")


def _encode_prompt(request: GenerationRequest) -> dict[str, Any]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, np.ndarray):
        return {"tokens": pb.TokenIds(token_ids=prompt.tolist())}
    return {"chat": pb.ChatMessages(messages=map(_TURN.encode, prompt))}


REQUEST = record_codec(
    GenerationRequest,
    pb.GenerateRequest,
    [
        *PARTS,
        record_codec(ResumedChoice, pb.ResumedChoice, names={"is_finished": "finished"}),
    ],
    by_hand={
        "prompt": ByHand(_PROMPTS, _encode_prompt, decode_prompt),
        "n": ByHand(("n",), lambda request: {"n": request.n}, lambda message: message.n or 1),
    },
)
STATS = record_codec(
    SpeculationStats,
    pb.SpeculativeDecoding,
    by_hand={
        # Clients are not told of the one, and the response itself says the other.
        "verified_by_drafter": ByHand(("prediction_idle_because",), None, lambda message: {})
    },
)
DELTA = record_codec(ChoiceDelta, pb.ChoiceDelta, PARTS)


def decode_request(message: pb.GenerateRequest) -> GenerationRequest:
    """Raises RequestError where the prompt is absent, or what is set is gone.

    Ranges are not checked: those are the ingress's, the same for HTTP and gRPC.
    """
    for field in cast(Any, UnknownFieldSet(message.speculation)):
        if field.field_number in _REMOVED:
            raise RequestError.at(*_REMOVED[field.field_number])
    if message.speculation.law == _BLOCK:
        raise RequestError.at("speculation.law", f"block is gone; {REMOVED_LAWS['block']}")
    try:
        return REQUEST.decode(message)
    except ProtocolError as error:
        # Of all that a caller can send, only these have values that mean nothing.
        name = "speculation.law" if error.param == "law" else "sampling.beam_search.early_stopping"
        raise RequestError(f"{name}: {error.message}", param=name) from None
