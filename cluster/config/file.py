"""Reads an ordinary Ray Serve config file, strictly, with overrides from the command line.

Serve itself ignores keys it does not know; here every key of the outer file is checked as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.config.applications import is_pool, is_shared, with_deployments, with_pool
from cluster.config.parse import check_keys, is_text, mapping, parse
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.models.names import served_name
from cluster.records import frozen

# The keys of Ray Serve's own schemas that we let through, by the place where they stand.
_SERVE_KEYS: Mapping[str, Sequence[str]] = {
    "": ("proxy_location", "http_options", "grpc_options", "logging_config", "applications"),
    "http_options": ("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s"),
    "grpc_options": ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"),
    "applications": (
        "name",
        "route_prefix",
        "import_path",
        "runtime_env",
        "args",
        "deployments",
        "logging_config",
        "external_scaler_enabled",
        "autoscaling_policy",
    ),
}

# The keys of an endpoint's section that stand in Serve's own one where its proxies listen; the
# one for gRPC listens on all interfaces.
_PROXY_ADDRESS = {"http": ("host", "port"), "grpc": ("port",)}

_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"
# YAML 1.1, which PyYAML and Ray Serve read, has octal, binary and sexagesimal numbers, 1.2 has not;
# and no number here is infinite.
_READ_IN_TWO_WAYS = re.compile(r"[:_]|^[-+]?0[0-9b]|inf|nan", re.IGNORECASE)


@frozen
class ServeFile:
    """A checked file.

    document: the Serve config as plain data, overrides applied.  deployments: what it says of
    single ones, by their names; `config` contains their user_configs.
    """

    path: Path
    document: Mapping[str, Any]
    config: Config
    deployments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def applications(self) -> list[Mapping[str, Any]]:
        """The target's application, and that of drafters alone where there is one."""
        return sorted(self.document["applications"], key=is_pool)


def load(path: str | Path, overrides: Sequence[str] = ()) -> ServeFile:
    """Read `path` and apply overrides of the form `target.engine.dtype=float32`.

    All keys are below applications[0].args; but where `http.listener` or `grpc.listener` is serve,
    host and port are those of Serve's own http_options and grpc_options.  Values are YAML, but for
    those of keys that have a text: it is taken as it stands, unless it is in quotes.  Raises
    ConfigError with file and key path.
    """
    path = Path(path)
    with in_file(path):
        return _checked(path, read_document(path), overrides)


def from_document(place: str, document: dict[str, Any], overrides: Sequence[str] = ()) -> ServeFile:
    """Check what a file would contain, where there is none.

    place: what errors name instead.  document: is changed by the overrides."""
    path = Path(place)
    with in_file(path):
        return _checked(path, document, overrides)


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Inside, errors name the configuration file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def parse_arguments(arguments: Mapping[str, Any]) -> Config:
    """The `args` of the application, as Serve hands them to `deployments.app:build`."""
    config = _named(parse(Config, arguments))
    config.check()
    if config.http.listener == "ingress":
        config.check_ports()
    return config


def _named(config: Config) -> Config:
    return replace(config, model_name=config.model_name or served_name(config.target.engine.model))


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML reads as another thing than people do: `no` and 12:30 as keys are False
    and 750, 0100 is 64, and of two equal keys the last one counts."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in (_TEXT_TAG, _MERGE_TAG):
                raise _refused(key, "is not a text to YAML, and keys are texts; put it in quotes")
            if key.value in seen:
                raise _refused(key, "stands twice as a key; remove one")
            seen.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        is_number = node.tag.endswith((":int", ":float")) and _READ_IN_TWO_WAYS.search(node.value)
        if is_number or node.tag.endswith(":timestamp"):
            raise _refused(
                node,
                "is another value to YAML than it seems; put it in quotes, or "
                "write a number in decimal digits",
            )
        return node


def _refused(node: yaml.Node, reason: str) -> ConfigError:
    mark = node.start_mark
    what = node.value if isinstance(node, yaml.ScalarNode) else "this key"
    return ConfigError(f"line {mark.line + 1}, column {mark.column + 1}: {what} {reason}")


def _loaded(text: str) -> Any:
    """Read a YAML text; raises ConfigError with the place in it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ConfigError(f"not valid YAML: {error}") from error
        problem = getattr(error, "problem", None) or "it cannot be read"
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{place}: not valid YAML: {problem}; correct it") from error


def read_document(path: Path, example: str = "configs/own-model.yaml") -> dict[str, Any]:
    """Read the mapping in a YAML file.  example: where its form is shown.

    Raises ConfigError, without the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    document = _loaded(text)
    if not isinstance(document, dict):
        what = "is empty" if document is None else "is not a mapping"
        raise ConfigError(f"the file {what}; see {example} for the form")
    return document


def _checked(path: Path, document: dict[str, Any], overrides: Sequence[str]) -> ServeFile:
    check_keys(document, _SERVE_KEYS[""], "")
    applications = _applications(document)
    options = {
        name: dict(mapping(document.get(name), name)) for name in ("http_options", "grpc_options")
    }
    document |= {"applications": list(applications.values()), **options}
    in_order = sorted(applications.items(), key=lambda each: is_pool(each[1]))
    for override in overrides:
        _override(document, [application["args"] for _, application in in_order], override)
    for place, application in applications.items():
        check_keys(application, _SERVE_KEYS["applications"], place)
    for place, section in options.items():
        check_keys(section, _SERVE_KEYS[place], place)
    (place, application), *pools = in_order
    _check_proxies(document, application)
    config = _named(parse(Config, _with_addresses(application["args"], document)))
    if config.http.listener == "serve":  # an IPv6 address may have had brackets
        document["http_options"]["host"] = config.http.host
    config.check()
    config.check_ports()
    config, deployments = with_deployments(config, application, place)
    for place, pool in pools:
        config, more = with_pool(config, pool, place)
        deployments |= more
    if config.elsewhere:
        name, where = next(iter(config.elsewhere.items()))
        reason = f"there is no application {where!r} in this file"
        raise ConfigError.at(f"drafters.{name}.placement.application", reason)
    return ServeFile(path, document, config, deployments)


def _applications(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of the file's applications, with their arguments, by the place of each."""
    listed = document.get("applications", [])
    if not isinstance(listed, list) or not 1 <= len(listed) <= 2:
        raise ConfigError.at("applications", "one application is expected, or two")
    found: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(listed):
        place = f"applications[{number}]"
        found[place] = dict(mapping(each, place))
        found[place]["args"] = dict(mapping(found[place].get("args"), f"{place}.args"))
    if sum(map(is_pool, found.values())) != len(found) - 1:
        raise ConfigError.at(
            "applications",
            "one has import_path deployments.app:build, a second one deployments.app:build_pool",
        )
    return found


def _served(arguments: Mapping[str, Any]) -> list[str]:
    """The sections of endpoints where Serve's proxies listen."""
    sections = {face: arguments.get(face) for face in _PROXY_ADDRESS}
    return [
        face
        for face, section in sections.items()
        if isinstance(section, dict) and section.get("listener") == "serve"
    ]


def _override(
    document: Mapping[str, Any], arguments: Sequence[dict[str, Any]], override: str
) -> None:
    """Set the one key that `override` names, in a section of Serve's or in our arguments.

    arguments: of every application, the target's first."""
    key, separator, text = map(str.strip, override.partition("="))
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override!r}: expected key.path=value", param=key)
    try:
        is_as_it_stands = is_text(Config, parts) and not text.startswith(("'", '"'))
        value = text if is_as_it_stands else _loaded(text)
    except ConfigError as error:
        raise ConfigError(f"--set {override!r}: {error.message}", param=key) from error
    if parts[0] in _served(arguments[0]) and parts[1:2] != ["listener"]:
        _set(document[f"{parts[0]}_options"], parts[1:], value, override)
        return
    for node in _places(arguments, parts):
        _set(node, parts, value, override)


def _places(arguments: Sequence[dict[str, Any]], parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the arguments of those applications that a key is for."""
    of_target, *of_pools = arguments
    if parts[0] == "drafters":
        own = [each for each in of_pools if parts[1:] and parts[1] in (each.get("drafters") or {})]
        return own or [of_target]
    return [of_target, *(each for each in of_pools if is_shared(".".join(parts)))]


def _set(node: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    if not parts:
        raise ConfigError(f"--set {override!r}: expected key.path=value", param=override)
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            reason = f"--set {override!r}: {part} is not a mapping"
            raise ConfigError(reason, param=override.partition("=")[0])
    node[parts[-1]] = value


def _check_proxies(document: Mapping[str, Any], application: Mapping[str, Any]) -> None:
    """Raise ConfigError unless it is said once who listens, and at which address."""
    served = _served(application["args"])
    location, prefix = document.get("proxy_location"), application.get("route_prefix")
    of_proxies = {
        "http_options": ("http", document["http_options"]),
        "proxy_location": ("http", location not in (None, "Disabled") and location),
        "applications[0].route_prefix": ("http", prefix not in (None, "/") and prefix),
        "grpc_options": ("grpc", document["grpc_options"]),
    }
    for key, (face, value) in of_proxies.items():
        if value and face not in served:
            raise ConfigError.at(
                key,
                f"{value!r} is for Ray Serve's proxies, and here the ingress listens, at "
                f"{face}.host and {face}.port below applications[0].args; remove it, or set "
                f"{face}.listener: serve",
            )
    for face in served:
        section, default = application["args"][face], getattr(Config(), face)
        addresses = (section.get(key, getattr(default, key)) for key in ("host", "port"))
        if tuple(addresses) != (default.host, default.port):
            raise ConfigError.at(
                face,
                f"with listener: serve the address is set in {face}_options, Ray Serve's own key; "
                "remove host and port",
            )
    if served == ["grpc"]:
        raise ConfigError.at(
            "grpc.listener",
            "serve starts Ray Serve's proxies, which take HTTP as well; set http.listener: serve, "
            "too, or grpc.listener: ingress",
        )
    if served and location == "Disabled":
        raise ConfigError.at(
            "proxy_location",
            "Disabled starts no proxy, so nobody would listen for HTTP; remove it, or set "
            "http.listener: ingress",
        )
    if "grpc" in served and not document["grpc_options"].get("grpc_servicer_functions"):
        raise ConfigError.at(
            "grpc.listener",
            "serve needs grpc_options.grpc_servicer_functions; see configs/two-node.yaml, or set "
            "it to ingress",
        )


def _with_addresses(arguments: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with the addresses of Serve's proxies, which stand in its own sections.

    Defaults are written into those.
    """
    result = dict(arguments)
    for face in _served(arguments):
        options, default = document[f"{face}_options"], getattr(Config(), face)
        for key in _PROXY_ADDRESS[face]:
            options.setdefault(key, getattr(default, key))
        address = {key: options[key] for key in _PROXY_ADDRESS[face]}
        result[face] = {**arguments[face], "host": "0.0.0.0", **address}
    return result
