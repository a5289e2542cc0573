"""Checks a manifest as the API server would: schemas, and rules in the expression language CEL."""

from collections.abc import Iterator, Mapping
from typing import Any

import cel
import jsonschema
import kubernetes_validate


def strict_schema(definition: Mapping[str, Any], version: str = "v1") -> dict[str, Any]:
    """Return the JSON schema of one version of a CustomResourceDefinition, closed against unknown
    keys.

    The API server prunes unknown keys in silence; here they are errors.
    """
    (found,) = (item for item in definition["spec"]["versions"] if item["name"] == version)
    return _closed(found["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return result
    result["properties"] = {name: _closed(value) for name, value in properties.items()}
    if not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    # The API server fills defaults in before it looks for what is required.
    if isinstance(schema.get("required"), list):
        result["required"] = [
            name for name in schema["required"] if "default" not in properties.get(name, {})
        ]
    return result


def schema_problems(manifest: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return every deviation, as `path: what is wrong`."""
    validator = jsonschema.Draft202012Validator(schema)
    return [_told(error) for error in validator.iter_errors(manifest)]


def _told(error: jsonschema.ValidationError) -> str:
    return f"{error.json_path}: {error.message}"


def core_problems(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with an object of Kubernetes' own kinds; unknown keys are."""
    version = kubernetes_validate.latest_version()
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [_told(error)]
    return []


def rule_problems(manifest: Any, schema: Mapping[str, Any], path: str = "$") -> Iterator[str]:
    """Yield the rules of a schema (`x-kubernetes-validations`) that do not hold.

    Rules about a change, which name oldSelf, have nothing to say of a new object.
    """
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not cel.evaluate(rule["rule"], {"self": manifest}):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(manifest, Mapping):
        others = schema.get("additionalProperties") or {}
        for key, value in manifest.items():
            below = schema.get("properties", {}).get(key, others)
            yield from rule_problems(value, below, f"{path}.{key}")
    if isinstance(manifest, list):
        for position, item in enumerate(manifest):
            yield from rule_problems(item, schema.get("items", {}), f"{path}[{position}]")
