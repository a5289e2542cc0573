"""Taps: the hidden states that a step hands out, for heads that draft from them.

Tap i is transformers' `hidden_states[i]`: for i below the number of layers the *input* of layer i,
so that tap 0 are the embeddings; the number of layers, or -1, names the output of the final norm,
which the output layer multiplies.  The last layer's output before that norm is no tap.
Checkpoints name taps in ways of their own.  EAGLE-3's `eagle_aux_hidden_state_layer_ids`, by
default 2, n // 2 and n - 3 for n layers, are taps as they stand, and so are speculators' ids;
DFlash and DSpark name the layer whose output they take: tap id + 1.

Rows are computed where a step computes them.  What a sequence already holds, of its own or from the
prefix cache, is not computed again and has no taps; after a preemption its text is computed, and
tapped, anew.  So a consumer goes by `TapRows`: the position that a row stands at says which token's
it is, a prompt comes in chunks in the order of positions, and a position that comes again replaces
what came before.  What a consumer derives of all rows belongs into the same pages of the KV cache
(`Engine`'s extra_layers): then it is there for every row that is not computed again, provided that
it was derived before the next step, of every step.  Pages are shared by all texts that begin alike,
so what lies in a slot may depend on the text up to that slot's token and on nothing behind it:
EAGLE's pair of state i and token i + 1 belongs into the slot of position i + 1.  Where a row needs
the state before first_position, and that was found in the prefix cache, there is none: the consumer
kept it, or does without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.errors import ConfigError
from cluster.records import frozen, record


@frozen
class TapRows:
    """One sequence's rows of a step: [start, stop) of `Taps.rows`.

    The first num_context of them are tokens of the text, at first_position and behind it; then
    follow the new nodes of its work's tree, in order.
    """

    request_id: str
    first_position: int
    num_context: int
    start: int
    stop: int


@record
class Taps:
    """The hidden states of all rows that one step computed.

    rows: [rows, taps, hidden], on the engine's device and in the dtype the model computes in; in
    the order in which the taps were asked for.  sequences: whose rows they are.
    """

    rows: torch.Tensor
    sequences: tuple[TapRows, ...]

    def of(self, request_id: str) -> tuple[TapRows, torch.Tensor] | None:
        """One sequence's rows and what they are; None where it had none in this step."""
        for each in self.sequences:
            if each.request_id == request_id:
                return each, self.rows[each.start : each.stop]
        return None


def resolve_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The same taps counted from the front; raises ConfigError for one that there is not."""
    for tap in taps:
        if not -1 <= tap <= num_layers:
            raise ConfigError(
                f"tap {tap} is asked for; a model of {num_layers} layers has taps 0 to "
                f"{num_layers} (-1 = {num_layers}, the final norm's output)",
                param="taps",
            )
    return tuple(num_layers if tap == -1 else tap for tap in taps)
