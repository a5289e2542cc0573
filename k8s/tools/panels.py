"""A dashboard as a table of rows and graphs, and the document that Grafana reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

from cluster.metrics import TARGET_UP

# Every dashboard has it, so that each leads to the others.
_TAG = "drafthouse"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Grafana's grid is 24 wide.
_WIDTH, _HEIGHT = 8, 8


@dataclass(frozen=True, slots=True)
class Graph:
    """One panel.

    unit: Grafana's name of it.  queries: PromQL by legend, in which {{label}} stands for a label's
    value.  most: the end of the axis, where there is one.
    """

    title: str
    unit: str
    queries: Mapping[str, str]
    text: str
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    graphs: Sequence[Graph]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of its file, and its address in Grafana."""

    name: str
    title: str
    text: str
    rows: Sequence[Row]


def document(described: Dashboard) -> str:
    """Return the JSON that Grafana imports."""
    board = (
        dashboard.Dashboard(described.title)
        .uid(f"{_TAG}-{described.name}")
        .description(described.text)
        .tags([_TAG])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .link(_others())
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_jobs())
    )
    ids = itertools.count(1)
    for row in described.rows:
        board.with_row(dashboard.Row(row.title).id(next(ids)))
        for graph in row.graphs:
            board.with_panel(_panel(graph).id(next(ids)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _others() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Drafthouse")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .include_vars(True)
        .keep_time(True)
    )


def _jobs() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("job")
        .label("Job")
        .datasource(_SOURCE)
        .query(f"label_values({TARGET_UP.name}, job)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _panel(graph: Graph) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(graph.title)
        .description(graph.text)
        .datasource(_SOURCE)
        .unit(graph.unit)
        .min(0)
        .span(_WIDTH)
        .height(_HEIGHT)
        .fill_opacity(8)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if graph.most is not None:
        panel.max(graph.most)
    for letter, (legend, query) in zip("ABCDEFGH", graph.queries.items(), strict=False):
        panel.with_target(
            prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter).range()
        )
    return panel
