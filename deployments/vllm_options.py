"""Options as vLLM's users type them, and the settings of ours that they stand for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster import options
from cluster.config.doors import digest_of
from cluster.config.parse import check_known, check_that
from cluster.errors import ConfigError

_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8")
)
FIRST, SETTINGS, RENAMED, ANSWERS, GONE, LAST, METHODS, KEYS = _TABLES.values()
_SWITCH = "enable-"
_JSON = "allowed-origins"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options that say what is served: --draft, those of vLLM's, and --set."""
    options.add_options(parser, FIRST)
    add = parser.add_argument
    for option, (settings, about) in SETTINGS.items():
        short = ["-tp"] if option == "tensor-parallel-size" else []
        told = ": ".join(filter(None, (about, ", ".join(settings))))
        action = argparse.BooleanOptionalAction if option.startswith(_SWITCH) else "store"
        add(f"--{option}", *short, action=action, help=told)
    for option, answer in ANSWERS.items():
        add(f"--{option}", nargs="?", const="", help=f"not here: {answer}")
    for option in GONE:
        add(f"--{option}", help=argparse.SUPPRESS)
    options.add_options(parser, LAST)


def _settings_of(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that the options stand for, as overrides of the form key=value."""
    found: dict[str, str] = {}
    for option, (settings, _) in SETTINGS.items():
        value: str | bool | None = getattr(arguments, option.replace("-", "_"))
        check_that(
            value is not False or settings,
            f"--no-{option}",
            "it is always so here; leave it out",
        )
        if value is not None:
            # A number stays one; what else could be YAML for something else is a text.
            is_yaml = option == _JSON or str(value).replace(".", "", 1).isdigit()
            renamed = RENAMED.get(option, {}).get(value, value)
            found |= dict.fromkeys(settings, str(value) if is_yaml else json.dumps(renamed))
    if arguments.served_model_name:
        name, *others = arguments.served_model_name
        found |= {"model_name": json.dumps(name), "api.served_model_names": json.dumps(others)}
    if arguments.lora_modules:
        adapters = dict(module.partition("=")[::2] for module in arguments.lora_modules)
        found["target.engine.adapters"] = json.dumps(adapters)
    return [f"{setting}={value}" for setting, value in found.items()]


def asked(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return what the options say: drafts, and settings as overrides of the form key=value.

    Those of --set are the last, and so count."""
    for option, answer in {**ANSWERS, **GONE}.items():
        check_that(getattr(arguments, option.replace("-", "_")) is None, f"--{option}", answer)
    drafts, settings = list(arguments.drafts), _settings_of(arguments)
    if arguments.speculative_config is not None:
        draft, more = speculation(arguments.speculative_config)
        drafts, settings = [*drafts, draft], [*settings, *more]
    if getattr(arguments, "log_format", None):
        settings.append(f"log_format={arguments.log_format}")
    return drafts, [*settings, *arguments.overrides]


def speculation(text: str) -> tuple[str, list[str]]:
    """Return the draft, as `--draft` has it, and the settings of vLLM's speculative config.

    Raises ConfigError for what has no counterpart, with the remedy."""
    option = "--speculative-config"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError.at(option, f"not valid JSON: {error}") from error
    check_that(isinstance(given, dict), option, "a JSON object is expected")
    model, method = given.pop("model", ""), given.pop("method", "draft_model")
    method = "mtp" if str(method).endswith("_mtp") else method
    reason = f"docs/drafters.md has all kinds, and the method {method!r} is not served here"
    check_known(str(method), METHODS, option, reason, "those that are")
    kind, has_model = METHODS[method]
    check_that(
        model or not has_model, option, f"the method {method} needs a model; name it as `model`"
    )
    known = [key for key in KEYS if kind == "prompt_lookup" or "{}" not in KEYS[key]]
    for key in given:
        check_known(key, known, option, f"{key} has no counterpart here, so leave it out", "keys")
    settings = [f"{KEYS[key].format(kind)}={json.dumps(value)}" for key, value in given.items()]
    return f"{kind}={model}" if has_model else kind, settings


def keys_file(api_keys: Sequence[str]) -> str:
    """Return what `access.keys_file` holds for clients that have one of these keys."""
    keys = {f"key{number}": {"sha256": digest_of(key)} for number, key in enumerate(api_keys, 1)}
    return json.dumps({"keys": keys})
