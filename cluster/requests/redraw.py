"""What an audit of a finished text found: places where the target draws another token."""

from __future__ import annotations

from cluster.records import equal_record


@equal_record
class Redraw:
    """A place of an audited text whose token is not what the target draws there.

    position: among the output tokens.  token_id: the token that is drawn there now.  gap: how far
    the text's own token is from being drawn, in logits; 0 = both tie.
    """

    position: int
    token_id: int
    gap: float
