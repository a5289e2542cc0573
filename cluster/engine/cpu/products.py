"""What multiplies weights in groups of few bits on this processor."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.cpp import AVX2, AVX512, PRODUCTS, VARIABLE, cpu_flags, mode
from cluster.errors import ConfigError

_VNNI = AVX512 | {"avx512_vnni"}
# The flags of processors that can; any processor can by C.
_NEEDED: Mapping[str, frozenset[str]] = {
    "amx-int8": _VNNI | {"amx_tile", "amx_int8"},
    "avx512-vnni": _VNNI,
    "avx-vnni": AVX2 | {"avx_vnni"},
    "avx2": AVX2,
    "dotprod": frozenset({"asimddp"}),
    "c": frozenset(),
}


def products_here() -> tuple[str, ...]:
    """Return the names in `PRODUCTS` of what this processor has, the fastest first; the one alone
    that `mode` names.  Raises ConfigError for one that this processor has not."""
    wanted = mode()
    able = tuple(name for name in PRODUCTS if _NEEDED[name] <= cpu_flags())
    if wanted not in PRODUCTS:
        return able
    if wanted not in able:
        raise ConfigError.at(VARIABLE, f"this processor has no {wanted}; it has {', '.join(able)}")
    return (wanted,)
