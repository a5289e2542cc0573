"""The record of one text that the target's step loop, its verifier and its residents share."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core import SamplingParams
from cluster.plan.resident import EVERYONE
from cluster.requests.acceptance_law import NO_LAWS, Laws
from cluster.spec.token_log import TokenLog


@dataclass(slots=True, eq=False)
class TextRecord:
    """A text that is written; engine thread only.

    tokens: the committed text; it only grows.  prompt_len: the token at index i is output token
    i - prompt_len.  residents: names of the drafters that draft for it.
    held_len: the tokens that the engine holds of it; the verifier notes them.
    draft_nodes: nodes wanted after the last verdict.  ask_mask: they are wanted of these residents;
    bit i stands for the target's i-th.  is_over: no draft can be of use any more.  laws: of the
    nodes in flight.  is_audit: as in `Open`.
    """

    request_id: str
    generation: int
    prompt_len: int
    params: SamplingParams
    task: str
    tenant: bytes
    residents: frozenset[str]
    tokens: TokenLog
    adapter: str = ""
    held_len: int = 0
    draft_nodes: int = 0
    ask_mask: int = EVERYONE
    is_over: bool = False
    laws: Laws = field(default_factory=lambda: NO_LAWS)
    is_audit: bool = False

    @property
    def output_len(self) -> int:
        """Output tokens so far: the output position of the next one."""
        return len(self.tokens) - self.prompt_len
