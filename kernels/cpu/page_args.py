"""Arguments of the operators on KV pages, laid out as in ``native/abi.hpp``."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

from sdk.kernels.kv.tiers import MAX_TIERS


class PageSide(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "scales")),
        *((name, c_int64) for name in ("page", "head", "step", "scale_page", "scale_row")),
        *((name, c_int32) for name in ("type", "group", "mixed")),
    ]


class PageLevel(Structure):
    _fields_ = [(name, PageSide) for name in ("keys", "values")]


class RopeArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "slots", "key_centre")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "v_norm", "positions", "q_turned")),
        ("pages", PageLevel),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head")),
        *((name, c_int64) for name in ("v_token", "v_head", "cos_token", "sin_token")),
        *((name, c_int64) for name in ("turned_token", "turned_head")),
        *((name, c_int64) for name in ("num_pages", "length", "shift")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "half", "page_size")),
        *((name, c_int32) for name in ("value_dim", "norm_after")),
        *((name, c_float) for name in ("eps", "beta")),
    ]


class AttentionArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out")),
        ("levels", PageLevel * MAX_TIERS),
        *((name, c_void_p) for name in ("query_start", "context_len", "page_table")),
        *((name, c_void_p) for name in ("sinks", "slopes", "biases", "ahead")),
        ("shared", c_void_p),
        *((name, c_int64) for name in ("q_token", "q_head", "table_width")),
        *((name, c_int64) for name in ("num_pages", "tokens", "window")),
        *((name, c_int32) for name in ("requests", "heads", "kv_heads", "head_dim", "page_size")),
        ("num_levels", c_int32),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("query_tile", "split_blocks", "both_ways", "reach")),
        *((name, c_int32) for name in ("chunked", "value_dim", "latent", "looks_ahead", "rounded")),
    ]


class RecodeArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("source", "target")),
        *((name, c_int64) for name in ("page", "to_page")),
        *((name, c_int32) for name in ("kv_heads", "head_dim", "page_size")),
    ]
