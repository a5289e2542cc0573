"""The structures that native calls take, as ctypes has them, beside their names in the C++ sources.

A field that only one side has would shift all that follow it; a test compares their sizes.
"""

from __future__ import annotations

import ctypes

from cluster.engine.draw.native import RankedDraw, fields

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class Weights(ctypes.Structure):
    """operations.h's DecoderLayer."""

    _fields_ = (
        *fields(_POINTER, "input_norm", "post_norm", "query_norm", "key_norm"),
        *fields(_POINTER, "qkv", "out", "gate_up", "down"),
        *fields(_POINTER, "qkv_bias", "out_bias", "gate_up_bias", "down_bias"),
        *fields(_INT64, "size", "num_heads", "num_kv_heads", "head_dim", "inner_size"),
        *fields(_INT32, "qkv_format", "out_format", "gate_up_format", "down_format"),
        *fields(_FLOAT, "input_epsilon", "post_epsilon", "query_epsilon", "key_epsilon"),
        ("scaling", _FLOAT),
        ("is_rotated", _INT32),
    )


class Rows(ctypes.Structure):
    """operations.h's Rows."""

    _fields_ = (
        *fields(_POINTER, "cosines", "sines", "slots"),
        *fields(_POINTER, "path_slots", "row_slots", "row_contexts", "row_paths"),
        *fields(_POINTER, "row_path_lens", "task_rows"),
        *fields(_INT64, "num_rows", "num_seen", "num_tasks"),
        ("scratch", _POINTER),
        ("cache_is_bf16", _INT32),
    )


class GrowingModel(ctypes.Structure):
    """grow.cpp's GrowingModel."""

    _fields_ = (
        *fields(_POINTER, "layers", "caches", "windows"),
        *fields(_POINTER, "embedding", "cosines", "sines", "norm", "output_bias"),
        ("output", _POINTER),
        *fields(_INT64, "num_layers", "size", "head_dim", "output_size"),
        *fields(_INT64, "max_context_len", "row_size"),
        *fields(_INT32, "output_format", "cache_is_bf16", "embedding_is_bf16"),
        ("norm_epsilon", _FLOAT),
    )


class GrowthRules(ctypes.Structure):
    """grow.cpp's Growth: how trees grow, as in `LMOptions`.

    vocab_size: tokens below it are candidates.  kept_share: as `KEPT_SHARE` of
    `cluster.draft.live_tree`.  max_seconds: after so much of a call no pass begins.  interrupted,
    scratch: are the call's own.
    """

    _fields_ = (
        *fields(_INT64, "num_candidates", "num_children", "width", "max_rows"),
        ("vocab_size", _INT64),
        *fields(_DOUBLE, "min_survival", "kept_share", "max_seconds"),
        *fields(_POINTER, "interrupted", "scratch"),
    )


class GrowingTree(ctypes.Structure):
    """grow.cpp's GrowingTree."""

    _fields_ = (
        ("draw", RankedDraw),
        *fields(_DOUBLE, "tau", "coverage"),
        *fields(_INT64, "max_tokens", "min_tokens", "num_stop_tokens"),
        *fields(_POINTER, "stop_tokens", "slots", "delta"),
        *fields(_INT64, "context_len", "num_delta", "max_slots", "num_slots"),
        *fields(_INT64, "num_leaves", "num_nodes", "num_expanded"),
        *fields(_INT64, "num_wanted", "num_best"),
        *fields(_POINTER, "slot_tokens", "slot_parents"),
        *fields(_POINTER, "leaves", "leaf_tokens", "leaf_parents", "leaf_depths"),
        *fields(_POINTER, "leaf_survivals", "best_survivals"),
        *fields(_POINTER, "expanded", "num_children", "children", "survivals"),
        *fields(_POINTER, "token_ids", "scores"),
    )
