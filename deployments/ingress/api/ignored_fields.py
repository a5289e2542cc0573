"""Names the fields of a request that had no effect, to its client and once in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from deployments.ingress.spec import Limits

log = logging.getLogger(__name__)

# What a header may carry of a client's own names.
_MAX_WARNED = 16
_NOT_PRINTED = re.compile(r"[^A-Za-z0-9_.\[\]\-]")
_INDEX = re.compile(r"\[\d+\]")
# So many names have a line of the log: clients may invent any number of them.
_MAX_LOGGED = 1000


def told_names(names: Iterable[str], limits: Limits) -> tuple[str, ...]:
    """One name for the same field of all elements of a list, because conversations are long; those
    that the log does not have yet are written there."""
    found = tuple(dict.fromkeys(_INDEX.sub("[]", name) for name in names))
    for name in found:
        if name not in limits.logged and len(limits.logged) < _MAX_LOGGED:
            limits.logged.add(name)
            log.info("requests have a field without effect: %s", _NOT_PRINTED.sub("?", name))
    return found


def warning_header(ignored: Sequence[str]) -> Mapping[str, str]:
    """The header that says which fields of the request had no effect; none if all had one."""
    if not ignored:
        return {}
    names = [_NOT_PRINTED.sub("?", name) for name in ignored[:_MAX_WARNED]]
    more = len(ignored) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return {"Warning": f'299 drafthouse "fields without effect: {listed}"'}
