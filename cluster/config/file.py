"""Reads an ordinary Ray Serve config file, strictly, with overrides from the command line.

Serve itself ignores keys it does not know; here every key of the outer file is checked as well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config.api import HttpConfig
from cluster.config.live import changed
from cluster.config.parse import parse, unknown_key
from cluster.config.rules import check_ports, check_rules
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.models.names import served_name

# The keys of Ray Serve's ServeDeploySchema and ServeApplicationSchema that we let through.
_SERVE_KEYS = ("proxy_location", "http_options", "grpc_options", "logging_config", "applications")
_HTTP_KEYS = ("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s")
_GRPC_KEYS = ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection")
_APPLICATION_KEYS = (
    "name",
    "route_prefix",
    "import_path",
    "runtime_env",
    "args",
    "deployments",
    "logging_config",
    "external_scaler_enabled",
    "autoscaling_policy",
)

# The deployment that may be changed while it runs, and the keys of Serve's DeploymentSchema that
# are let through: all else of it is ours, in args.
TARGET = "target"
_DEPLOYMENT_KEYS = ("name", "user_config")

_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A checked file.

    document: the Serve config as plain data, overrides applied.  user_config: the target's, which
    `config` contains.
    """

    path: Path
    document: Mapping[str, Any]
    config: Config
    user_config: Mapping[str, Any] | None = None


def load(path: str | Path, overrides: Sequence[str] = ()) -> ServeFile:
    """Read `path` and apply overrides of the form `target.engine.dtype=float32`.

    All keys are below applications[0].args; but where `http.listener` or `grpc.listener` is serve,
    host and port are those of Serve's own http_options and grpc_options.  Values are YAML.  Raises
    ConfigError with file and key path.
    """
    path = Path(path)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from error
    try:
        return _checked(path, document, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def parse_arguments(arguments: Mapping[str, Any]) -> Config:
    """The `args` of the application, as Serve hands them to `deployments.app:build`."""
    config = _named(parse(Config, arguments))
    check_rules(config)
    if config.http.listener == "ingress":
        check_ports(config)
    return config


def _named(config: Config) -> Config:
    name = config.model_name or served_name(config.target.engine.model)
    return dataclasses.replace(config, model_name=name)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; an operator who wrote both wants to know."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != _MERGE_TAG:
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What the parser says in a paragraph, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"not valid YAML: {error}"
    problem = getattr(error, "problem", None) or "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {problem}; correct it"


def _checked(path: Path, document: Any, overrides: Sequence[str]) -> ServeFile:
    document = copy.deepcopy(document)
    if not isinstance(document, dict):
        what = "is empty" if document is None else "is not a mapping"
        raise ConfigError(f"the file {what}; see configs/own-model.yaml for the form")
    _check_keys(document, _SERVE_KEYS, "")
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1:
        raise ConfigError("applications: exactly one application is expected", param="applications")
    application = applications[0]
    _check_keys(application, _APPLICATION_KEYS, "applications[0]")
    http = _section(document, "http_options")
    grpc = _section(document, "grpc_options")
    arguments = _section(application, "args")
    for override in overrides:
        _override(http, grpc, arguments, override)
    _check_keys(http, _HTTP_KEYS, "http_options")
    _check_keys(grpc, _GRPC_KEYS, "grpc_options")
    config = _named(parse(Config, arguments))
    if config.http.listener == "serve":
        config = _http_by_proxy(config, http, document)
    else:
        _refuse_proxies(document, application, config)
    if config.grpc.listener == "serve":
        config = _grpc_by_proxy(config, grpc)
    elif grpc:
        raise ConfigError(
            "grpc_options: Ray Serve's gRPC proxy listens on all interfaces; remove them, and the "
            "ingress listens at grpc.host, or set grpc.listener: serve",
            param="grpc_options",
        )
    check_rules(config)
    check_ports(config)
    user_config = _user_config(application)
    where = "applications[0].deployments[0].user_config"
    return ServeFile(path, document, changed(config, user_config, where), user_config)


def _user_config(application: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The target's, None where it has none."""
    path = "applications[0].deployments"
    deployments = application.get("deployments") or []
    if not isinstance(deployments, list) or len(deployments) > 1:
        raise ConfigError(f"{path}: a list of one deployment is expected", param=path)
    for deployment in deployments:
        _check_keys(deployment, _DEPLOYMENT_KEYS, f"{path}[0]")
        if deployment.get("name") != TARGET:
            raise ConfigError(
                f"{path}[0].name: {deployment.get('name')!r}; only {TARGET} has a user_config",
                param=f"{path}[0].name",
            )
        found: Mapping[str, Any] | None = deployment.get("user_config")
        return found
    return None


def _refuse_proxies(
    document: Mapping[str, Any], application: Mapping[str, Any], config: Config
) -> None:
    """Where the ingress itself listens, keys of Serve's proxies would have no effect."""
    if document["http_options"]:
        raise ConfigError(
            "http_options: the ingress listens at http.host and http.port below "
            "applications[0].args; move them there, or set http.listener: serve",
            param="http_options",
        )
    if config.grpc.listener == "serve":
        raise ConfigError(
            "grpc.listener: serve starts Ray Serve's proxies, which take HTTP as well; set "
            "http.listener: serve, too, or grpc.listener: ingress",
            param="grpc.listener",
        )
    if document.get("proxy_location", "Disabled") != "Disabled":
        raise ConfigError(
            f"proxy_location: {document['proxy_location']!r}; no proxy is needed where the ingress "
            "listens: set it to Disabled, or set http.listener: serve",
            param="proxy_location",
        )
    if (application.get("route_prefix") or "/") != "/":
        raise ConfigError(
            f"applications[0].route_prefix: {application['route_prefix']!r}; where the ingress "
            "listens there is no other application: remove it, or set http.listener: serve",
            param="applications[0].route_prefix",
        )


def _http_by_proxy(config: Config, http: dict[str, Any], document: Mapping[str, Any]) -> Config:
    """`config` with host and port of Serve's own section."""
    if document.get("proxy_location") == "Disabled":
        raise ConfigError(
            "proxy_location: Disabled starts no proxy, so nobody would listen for HTTP; remove it, "
            "or set http.listener: ingress",
            param="proxy_location",
        )
    default = HttpConfig()
    if (config.http.host, config.http.port) != (default.host, default.port):
        raise ConfigError(
            "http: with listener: serve host and port are set in http_options, Ray Serve's own "
            "key; remove both",
            param="http",
        )
    found = parse(HttpConfig, {k: http[k] for k in ("host", "port") if k in http}, "http")
    http["host"], http["port"] = found.host, found.port
    return dataclasses.replace(config, http=dataclasses.replace(found, listener="serve"))


def _grpc_by_proxy(config: Config, grpc: dict[str, Any]) -> Config:
    """`config` with the port of Serve's own section, which must be complete."""
    if not grpc.get("grpc_servicer_functions"):
        raise ConfigError(
            "grpc.listener: serve needs grpc_options.grpc_servicer_functions; see "
            "configs/two-node.yaml, or set it to ingress",
            param="grpc.listener",
        )
    default = type(config.grpc)()
    if (config.grpc.host, config.grpc.port) != (default.host, default.port):
        raise ConfigError(
            "grpc: with listener: serve the port is set in grpc_options, Ray Serve's own key, and "
            "the host cannot be chosen; remove both",
            param="grpc",
        )
    port = parse(type(config.grpc), {k: grpc[k] for k in ("port",) if k in grpc}, "grpc").port
    grpc["port"] = port
    return dataclasses.replace(
        config, grpc=dataclasses.replace(config.grpc, host="0.0.0.0", port=port)
    )


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping `parent[name]`, created where it is absent or left empty."""
    if parent.get(name) is None:
        parent[name] = {}
    section = parent[name]
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: {section!r} is not a mapping", param=name)
    return section


def _check_keys(mapping: Any, known: Sequence[str], path: str) -> None:
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path or 'the file'}: {mapping!r} is not a mapping", param=path)
    for key in mapping:
        if key not in known:
            raise unknown_key(str(key), known, f"{path}.{key}" if path else str(key))


def _override(
    http: dict[str, Any], grpc: dict[str, Any], arguments: dict[str, Any], override: str
) -> None:
    """Set the one key that `override` names, in a section of Serve's or in our arguments."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    node = arguments
    for name, section in (("http", http), ("grpc", grpc)):
        own = arguments.get(name)
        serve_listens = isinstance(own, dict) and own.get("listener") == "serve"
        if parts[0] == name and serve_listens and parts[1:2] != ["listener"]:
            node, parts = section, parts[1:]
            break
    if not separator or not parts or not all(parts):
        raise ConfigError(f"--set {override!r}: expected key.path=value", param=key)
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {part} is not a mapping", param=key)
    try:
        node[parts[-1]] = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML", param=key) from error
