"""The grammar of a request, as plain values that every layer can carry."""

from __future__ import annotations

from cluster.records import frozen


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
