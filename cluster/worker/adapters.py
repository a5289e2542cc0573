"""Changes what a target does while it serves: its LoRA adapters, the models of the drafters inside
it, and how it plans its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from cluster.config.live import changed
from cluster.config.schema import Config, CoordinatorConfig
from cluster.engine.engine import Engine
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError
from cluster.messages import AdapterList
from cluster.worker.swap import Swaps

log = logging.getLogger(__name__)


def reconfigure_target(
    engine: Engine, config: Config, user_config: Any, plan_by: Callable[[CoordinatorConfig], None],
    swaps: Swaps | None = None,
) -> AdapterList:  # fmt: skip
    """Serve by `config` with `user_config`; returns the adapters that are then served.

    plan_by: is told the settings by which steps are planned from then on.  swaps: of its residents;
    one with another model is loaded while the present one drafts.  Running requests keep
    their adapters.  If anything cannot be, nothing changes, and the reason is logged and returned.
    May be called from any thread while another steps the engine.
    """
    refused = ""
    try:
        wanted = changed(config, user_config)
        loaded = [] if swaps is None else swaps.load(wanted)
        engine.model.adapters.serve(read_adapters(wanted.target.engine))
    except ConfigError as error:
        log.error("the target stays as it is: %s", error.message)
        refused = error.message
    else:
        if swaps is not None:
            swaps.use(wanted, loaded)
        plan_by(wanted.coordinator)
        log.info("reconfigured; adapters served: %s", ", ".join(engine.adapters.names) or "none")
    return AdapterList(engine.adapters.references, refused)
