"""Changes which LoRA adapters a target serves while it serves."""

from __future__ import annotations

import logging
from typing import Any

from cluster.config.schema import Config
from cluster.engine.engine import Engine
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError
from cluster.messages import AdapterList

log = logging.getLogger(__name__)


def serve_adapters(engine: Engine, config: Config, user_config: Any) -> AdapterList:
    """Serve the adapters of `config` with `user_config`; returns the list that is then served.

    Running requests keep their adapters.  If an adapter cannot be served, nothing changes, and the
    reason is logged and returned.  May be called from any thread while another steps the engine.
    """
    refused = ""
    try:
        engine.model.adapters.serve(read_adapters(config.changed(user_config).target.engine))
    except ConfigError as error:
        log.error("adapters stay as they are: %s", error.message)
        refused = error.message
    else:
        log.info("adapters served: %s", ", ".join(engine.adapters.names) or "none")
    return AdapterList(engine.adapters.references, refused)
