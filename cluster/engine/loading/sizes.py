"""The smallest sizes with which a model can be served: those that the self-check needs."""

from __future__ import annotations

from cluster.config.schema import EngineConfig
from cluster.errors import ConfigError

# Slots of the cache, positions, and rows of one step.
MIN_SLOTS = 16
MIN_ROWS = 8


def check_sizes(config: EngineConfig, max_context_len: int, num_pages: int) -> None:
    """Raise ConfigError for sizes with which nothing could be served.

    num_pages: 0 = not known before the model is loaded.
    """
    sizes = [
        ("max_batch_tokens", config.max_batch_tokens, MIN_ROWS),
        ("max_context_len", max_context_len, MIN_SLOTS),
    ]
    if num_pages:
        sizes.append(("num_pages", num_pages, -(-MIN_SLOTS // config.page_size)))
    for name, value, least in sizes:
        if value < least:
            raise ConfigError(
                f"{name} is {value}, which is too small to serve anything; raise it to at "
                f"least {least}",
                param=name,
            )
