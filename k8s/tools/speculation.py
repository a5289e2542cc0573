"""How good the drafts are, what they cost, and which drafters rest."""

from __future__ import annotations

from cluster import metrics
from k8s.tools.panels import Dashboard, Graph, Row
from k8s.tools.query import gauge, or_zero, rate, share

TOKENS_PER_STEP = Graph(
    "Tokens per step of a text",
    "short",
    {"{{task}}": f"1 + {share(metrics.NUM_ACCEPTED_TOKENS, metrics.SPEC_STEPS, 'task')}"},
    "The mean acceptance length: the accepted draft tokens and one of the target's own. "
    "Of steps that verified drafts.",
)

_ACCEPTANCE = Row(
    "Acceptance",
    [
        Graph(
            "Acceptance rate by drafter",
            "percentunit",
            {
                "{{drafter}}": share(
                    metrics.NUM_ACCEPTED_TOKENS, metrics.NUM_DRAFT_TOKENS, "drafter"
                )
            },
            "Accepted draft tokens / verified ones. It falls when longer drafts are verified, "
            "without anything being wrong.",
            most=1,
        ),
        Graph(
            "Acceptance rate by task",
            "percentunit",
            {"{{task}}": share(metrics.NUM_ACCEPTED_TOKENS, metrics.NUM_DRAFT_TOKENS, "task")},
            "Accepted draft tokens / verified ones, of all drafters.",
            most=1,
        ),
        TOKENS_PER_STEP,
        Graph(
            "Accepted at a depth",
            "percentunit",
            {"{{position}}": share(metrics.NUM_ACCEPTED_PER_POS, metrics.SPEC_STEPS, "position")},
            "Share of the steps with drafts that accepted one at this depth of the tree, from 0. "
            "Depths at which almost none is accepted are not worth drafting.",
            most=1,
        ),
        Graph(
            "Expected accepted tokens",
            "short",
            {"{{drafter}}, {{task}}": gauge("max", metrics.EXPECTED_ACCEPTED, "drafter", "task")},
            "Tokens that the best four nodes of a drafter's trees would have brought, verified or "
            "not, so that the budget does not move it. A lasting fall means that the texts have "
            "changed.",
        ),
        Graph(
            "Calibration error",
            "percentunit",
            {"{{drafter}}, {{law}}": gauge("max", metrics.CALIBRATION_ERROR, "drafter", "law")},
            "Distance of the predicted acceptance from what was accepted, at the worst task.",
        ),
    ],
)

_COST = Row(
    "What drafts cost",
    [
        Graph(
            "Drafting time",
            "percentunit",
            {"{{drafter}}": rate(metrics.DRAFT_TIME, "drafter")},
            "Seconds of drafting in a second, over all replicas: 100 % is one replica that does "
            "nothing else.",
        ),
        Graph(
            "Drafting time per commit",
            "s",
            {"{{drafter}}": share(metrics.DRAFT_TIME, metrics.DRAFTER_COMMITS, "drafter")},
            "Of a tree, on average.",
        ),
        Graph(
            "Draft tokens asked for per commit",
            "short",
            {"{{drafter}}": share(metrics.DRAFT_DEMAND, metrics.DRAFTER_COMMITS, "drafter")},
            "The budget that the drafter is granted.",
        ),
        Graph(
            "Drafted ahead",
            "percentunit",
            {
                "{{drafter}}": share(
                    metrics.PRE_DRAFTED, metrics.PRE_DRAFTED, "drafter", only='outcome="hit"'
                )
            },
            "Commits behind which the drafter's tree went on, so that the next step had drafts at "
            "once.",
            most=1,
        ),
        Graph(
            "Time lost and not yet saved again",
            "s",
            {"{{target}}": gauge("max", metrics.DEFICIT, "target")},
            "Against plain decoding. It is bounded; near its bound, steps are plain (guard).",
        ),
        Graph(
            "Accepted tokens that another drafter had, too",
            "short",
            {"{{drafter}}": or_zero(rate(metrics.NUM_SHARED_TOKENS, "drafter"))},
            "Per second. A drafter whose tokens others have as well can be spared.",
        ),
    ],
)

_FAULTS = Row(
    "Drafters that fail",
    [
        Graph(
            "Breakers open",
            "short",
            {"{{drafter}}": or_zero(gauge("max", metrics.BREAKERS_OPEN, "drafter"))},
            "Replicas that are left alone for a while, after failures or stalls.",
        ),
        Graph(
            "Faults per second",
            "short",
            {"{{drafter}}, {{why}}": or_zero(rate(metrics.DRAFTER_FAULTS, "drafter", "why"))},
            "Broken connections and refused messages.",
        ),
        Graph(
            "Made for another target",
            "short",
            {"{{drafter}}": or_zero(gauge("sum", metrics.DRAFTER_FOREIGN, "drafter"))},
            "Times that a drafter joined which was made for another target than the one served.",
        ),
    ],
)

SPECULATION = Dashboard(
    "speculation",
    "Drafthouse: speculation",
    "How good the drafts are, what they cost, and which drafters rest.",
    [_ACCEPTANCE, _COST, _FAULTS],
)
