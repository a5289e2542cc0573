"""Fields, kinds of elements and paths of other servers that this one has not: unserved.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from deployments.ingress.api.wording import Rule, Status

_TEXT = Path(__file__).with_suffix(".yaml").read_text("utf-8")
_FIELDS, KINDS_ELSEWHERE, UNSERVED = yaml.safe_load_all(_TEXT)


def unserved(body: type) -> Iterator[Rule]:
    """The fields that this body has elsewhere, without those of its bases."""
    for name, (status, note, *harmless) in _FIELDS.get(body.__name__, {}).items():
        yield Rule(name, note, {}, False, Status[status.upper()], (None, *harmless))


def reason_of(path: str) -> str:
    """Return why a path is not served, "" for one that no server has."""
    for version in ("/v1", "/v2"):
        path = path.removeprefix(version)
    for beginning in sorted(UNSERVED, key=len, reverse=True):
        if path == beginning or path.startswith(f"{beginning}/"):
            what, remedy = UNSERVED[beginning]
            return f"{what}: not served here; {remedy}"
    return ""
