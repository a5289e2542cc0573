"""Options of drafters that ask another engine, apart from what needs an HTTP client."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cluster.config.addresses import Url, is_loopback
from cluster.config.parse import MAX_SECONDS, PositiveInt, Range, Seconds
from cluster.errors import ConfigError


@dataclass(frozen=True)
class OpenAIOptions:
    """The address of another engine, which is sent the texts that it continues, and how it is asked
    there."""

    url: Url = ""
    """Where the engine answers, such as http://127.0.0.1:8080; its `/v1/completions` is asked."""
    model: str = ""
    """The model's name there; empty = none is named."""
    api_key_env: str = ""
    """The environment variable of the drafter's process that has the engine's API key; empty = none
    is sent."""
    tenants: Literal["auto", "unsalted", "all"] = "auto"
    """Whose texts are sent: unsalted = of requests with neither an API key nor a `cache_salt`. auto
    = all where the address is this machine's own, else unsalted."""
    tokenizer: str = ""
    """The target's model, in whose tokens the drafts are. Empty = `target.engine.model`; where the
    drafter is part of an application of drafters alone it must be named."""
    marks: Literal["text", "drop"] = "text"
    """Special marks of the target's texts, those of its chat template among them: text = they are
    sent by their spelling; drop = they are left out, for a model to which they mean nothing."""
    max_tokens: PositiveInt = 32
    """Tokens of the engine's that it is asked for at a time; it is asked for more when half of them
    are left."""
    max_prompt_bytes: Annotated[int, Range(1024)] = 32_768
    """Of a longer text half as much or more of its end is sent. Not more than the engine's context
    holds."""
    concurrency: PositiveInt = 8
    """Answers under way at the same time; further texts wait for one to end."""
    timeout_s: Annotated[float, Range(0.01, MAX_SECONDS)] = 10.0
    """An answer that takes longer has failed."""
    rest_s: Seconds = 5.0
    """How long the engine is left alone when three answers in a row have failed or have come too
    late for a draft."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigError.at("url", "missing; name the engine's address")
        parts = urlsplit(self.url)
        if parts.query or parts.fragment:
            raise ConfigError.at("url", f"{self.url!r} is none; write http://HOST:PORT")
        if parts.username is not None or parts.password is not None:
            raise ConfigError.at("url", "it holds a password; name a variable in api_key_env")
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            reason = "this is no name of a variable; name the variable that holds the key"
            raise ConfigError.at("api_key_env", reason)

    @property
    def endpoint(self) -> str:
        base = self.url.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        return f"{base}/v1/completions"

    @property
    def sends_all(self) -> bool:
        """True if texts of all tenants are sent."""
        if self.tenants == "auto":
            return is_loopback(urlsplit(self.url).hostname or "")
        return self.tenants == "all"
