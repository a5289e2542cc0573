"""The structures that native calls take, as ctypes has them, beside their names in the C++ sources.

A field that only one side has would shift all that follow it; a test compares their sizes.
"""

from __future__ import annotations

import ctypes

from cluster.engine.draw.native import RankedDraw

_PRODUCT_NAMES = ("qkv", "out", "gate_up", "down")
_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class Weights(ctypes.Structure):
    """operations.h's DecoderLayer."""

    _fields_ = (
        *((f"{name}_norm", _POINTER) for name in ("input", "post", "query", "key")),
        *((name, _POINTER) for name in _PRODUCT_NAMES),
        *((f"{name}_bias", _POINTER) for name in _PRODUCT_NAMES),
        *((name, _INT64) for name in ("size", "num_heads", "num_kv_heads", "head_dim")),
        ("inner_size", _INT64),
        *((f"{name}_format", _INT32) for name in _PRODUCT_NAMES),
        *((f"{name}_epsilon", _FLOAT) for name in ("input", "post", "query", "key")),
        ("scaling", _FLOAT),
        ("is_rotated", _INT32),
    )


class Rows(ctypes.Structure):
    """operations.h's Rows."""

    _fields_ = (
        *((name, _POINTER) for name in ("cosines", "sines", "slots")),
        *((name, _POINTER) for name in ("path_slots", "row_slots", "row_contexts", "row_paths")),
        *((name, _POINTER) for name in ("row_path_lens", "task_rows")),
        *((name, _INT64) for name in ("num_rows", "num_seen", "num_tasks")),
        ("scratch", _POINTER),
        ("cache_is_bf16", _INT32),
    )


class GrowingModel(ctypes.Structure):
    """grow.cpp's GrowingModel."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "caches", "windows")),
        *((name, _POINTER) for name in ("embedding", "cosines", "sines", "norm", "output_bias")),
        ("output", _POINTER),
        *((name, _INT64) for name in ("num_layers", "size", "head_dim", "output_size")),
        *((name, _INT64) for name in ("max_context_len", "row_size")),
        *((name, _INT32) for name in ("output_format", "cache_is_bf16", "embedding_is_bf16")),
        ("norm_epsilon", _FLOAT),
    )


class GrowthRules(ctypes.Structure):
    """grow.cpp's Growth: how trees grow, as in `LMOptions`.

    vocab_size: tokens below it are candidates.  kept_share: as `KEPT_SHARE` of
    `cluster.draft.live_tree`.  max_seconds: after so much of a call no pass begins.  interrupted,
    scratch: are the call's own.
    """

    _fields_ = (
        *((name, _INT64) for name in ("num_candidates", "num_children", "width", "max_rows")),
        ("vocab_size", _INT64),
        *((name, _DOUBLE) for name in ("min_survival", "kept_share", "max_seconds")),
        *((name, _POINTER) for name in ("interrupted", "scratch")),
    )


class GrowingTree(ctypes.Structure):
    """grow.cpp's GrowingTree."""

    _fields_ = (
        ("draw", RankedDraw),
        *((name, _DOUBLE) for name in ("tau", "coverage")),
        *((name, _INT64) for name in ("max_tokens", "min_tokens", "num_stop_tokens")),
        *((name, _POINTER) for name in ("stop_tokens", "slots", "delta")),
        *((name, _INT64) for name in ("context_len", "num_delta", "max_slots", "num_slots")),
        *((name, _INT64) for name in ("num_leaves", "num_nodes", "num_expanded")),
        *((name, _INT64) for name in ("num_wanted", "num_best")),
        *((name, _POINTER) for name in ("slot_tokens", "slot_parents")),
        *((name, _POINTER) for name in ("leaves", "leaf_tokens", "leaf_parents", "leaf_depths")),
        *((name, _POINTER) for name in ("leaf_survivals", "best_survivals")),
        *((name, _POINTER) for name in ("expanded", "num_children", "children", "survivals")),
        *((name, _POINTER) for name in ("token_ids", "scores")),
    )
