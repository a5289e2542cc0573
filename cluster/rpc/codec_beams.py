"""Beam searches and their texts to protobuf and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.client.generated import common_pb2 as pb
from cluster.core import TokenArray
from cluster.errors import ProtocolError
from cluster.requests.beam_spec import BeamEnd, BeamSpec, EarlyStopping

_STOPPING: dict[EarlyStopping, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_ALWAYS,
    "never": pb.EARLY_STOPPING_NEVER,
}
_STOPPING_FROM_WIRE: dict[int, EarlyStopping] = {wire: how for how, wire in _STOPPING.items()}


def encode_beam_spec(spec: BeamSpec | None) -> pb.BeamSearch | None:
    if spec is None:
        return None
    return pb.BeamSearch(
        num_beams=spec.num_beams,
        length_penalty=spec.length_penalty,
        early_stopping=_STOPPING[spec.early_stopping],
    )


def decode_beam_spec(message: pb.BeamSearch) -> BeamSpec:
    """Raises ProtocolError for a way of stopping that this version does not know."""
    if message.early_stopping not in _STOPPING_FROM_WIRE:
        raise ProtocolError(
            f"early_stopping is {message.early_stopping}, which this version does not know"
        )
    return BeamSpec(
        message.num_beams,
        message.length_penalty if message.HasField("length_penalty") else 1.0,
        _STOPPING_FROM_WIRE[message.early_stopping],
    )


def encode_beam_ends(ends: Sequence[BeamEnd]) -> list[pb.BeamEnd]:
    return [
        pb.BeamEnd(
            num_tokens=end.num_tokens, stopped=end.is_stopped, logprob=end.logprob, score=end.score
        )
        for end in ends
    ]


def decode_beam_ends(messages: Iterable[pb.BeamEnd], token_ids: TokenArray) -> tuple[BeamEnd, ...]:
    """Raises ProtocolError where the texts have not as many tokens as there are."""
    ends = tuple(
        BeamEnd(each.num_tokens, each.stopped, each.logprob, each.score) for each in messages
    )
    count = sum(end.num_tokens for end in ends)
    if ends and count != len(token_ids):
        raise ProtocolError(f"{len(ends)} beams end after {count} of {len(token_ids)} tokens")
    return ends
