"""Fields of requests and of their answers, as plain values that every layer can carry."""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cluster.records import equal_record, frozen, record

# A request's beam search and where its texts end, as plain values that every layer can carry.


# A step ranks the best candidates of every beam, so its work grows with the square of the width.
MAX_BEAMS = 64

EarlyStopping = bool | Literal["never"]


@frozen
class BeamSpec:
    """The settings of transformers' `generate(num_beams=..., do_sample=False)`.

    num_beams: width of the search, at least 1.
    length_penalty: a text's score is its log-probability over its length to this power.
    early_stopping: True = the search ends with num_beams texts; False = when the best unfinished
    one, if it ended now, would not be among them; "never" = when no continuation could be.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@frozen
class BeamEnd:
    """The end of one text of a beam search; all texts stand end to end, the best first.

    num_tokens: its length without a stop token.  is_stopped: it ends at a stop token, not at the
    limit.  logprob: of the whole text, its stop token included.  score: orders the texts.
    """

    num_tokens: int
    is_stopped: bool
    logprob: float
    score: float


# A step of one text with the drafts that it verified, for requests that ask for them.


@record
class DraftStep:
    """One step of a text, as `return_draft_trees` shows it.

    token_ids, parents: the tree that was verified, as in `TokenTree`.  survival: float32[n], the
    expected probability that the text passes through the node.  sources: uint32[n], who proposed
    the node, as bits over `drafters`.
    path: the accepted nodes, root first, as far as the text goes.  own_token_ids: the token that
    the target added; empty where the text ended before.  The two together are the step's tokens.
    num_sequences: texts in the step.  why: a name of `PlainWhy` in lower case, "" = none.
    number, at_s: the ingress sets them: the number of the step, from 0, and the seconds since it
    sent the request.
    """

    drafters: tuple[str, ...]
    token_ids: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    survival: npt.NDArray[np.float32]
    sources: npt.NDArray[np.uint32]
    path: npt.NDArray[np.int32]
    own_token_ids: npt.NDArray[np.int32]
    draft_time_s: float = 0.0
    step_time_s: float = 0.0
    num_sequences: int = 0
    why: str = ""
    number: int = 0
    at_s: float = 0.0

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)


# The grammar of a request, as plain values that every layer can carry.


@frozen
class GrammarSpec:
    """A grammar as its author wrote it; `cluster.grammar` compiles it.

    kind: "json_schema", "regex", "choice" (a JSON list of texts), "grammar" (Lark or GBNF) or
    "structural_tag".  reasoning_end: the tokens that end the reasoning before the answer, which is
    not constrained; () = there is none.  reasoning_start: the first token of a text that reasons;
    () = the prompt has begun the reasoning already.
    """

    kind: str
    source: str
    reasoning_start: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()


# The reasons for steps without drafts.


class PlainWhy(enum.IntEnum):
    """The reason why a step verified no drafts for a text."""

    NONE = 0  # it verified some, or none were wanted
    GUARD = 1  # drafts have lost as much time as the guard allows
    NO_DRAFTS = 2  # none were at hand
    NOT_WORTH_IT = 3  # verifying the drafts at hand, or making some, would not have paid
    UNMEASURED = 5  # step times are not known yet
    FAULT = 6  # the choice of nodes failed, or a step with drafts did
    SCHEDULE = 7  # coordinator.draft_length allows the text none
    SWITCHBACK = 9  # plain decoding is measured at this time


# What an audit of a finished text found: places where the target draws another token.


@equal_record
class Redraw:
    """A place of an audited text whose token is not what the target draws there.

    position: among the output tokens.  token_id: the token that is drawn there now.  gap: how far
    the text's own token is from being drawn, in logits; 0 = both tie.
    """

    position: int
    token_id: int
    gap: float


# Determines the seed with which a request is sampled: its own, or one drawn for it.


# JSON readers that keep every number as a double hold integers up to 2**53 exactly.
_NUM_DRAWN_BITS = 53


def asked_seed(seed: int | None) -> int | None:
    """Return the seed that a client asks for; None or a negative one asks for a drawn seed."""
    return None if seed is None or seed < 0 else seed


def draw_seed() -> int:
    """Draw a random seed that is small enough to pass through any JSON reader unchanged."""
    return secrets.randbits(_NUM_DRAWN_BITS)


def derived_key(seed: int, *words: str | int) -> int:
    """Return another 64-bit key for a 64-bit seed, from which the seed cannot be told."""
    said = " ".join(map(str, words)).encode()
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + said, digest_size=8).digest())


# What a step of one text has brought and verified, for counts that end where the text ends.


@record
class StepCount:
    """One step of a text.

    sources: of each token that it brought, the drafters that had proposed it, as of `TokenEvent`.
    num_nodes: draft tokens that it verified; verified: how many of these each drafter had proposed.
    decode_time_s: since the text's first verdict.
    """

    sources: tuple[tuple[str, ...], ...]
    num_nodes: int
    verified: Mapping[str, int]
    decode_time_s: float


# Separates tenants: clients with different salts share no learned state.
#
# Drafters' stores and the prefix cache keep data of earlier texts, which makes later ones faster.
# A client can see how fast it is served, so with a shared cache it could find out what others
# wrote. A tenant is the key that a request is sent with, and the `cache_salt` that it names, as
# in vLLM; all requests without either are one tenant.


# Only the clients of a tenant and the ingress know its key and salt.  Everything behind the ingress
# knows this digest, which distinguishes tenants and is of no use to a client.
_DIGEST_BYTES = 16

DEFAULT_TENANT = b""
# Of texts that a target writes to measure itself: no client shares what is learned there.
PROFILE_TENANT = b"draft-profile"


def tenant_of(cache_salt: str | None, owner: str = "") -> bytes:
    """Return the tenant of the clients that send this salt; DEFAULT_TENANT without salt and owner.

    owner: the name of their key, "" where no keys are asked for.
    """
    if not cache_salt and not owner:
        return DEFAULT_TENANT
    # The owner's own digest is the key of the hash: no salt of one is that of another.
    key = hashlib.blake2b(owner.encode()).digest() if owner else b""
    return hashlib.blake2b(
        (cache_salt or "").encode(), digest_size=_DIGEST_BYTES, person=b"cache_salt", key=key
    ).digest()


# The laws by which a request's drafts are accepted, and those that drafts are drawn from.


# coupled: a draft is accepted where it is the target's own draw, so no draft changes the text.  The
# others are the textbook's, by the ratio of probabilities, under which texts depend on drafts:
# rejection: of chains.  multi_step: of siblings in turn.
Law = Literal["coupled", "rejection", "multi_step"]
LAWS: tuple[Law, ...] = get_args(Law)
# What to do about laws that were served once.
REMOVED_LAWS: Mapping[str, str] = {"block": "rejection accepts as many drafts, so name that"}


@record
class DraftLaw:
    """The law from which the children of a node were drawn, one after another without replacement.

    token_ids: int64[k], different ones.  probs: float64[k], positive, with the sum 1.
    """

    token_ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


# By parent, -1 = the context.  The children of a parent without a law were chosen, not drawn.  They
# never travel, so that no peer's word can change a text's law.
Laws = Mapping[int, DraftLaw]
NO_LAWS: Laws = {}
