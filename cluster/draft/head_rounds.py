"""Whole rounds of a draft head on the device: trees of several texts, grown by graphs.

Whoever grows a tree on the host waits after each pass for its best tokens, to know which nodes the
next one expands.  Here the trees lie on the device, in fixed shapes: what the host knows is sent in
one copy, one graph runs the roots and another each further pass, and the host reads once what came
of it and grows its own trees alike (`Eagle3Drafter`).

A text's nodes that were expanded have a *place* each, in their order; the root's is 0.  The last
place is nobody's: rows that a pass has no node for write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.draft.candidates import Sharpness, are_unprocessed, scored
from cluster.draft.head_drafter import HeadRequest
from cluster.draft.heads.head import Head
from cluster.draft.inside import IndexArray
from cluster.draft.live_tree import KEPT_SHARE
from cluster.draft.options import Eagle3Options
from cluster.engine.graphs.capture import Capture, Replay, Staging
from cluster.engine.types import AttentionOptions
from cluster.records import record
from cluster.spec.draw import gumbel_of_words
from cluster.spec.noise import MASK32, philox
from cluster.spec.params import divisor

# Texts of a round; with more, a pass has work for the whole device, and its launches are no matter.
_TEXTS = (1, 2, 4, 8)
# Tokens before a text's end that the head attends to: a round has the least that holds them.
_CONTEXTS = (256, 1024, 4096, 16384)
# Passes behind the roots' between two waits: a tree of 8 nodes takes 2.5 in all on average
# (`cluster.draft.live_tree`), and one that is not needed costs a read of the head's weights.
_PASSES = 2
# Tokens that end a text and are no drafts; a request with more is drafted for on the host.
_MAX_STOPS = 8
# What the host says of a text, int64 or float64 each; then its stop tokens and its slots.
_WHOLE = (
    *("token", "root_len", "position", "num_asked", "max_tokens", "min_tokens"),
    *("key", "key_high", "stream", "top_k", "last_slot"),
)
_REAL = ("divisor", "top_p", "min_p", "tau", "coverage")
_STOPS = len(_WHOLE) + len(_REAL)
_NUM_FIXED = _STOPS + _MAX_STOPS


@record
class RoundText:
    """A text behind which a tree is to grow, with num_asked nodes at most.

    positions, slots: see `TextCache.find`.
    """

    request: HeadRequest
    num_asked: int
    fit: Sharpness
    positions: IndexArray
    slots: IndexArray

    def write(self, out: npt.NDArray[np.int64]) -> None:
        """Say it in the device's form."""
        request, params, fit = self.request, self.request.params, self.fit
        out[: len(_WHOLE)] = (
            *(int(request.text.token_ids[-1]), len(request.text), request.next_position),
            *(self.num_asked, params.max_tokens, params.min_tokens),
            *(params.noise_key & MASK32, params.noise_key >> 32, params.stream, params.top_k),
            self.slots[-1],
        )
        reals = (divisor(params), params.top_p, params.min_p, fit.tau, fit.coverage)
        out[len(_WHOLE) : _STOPS].view(np.float64)[:] = reals
        out[_STOPS:] = -1
        out[_STOPS : _STOPS + len(params.stop_token_ids)] = params.stop_token_ids
        out[_NUM_FIXED : _NUM_FIXED + len(self.positions)] = self.slots[self.positions]


@record
class Expanded:
    """What came of some texts' rounds, by text and place.

    tokens, parents: int64[texts, places], the nodes that were expanded and the places of their
    parents; a token of -1 = none was.  token_ids: int64[texts, places, candidates], each node's
    candidates, best first.  scores: float64, theirs.
    """

    tokens: IndexArray
    parents: IndexArray
    token_ids: IndexArray
    scores: npt.NDArray[np.float64]


class DeviceRounds:
    """One thread at a time; call in inference mode.

    head: computes in `dtype`.  kv, hidden: the layers of the cache (`TextCache`): keys and values,
    and fused hidden rows."""

    def __init__(
        self,
        head: Head,
        layers: Sequence[torch.Tensor],
        dtype: torch.dtype,
        options: Eagle3Options,
        max_nodes: int,
        capture: Capture,
    ) -> None:
        """layers: of the cache.  max_nodes: of a tree."""
        self.head, self.dtype, self.options = head, dtype, options
        self.kv, self.hidden = layers
        self.num_candidates = min(options.num_candidates, len(head.token_map))
        self.num_children = min(options.num_children, self.num_candidates)
        self._capture = capture
        self._replays: dict[tuple[int, int], tuple[Replay, Replay]] = {}
        most = _TEXTS[-1] * (_NUM_FIXED + self._context(options.context))
        self._staging = Staging(2 * most, self.kv.device)
        self._state = self._new_state(_TEXTS[-1], max_nodes + 2)  # the root, and nobody

    def _new_state(self, texts: int, places: int) -> dict[str, torch.Tensor]:
        """Trees by text, and by place or node: node 0 is the root, then the children of each place
        stand side by side."""
        nodes, device = 1 + places * self.num_children, self.kv.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(texts, *shape, dtype=dtype, device=device)

        return {
            "num_places": zeros(),
            "kv": zeros(places, *self.kv.shape[1:], dtype=self.dtype),
            "handed_on": zeros(places, self.head.embed_tokens.embedding_dim, dtype=self.dtype),
            "seen": zeros(places, places, dtype=torch.bool),
            "found": zeros(places, 2 + 2 * self.num_candidates),
            "tokens": zeros(nodes),
            "depths": zeros(nodes),
            "above": zeros(nodes),  # the place of a node's parent
            "survivals": zeros(nodes, dtype=torch.float64),  # -1 = there is no node
            "is_leaf": zeros(nodes, dtype=torch.bool),
        }

    def takes(self, texts: Sequence[RoundText]) -> bool:
        """True if these trees can grow here."""
        options, params = self.options, [each.request.params for each in texts]
        return (
            len(texts) <= _TEXTS[-1]
            and len(texts) * options.width <= options.max_rows
            and all(map(are_unprocessed, params))
            and all(len(each.stop_token_ids) <= _MAX_STOPS for each in params)
        )

    def begin(self, texts: Sequence[RoundText]) -> Expanded:
        """Begin a tree behind each of these texts; returns its first passes."""
        num_texts = next(each for each in _TEXTS if each >= len(texts))
        context = self._context(max(len(each.positions) for each in texts))
        shape = num_texts, _NUM_FIXED + context
        given = np.zeros(shape, np.int64)
        given[:, _NUM_FIXED:] = -1
        for text, row in zip(texts, given, strict=False):
            text.write(row)
        sent = self._staging.put(given)
        if shape not in self._replays:
            state = {name: each[:num_texts] for name, each in self._state.items()}
            passes = Passes(self, state, sent)
            self._replays[shape] = self._capture(passes.start), self._capture(passes.further)
        start, self._further = self._replays[shape]
        start()
        self._num_texts = len(texts)
        return self.go_on()

    def go_on(self) -> Expanded:
        """Some more passes of the same texts."""
        for _ in range(_PASSES):
            self._further()
        # The only time that the host waits.
        found = self._state["found"][: self._num_texts, :-1].cpu().numpy()
        split = 2 + self.num_candidates
        scores = found[:, :, split:].view(np.float64)
        return Expanded(found[:, :, 0] - 1, found[:, :, 1], found[:, :, 2:split], scores)

    def _context(self, length: int) -> int:
        most = self.options.context
        return min(next((each for each in _CONTEXTS if each >= length), most), most)


class Passes:
    """The passes of some texts, on static memory: what a graph does.

    After every run an entry of `found` says what its place expanded: the node's token + 1 (0 =
    none), its parent's place, the candidates of its row, best first, and, as float64, their
    scores."""

    def __init__(
        self, rounds: DeviceRounds, state: dict[str, torch.Tensor], given: torch.Tensor
    ) -> None:
        """state: of the rounds, of so many texts.  given: int64[texts, numbers], by `RoundText`."""
        self._rounds, self._options, self._state = rounds, rounds.options, state
        num_texts, reals = len(given), given.view(torch.float64)
        self._said = {name: given[:, i, None] for i, name in enumerate(_WHOLE)}
        self._said |= {name: reals[:, len(_WHOLE) + i, None] for i, name in enumerate(_REAL)}
        self._stops, self._slots = given[:, _STOPS:_NUM_FIXED], given[:, _NUM_FIXED:]
        self._nobody = state["kv"].shape[1] - 1  # the last place
        self._texts = torch.arange(num_texts, device=given.device)[:, None]
        self._num_texts = num_texts

    def start(self) -> None:
        """The roots."""
        state, said = self._state, self._said
        for name in ("found", "depths", "is_leaf", "seen"):
            state[name].zero_()
        state["survivals"].fill_(-1.0)
        state["survivals"][:, 0].fill_(1.0)
        state["above"][:, 0].fill_(self._nobody)
        state["tokens"][:, 0] = said["token"][:, 0]
        state["num_places"].fill_(1)
        rows = self._rounds.hidden[said["last_slot"][:, 0].clamp(min=0)].flatten(1)
        first = rows[:, : state["handed_on"].shape[2]].to(self._rounds.dtype)
        root = torch.zeros_like(said["token"])
        self._expand(root, root, first[:, None], root == 0)

    def further(self) -> None:
        """The likeliest leaves of each text, as many as are worth it (`TreeDrafter._leaves`)."""
        state, options = self._state, self._options
        asked = self._said["num_asked"]
        survivals, last = state["survivals"], state["survivals"].shape[1] - 1
        best = survivals[:, 1:].sort(dim=1, descending=True).values
        worst = best.gather(1, (asked - 1).clamp(0, last - 1)) / KEPT_SHARE
        least = worst.clamp(min=options.min_survival)
        leaves = survivals.masked_fill(~state["is_leaf"], -1.0)
        likely, nodes = leaves.sort(dim=1, descending=True, stable=True)
        likely, nodes = likely[:, : options.width], nodes[:, : options.width]
        ranks = torch.arange(likely.shape[1], device=likely.device)
        num_places = state["num_places"][:, None]
        is_row = (likely >= least) & (ranks < asked - num_places + 1)
        # Ascending, as on the host; those of no row come last.
        nodes = nodes.masked_fill(~is_row, last).sort(dim=1).values
        is_row = nodes < last
        places = (num_places + ranks).masked_fill(~is_row, self._nobody).clamp(max=self._nobody)
        hidden = state["handed_on"][self._texts, state["above"].gather(1, nodes)]
        self._expand(nodes, places, hidden, is_row)
        state["num_places"] += is_row.sum(dim=1)

    def _expand(
        self, nodes: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor, is_row: torch.Tensor
    ) -> None:
        """One pass.  nodes, places, is_row: [texts, rows].  hidden: [texts, rows, hidden]."""
        state, texts, head = self._state, self._texts, self._rounds.head
        tokens, above = (state[name].gather(1, nodes) for name in ("tokens", "above"))
        depths = state["depths"].gather(1, nodes)
        itself = places[:, :, None] == torch.arange(self._nobody + 1, device=places.device)
        seen = state["seen"][texts, above] & (above != self._nobody)[:, :, None] | itself
        state["seen"][texts, places] = seen
        held = (self._slots >= 0)[:, None].expand(-1, places.shape[1], -1)
        self._places, self._mask = places, torch.cat((held, seen), dim=2)[:, None]
        positions = (self._said["root_len"] - 2 + depths).clamp(min=0)
        rows = head(tokens.flatten(), hidden.flatten(0, 1), positions.flatten(), self)
        state["handed_on"][texts, places] = head.handed_on(rows).view_as(hidden)
        logits = head.logits(rows).float().view(*places.shape, -1)
        values, columns = logits.topk(self._rounds.num_candidates, dim=-1)
        ids = head.token_map[columns]
        scores, order = self._scores(values.double(), ids, depths).sort(
            dim=2, descending=True, stable=True
        )
        ids = ids.gather(2, order)
        said = (tokens + 1).masked_fill(~is_row, 0), above
        found = torch.cat((torch.stack(said, dim=2), ids, scores.view(torch.int64)), dim=2)
        state["found"][texts, places] = found
        state["is_leaf"].scatter_(1, nodes, False)
        self._branch(nodes, places, is_row, ids, scores)

    def _branch(
        self,
        nodes: torch.Tensor,
        places: torch.Tensor,
        is_row: torch.Tensor,
        ids: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Give nodes their children (`TreeRequest.expand`).  ids, scores: best first."""
        state, count = self._state, self._rounds.num_children
        said = {name: each[:, :, None] for name, each in self._said.items()}
        weights = ((scores - scores[:, :, :1]) / said["tau"]).exp()
        shares = weights[:, :, :count] / weights.sum(dim=2, keepdim=True) * said["coverage"]
        tokens = ids[:, :, :count]
        depths = state["depths"].gather(1, nodes)[:, :, None]
        positions = said["position"] + depths
        ends = (tokens[:, :, :, None] == self._stops[:, None, None]).any(dim=3)
        ends &= positions >= said["min_tokens"]
        is_child = is_row[:, :, None] & (shares > 0.0) & ~ends
        is_child &= positions + 1 < said["max_tokens"]
        survivals = state["survivals"].gather(1, nodes)[:, :, None] * shares
        children = 1 + places[:, :, None] * count + torch.arange(count, device=places.device)
        for name, values in (
            ("tokens", tokens),
            ("depths", (depths + 1).expand_as(children)),
            ("above", places[:, :, None].expand_as(children)),
            ("survivals", survivals.masked_fill(~is_child, -1.0)),
            ("is_leaf", is_child & (positions + 2 < said["max_tokens"])),
        ):
            state[name].scatter_(1, children.flatten(1), values.flatten(1))

    def _scores(
        self, values: torch.Tensor, ids: torch.Tensor, depths: torch.Tensor
    ) -> torch.Tensor:
        """Of candidates without penalties: float64."""
        said = {name: each[:, :, None] for name, each in self._said.items()}
        position = said["position"] + depths[:, :, None]
        words = philox((ids, position, said["stream"], 0), (said["key"], said["key_high"]))[0]
        ranks = torch.arange(values.shape[2], device=values.device)
        return scored(torch, values, gumbel_of_words(words), ranks, said)

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `LayerPlan`: each row sees its text and its path."""
        fresh = torch.stack((key[0], value[0]))
        fresh = fresh.view(2, key.shape[1], self._num_texts, -1, key.shape[3])
        places = self._state["kv"]  # [texts, places, 2, kv heads, dim]
        places[self._texts, self._places] = fresh.permute(2, 3, 0, 1, 4)
        held = self._rounds.kv[self._slots.clamp(min=0)].to(places.dtype)
        keys, values = torch.cat((held, places), dim=1).permute(2, 0, 3, 1, 4)
        # The rows of heads that share keys side by side, so that these are read as they stand.
        shape = (self._num_texts, keys.shape[1], -1, query.shape[3])
        own = query.reshape(query.shape[1], self._num_texts, -1, query.shape[3]).transpose(0, 1)
        mask = self._mask.repeat(1, 1, own.shape[1] // keys.shape[1], 1)
        attended = scaled_dot_product_attention(
            own.reshape(shape), keys, values, attn_mask=mask, scale=options.scaling
        )
        return attended.reshape(own.shape).transpose(1, 2).flatten(0, 1)[None]
