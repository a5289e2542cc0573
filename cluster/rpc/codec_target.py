"""The frames between coordinators and targets."""

from __future__ import annotations

from typing import Any

from cluster.core import TokenTree
from cluster.errors import ProtocolError
from cluster.messages import (
    Open,
    PoolTree,
    StepFrame,
    TextVerdict,
    VerdictFrame,
)
from cluster.requests.plain_why import PlainWhy
from cluster.requests.redraw import Redraw
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_arrays import TOKENS, make_tree
from cluster.rpc.codec_records import ByHand, enum_codec, record_codec
from cluster.rpc.frames import FrameCodec, refusing
from cluster.rpc.generated import target_pb2 as pb


def _decode_open(message: pb.Open) -> Open:
    if not message.token_ids:
        raise ProtocolError("token_ids is empty; send the whole text")
    if not message.HasField("params"):
        raise ProtocolError("params is absent; a text is drawn by them")
    return _OPEN.decode(message)


def _encode_nodes(tree: PoolTree) -> dict[str, Any]:
    return {
        "token_ids": TOKENS.pack(tree.tree.token_ids),
        "parents": TOKENS.pack(tree.tree.parents),
    }


def _decode_nodes(message: pb.PoolTree) -> TokenTree:
    return make_tree(
        TOKENS.unpack(message.token_ids, "token_ids"), TOKENS.unpack(message.parents, "parents")
    )


def _decode_tree(message: pb.PoolTree) -> PoolTree | None:
    """None for torn arrays: it would only have been a guess."""
    try:
        return _TREE.decode(message)
    except ProtocolError:
        return None


_OPEN = record_codec(Open, pb.Open, PARTS)
_TREE = record_codec(
    PoolTree,
    pb.PoolTree,
    by_hand={"tree": ByHand(("token_ids", "parents"), _encode_nodes, _decode_nodes)},
)
_WHY = enum_codec(PlainWhy, pb.PlainWhy, "why", {why: why.value for why in PlainWhy})
_REDRAW = record_codec(Redraw, pb.Redraw)
_VERDICT = record_codec(TextVerdict, pb.TextVerdict, [*PARTS, _WHY, _REDRAW])
STEPS = FrameCodec(
    StepFrame, pb.StepFrame, [refusing(_OPEN, _decode_open), _TREE.read_by(_decode_tree)]
)
# To the coordinator, an unreadable verdict is a refusal of its text.
VERDICT = FrameCodec(VerdictFrame, pb.VerdictFrame, [refusing(_VERDICT), _WHY])
