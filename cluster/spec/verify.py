"""The law of acceptance: the target draws at every node, and the text is a walk over its draws.

A draft token is accepted iff it *is* the token the target drew at its parent.  The draws depend
on the target, the path and the noise only, so the emitted text is the one plain decoding emits,
whatever the tree: merged, pruned, stale or adversarial.
"""

from __future__ import annotations

import numpy as np

from cluster.core import TokenArray, TokenTree


def walk_draws(tree: TokenTree, draws: TokenArray) -> tuple[TokenArray, TokenArray]:
    """Emit the draw at the root, and go on from the child that carries it, while there is one.

    draws: int[n + 1]; draws[0] is the target's draw after the context, draws[i + 1] after node i.
    Returns (path, token_ids): accepted nodes, root first, int32[m]; emitted tokens, int32[m + 1],
    of which the last is the target's own (bonus or recovered).
    """
    drawn = draws.tolist()
    tokens = tree.token_ids.tolist()
    node = -1
    path: list[int] = []
    # Parents stand before children, so one pass in order meets the nodes of the path in turn.
    for child, parent in enumerate(tree.parents.tolist()):
        if parent == node and tokens[child] == drawn[node + 1]:
            path.append(child)
            node = child
    emitted = [tokens[child] for child in path]
    emitted.append(drawn[node + 1])
    return np.array(path, dtype=np.int32), np.array(emitted, dtype=np.int32)
