"""The constants, enumerations and structs of ``dormouse.h``, for ctypes.

``python/tests/test_native.py`` compiles the header and compares every size and offset below.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass

from .errors import DormouseError, from_status

STRUCT_VERSION = 1
NAME_BYTES = 64
TEXT_BYTES = 512

OK, DECLINED, PARTIAL, END = 0, 2, 3, 4
ERR_ARGUMENT, ERR_BUSY = -102, -502

DEVICES = {"host": 1, "cuda": 2}
FORMATS = {"pftrace": 1, "html": 2}
MERGE_ON_GPU = 4
STATS_RESET_PEAKS = 1
STATS_BEGIN_INTERVAL = 2
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
TAG_WITHOUT_BACKUP = 1
PLAN_LAST_LAYER_DEAD = 1
PLAN_ALWAYS_SHARE = 2
PLAN_RUNTIME_RESIDENCY = 4
SEQUENCES_GROW = 1
OP_WITHOUT_GRAPH = 1
NODE_NONE = 0xFFFFFFFF

TIERS = ("device", "host", "nvme")
ROLES = ("none", "boundary", "boundary_grad", "dormant", "tagged")
POOLS = ("small_pool", "large_pool")
COPIES = ("device_to_host", "host_to_device", "nvme_write", "nvme_read")
MODES = {"linked": 1, "preload": 2}
TIER_FLAGS = {"host": 1, "nvme": 2, "nvme_buffered": 4}
STATES = (
    *("awake", "falling_asleep", "host", "spilling", "nvme", "loading", "waking", "empty"),
    "promoting",
)
# Of a history's events and of mapped ranges: ``DORMOUSE_ACTION_*``, ``DORMOUSE_USE_*`` by number.
ACTIONS = (
    *("allocated", "freed", "free_requested", "free_completed", "mapped", "unmapped"),
    *("fell_asleep", "awoke", "out_of_memory", "read", "annotated"),
)
USES = ("free", "allocated", "pending_free")
RESIDENCIES = ("none", "keep", "sleep", "recompute")


class Phase(enum.IntEnum):
    """``DORMOUSE_PHASE_*``"""

    A = 1
    B = 2
    C = 3


class Edge(enum.IntEnum):
    """``DORMOUSE_EDGE_*``"""

    FORWARD_BEGIN = 1
    FORWARD_END = 2
    BACKWARD_BEGIN = 3
    BACKWARD_END = 4


class OpKind(enum.IntEnum):
    """``DORMOUSE_OP_*``"""

    PREFIX_FORWARD = 1
    MICROBATCH = 2
    PREFIX_BACKWARD = 3
    DONE = 4
    FORWARD_AGAIN = 5


@dataclass(frozen=True)
class ModelShape:
    """A model's shape. ``dormouse_model_t`` documents the fields."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int
    layer_linear_weights: int
    kv_linear_weights: int
    last_layer_prefix_weights: int
    head_weights: int
    saved_bytes_per_token_layer: int


class _Plain(ctypes.Structure):
    """A struct that refuses values out of range, which ctypes alone truncates."""

    def __init__(self, **values):
        super().__init__(**values)
        for name, value in values.items():
            if hasattr(value, "__index__") and (getattr(self, name) or 0) != value:
                accepted = limits(dict(self._fields_)[name])
                raise refused(f"{name} is {value}; accepted: {accepted}")


def refused(sentence: str) -> DormouseError:
    """Returns the exception for an argument that is not accepted."""
    return from_status(ERR_ARGUMENT, sentence)


def limits(kind: type) -> str:
    """Returns the range of an integer type of ctypes."""
    bits = 8 * ctypes.sizeof(kind)
    is_signed = kind(-1).value == -1
    return (
        f"{-(1 << bits - 1)} to {(1 << bits - 1) - 1}" if is_signed else f"0 to {(1 << bits) - 1}"
    )


class _Struct(_Plain):
    """A struct that begins with size and version, which are set."""

    def __init__(self, **values):
        super().__init__(size=ctypes.sizeof(type(self)), version=STRUCT_VERSION, **values)

    def text(self, name: str) -> str:
        """Returns a char-array field as text."""
        return getattr(self, name).decode("utf-8", "replace")


def _versioned(*fields):
    return [("size", c_uint32), ("version", c_uint32), *fields]


def _all(kind, *names):
    return [(name, kind) for name in names]


class Options(_Struct):
    """``dormouse_options_t``"""

    _fields_ = _versioned(
        *_all(c_int32, "device_kind", "device_ordinal"),
        *_all(c_uint64, "alloc_budget_bytes", "host_budget_bytes"),
        ("nvme_dir", c_char_p),
        *_all(c_uint64, "nvme_file_bytes", "inflight_bytes"),
        *_all(c_uint32, "io_threads", "window_layers"),
        ("checksum", c_int32),
        ("reserved", c_uint32),
    )


class Info(_Struct):
    """``dormouse_info_t``"""

    _fields_ = _versioned(
        *_all(c_int32, "device_kind", "device_ordinal"),
        *_all(
            c_uint64,
            "page_bytes",
            "modes",
            "tier_flags",
            "instance_id",
            "alloc_budget_bytes",
            "host_budget_bytes",
            "nvme_file_bytes",
            "heap_min_bytes",
            "nvme_write_bytes_per_s",
            "nvme_read_bytes_per_s",
        ),
        *_all(c_uint32, "window_layers", "reserved"),
        ("unavailable_reason", c_char * TEXT_BYTES),
    )


class Gauge(ctypes.Structure):
    """``dormouse_gauge_t``"""

    _fields_ = _all(c_uint64, "current_bytes", "peak_bytes", "count")


class Amount(ctypes.Structure):
    """``dormouse_amount_t``"""

    _fields_ = _all(c_uint64, "current", "peak", "added_total")


class Copies(ctypes.Structure):
    """``dormouse_copies_t``"""

    _fields_ = _all(c_uint64, "count", "bytes")


class PoolFigures(ctypes.Structure):
    """``dormouse_pool_t``"""

    _fields_ = _all(
        c_uint64,
        *("allocated_bytes", "active_bytes", "requested_bytes", "mapped_bytes"),
        *("inactive_split_bytes", "allocations", "active_blocks", "segments", "inactive_splits"),
    )


class Stats(_Struct):
    """``dormouse_stats_t``"""

    _fields_ = _versioned(
        *_all(Gauge, "allocated", "requested", "mapped", "cached", "asleep"),
        ("tiers", Gauge * len(TIERS)),
        ("roles", Gauge * len(ROLES)),
        ("copies", Copies * len(COPIES)),
        *_all(c_uint64, "stall_ns", "alloc_retries", "alloc_failures", "declined"),
        *_all(c_uint64, "nvme_written_bytes", "nvme_write_budget_bytes", "nvme_write_left_bytes"),
        *_all(Gauge, "active", "inactive_split"),
        ("stray_wakes", c_uint64),
        *_all(Amount, "allocations", "segments"),
        *_all(c_uint64, "allocated_total_bytes", "active_total_bytes", "requested_total_bytes"),
        *_all(c_uint64, "mapped_total_bytes", "inactive_split_total_bytes"),
        *_all(c_uint64, "map_calls", "unmap_calls", "stream_waits"),
        *_all(c_uint64, "allocated_interval_peak_bytes"),
        ("pools", PoolFigures * len(POOLS)),
    )


class MemInfo(_Struct):
    """``dormouse_mem_info_t``"""

    _fields_ = _versioned(
        ("base", c_void_p),
        *_all(c_uint64, "bytes", "requested_bytes"),
        *_all(c_int32, "state", "tier", "role", "layer"),
        ("name", c_char * NAME_BYTES),
    )


class Param(_Struct):
    """``dormouse_param_t``"""

    _fields_ = _versioned(
        *_all(c_char_p, "name", "kind", "built_in", "accepts", "help"),
        ("provenance", c_int32),
        ("reserved", c_uint32),
        ("value", c_char * TEXT_BYTES),
        ("reason", c_char * TEXT_BYTES),
    )


class Model(_Struct):
    """``dormouse_model_t``"""

    _fields_ = _versioned(
        *_all(c_uint32, "layers", "heads", "kv_heads", "head_dim", "dtype_bytes", "reserved"),
        *_all(
            c_uint64,
            "layer_linear_weights",
            "kv_linear_weights",
            "last_layer_prefix_weights",
            "head_weights",
            "saved_bytes_per_token_layer",
        ),
    )


class Machine(_Struct):
    """``dormouse_machine_t``"""

    _fields_ = _versioned(
        *_all(c_uint64, "flops_per_s", "device_bytes", "sleep_bytes_per_s", "wake_bytes_per_s"),
        *_all(
            c_uint64,
            "host_bytes",
            "nvme_write_bytes_per_s",
            "nvme_read_bytes_per_s",
            "link_bytes_per_s",
            "op_overhead_ns",
            "prefix_attention_flops_per_s",
            "causal_attention_flops_per_s",
        ),
    )


class Block(ctypes.Structure):
    """``dormouse_block_t``"""

    _fields_ = [
        ("base", c_void_p),
        *_all(c_uint64, "bytes", "requested_bytes"),
        ("stream", c_void_p),
        ("state", c_int32),
        ("reserved", c_uint32),
    ]


class MergeArgs(_Struct):
    """``dormouse_merge_args_t``"""

    _fields_ = _versioned(
        *_all(c_void_p, "out1", "lse1", "out2", "lse2", "out", "lse"),
        *_all(c_uint64, "rows", "head_dim"),
        ("dtype", c_int32),
        ("reserved", c_uint32),
        ("flags", c_uint64),
    )


class MemoryHistory(_Struct):
    """``dormouse_memory_history_t``"""

    _fields_ = _versioned(
        *_all(c_uint64, "range_count", "event_count", "recorded_count", "events_max")
    )


class Range(ctypes.Structure):
    """``dormouse_range_t``"""

    _fields_ = [
        *_all(c_uint64, "address", "bytes", "requested_bytes", "stream", "scope"),
        *_all(c_uint64, "pool_first", "pool_second"),
        ("usage", c_int32),
        *_all(c_uint32, "segment", "tag", "stack", "metadata", "is_small"),
    ]


class MemoryEvent(ctypes.Structure):
    """``dormouse_memory_event_t``"""

    _fields_ = [
        *_all(c_uint64, "unix_ns", "address", "bytes", "stream", "scope"),
        *_all(c_uint64, "pool_first", "pool_second"),
        ("action", c_int32),
        *_all(c_uint32, "tag", "stack", "metadata"),
    ]


class Frame(ctypes.Structure):
    """``dormouse_frame_t``"""

    _fields_ = [("code", c_void_p), ("offset", c_int32), ("caller", c_uint32)]


class Member(ctypes.Structure):
    """``dormouse_member_t``"""

    _fields_ = [
        *_all(c_uint32, "sequence", "node"),
        *_all(c_uint64, "row_begin", "row_end", "first_position", "token_begin", "token_end"),
        ("weight", c_double),
    ]


class Score(ctypes.Structure):
    """``dormouse_score_t``"""

    _fields_ = [
        *_all(c_uint32, "sequence", "reserved"),
        *_all(c_uint64, "row_begin", "row_end", "first_label"),
        ("weight", c_double),
    ]


class Op(_Struct):
    """``dormouse_op_t``"""

    _fields_ = _versioned(
        ("id", c_uint64),
        ("kind", c_int32),
        ("node", c_uint32),
        *_all(c_uint64, "token_begin", "token_end"),
        ("members", POINTER(Member)),
        *_all(c_uint32, "member_count", "last", "wake_window_layers", "reserved"),
        ("flags", c_uint64),
        ("scores", POINTER(Score)),
        ("score_count", c_uint64),
        ("reads", c_uint32),
        ("residency", c_int32),
        *_all(c_uint32, "asleep", "waking"),
        *_all(c_uint64, "device_bytes", "host_bytes"),
    )


class Prediction(_Struct):
    """``dormouse_prediction_t``"""

    _fields_ = _versioned(
        *_all(c_double, "flops_dense", "flops_shared", "speedup", "token_ratio"),
        ("peak_bytes", c_uint64 * 3),
        ("sleep_bytes", c_uint64),
        *_all(c_uint32, "pays", "reserved"),
        ("reason", c_char * TEXT_BYTES),
        *_all(c_double, "seconds_dense", "seconds_shared", "sleep_stall_s", "wake_stall_s"),
        ("residency_gap", c_double),
        ("recomputed_rows", c_uint64),
        ("device_bytes", c_uint64 * 3),
        ("host_bytes", c_uint64 * 3),
    )


class Span(ctypes.Structure):
    """``dormouse_span_t``"""

    _fields_ = _all(c_uint64, "begin", "end")


class Ending(_Plain):
    """``dormouse_ending_t``"""

    _fields_ = [*_all(c_uint32, "node", "reserved"), ("tokens", c_uint64)]


class Sequences(_Struct):
    """``dormouse_sequences_t``"""

    _fields_ = _versioned(
        *_all(c_void_p, "ids", "offsets", "kinds"),
        ("sequence_count", c_uint64),
        *_all(c_uint32, "id_bytes", "vocab"),
        *_all(c_void_p, "parents", "lengths", "endings"),
        *_all(c_uint64, "node_count", "flags"),
    )


class ForestInfo(_Struct):
    """``dormouse_forest_info_t``"""

    _fields_ = _versioned(
        *_all(c_uint64, "sequences", "nodes", "roots", "leaves", "tree_tokens", "dense_tokens"),
        ("compression", c_double),
    )


class ForestNode(ctypes.Structure):
    """``dormouse_forest_node_t``"""

    _fields_ = [
        *_all(c_uint32, "parent", "subtree_end", "sequence", "reserved"),
        *_all(c_uint64, "token_begin", "token_end"),
    ]


class PlanNode(ctypes.Structure):
    """``dormouse_plan_node_t``"""

    _fields_ = [
        *_all(c_uint32, "parent", "subtree_end", "sequence", "origin"),
        *_all(c_uint64, "row_begin", "row_end"),
        ("residency", c_int32),
        ("reserved", c_uint32),
    ]


class PlanOptions(_Struct):
    """``dormouse_plan_options_t``"""

    _fields_ = _versioned(
        ("sequence_count", c_uint64),
        *_all(c_void_p, "loss_from", "span_offsets", "spans", "weights"),
        *_all(c_uint32, "vocab", "microbatch_rows"),
        ("block_rows", c_uint64),
        *_all(c_uint32, "wake_window_layers", "reserved"),
        *_all(c_uint64, "flags", "device_bytes", "host_bytes"),
        ("model", POINTER(Model)),
        ("machine", POINTER(Machine)),
    )


class PrefixReport(_Struct):
    """``dormouse_prefix_report_t``"""

    _fields_ = _versioned(
        *_all(
            c_uint64, "dormant_bytes", "boundary_bytes", "asleep_bytes_peak", "asleep_at_b_bytes"
        ),
        ("tier_bytes_peak", c_uint64 * len(TIERS)),
        *_all(
            c_uint64,
            "written_bytes",
            "read_bytes",
            "write_bytes_per_s",
            "read_bytes_per_s",
            "stall_ns",
            "stall_bound_ns",
        ),
        ("phase_peak_bytes", c_uint64 * len(Phase)),
        *_all(c_uint64, "left_asleep_bytes", "accepted_count", "refused_count"),
        ("peak_phase", c_int32),
        ("reserved", c_uint32),
        ("declined", c_char * TEXT_BYTES),
        *_all(c_uint32, "is_planned", "reserved_planned"),
        ("planned_bytes", c_uint64 * len(TIERS)),
        ("planned_stall_ns", c_uint64),
        ("stray_wakes", c_uint64),
        ("first_stray", c_char * TEXT_BYTES),
    )


class HistoryOptions(_Struct):
    """``dormouse_history_options_t``"""

    _fields_ = _versioned(
        *_all(c_uint32, "vocab", "epochs_kept"),
        ("budget_bytes", c_uint64),
        ("weighing", c_int32),
        ("reserved", c_uint32),
        ("dir", c_char_p),
        ("cold_bytes", c_uint64),
    )


class Tokens(_Plain):
    """``dormouse_tokens_t``"""

    _fields_ = [("ids", c_void_p), ("count", c_uint64), *_all(c_uint32, "id_bytes", "reserved")]


class Rollout(_Plain):
    """``dormouse_rollout_t``"""

    _fields_ = [
        *_all(Tokens, "prompt", "response"),
        ("reward", c_float),
        ("epoch", c_uint32),
    ]


class Digest(_Plain):
    """``dormouse_digest_t``"""

    _fields_ = _all(c_uint64, "low", "high")


class Draft(_Plain):
    """``dormouse_draft_t``"""

    _fields_ = [
        ("prompt", Digest),
        ("end", Tokens),
        ("ids", c_void_p),
        *_all(c_uint32, "capacity", "window_tokens", "count", "matched_tokens"),
        *_all(c_uint32, "accepted", "reserved"),
    ]


class HistoryStats(_Struct):
    """``dormouse_history_stats_t``"""

    _fields_ = _versioned(
        *_all(c_uint64, "prompts", "tokens", "bytes", "cold_prompts", "cold_bytes"),
        *_all(c_uint64, "forgotten_prompts", "drafted_tokens", "accepted_tokens"),
    )


class DialogueOptions(_Struct):
    """``dormouse_dialogue_options_t``"""

    _fields_ = _versioned(
        ("dimension", c_uint32),
        ("alpha", c_float),
        *_all(c_uint64, "entries_max", "scanned_entries"),
        ("decay_s", c_double),
        ("dir", c_char_p),
        *_all(c_uint32, "unsynced", "reserved"),
    )


class Bytes(_Plain):
    """``dormouse_bytes_t``"""

    _fields_ = [("bytes", c_void_p), ("count", c_uint64)]


class Turn(_Plain):
    """``dormouse_turn_t``"""

    _fields_ = [
        ("embedding", c_void_p),
        ("dimension", c_uint64),
        *_all(Bytes, "query", "passage", "response"),
        ("time_s", c_double),
    ]


class Query(_Plain):
    """``dormouse_query_t``"""

    _fields_ = [
        ("embedding", c_void_p),
        ("dimension", c_uint64),
        ("now_s", c_double),
        ("entries_max", c_uint32),
        ("kind", c_int32),
    ]


class Found(_Plain):
    """``dormouse_found_t``"""

    _fields_ = [
        ("id", c_uint64),
        ("time_s", c_double),
        *_all(c_float, "weight", "relevance", "recency"),
        ("reserved", c_uint32),
    ]


class DialogueStats(_Struct):
    """``dormouse_dialogue_stats_t``"""

    _fields_ = _versioned(
        *_all(c_uint64, "entries", "forgotten_entries", "categories", "summaries", "log_bytes"),
    )


STRUCTS = {
    "options": Options,
    "info": Info,
    "gauge": Gauge,
    "copies": Copies,
    "stats": Stats,
    "mem_info": MemInfo,
    "block": Block,
    "memory_history": MemoryHistory,
    "range": Range,
    "memory_event": MemoryEvent,
    "frame": Frame,
    "param": Param,
    "model": Model,
    "machine": Machine,
    "member": Member,
    "score": Score,
    "op": Op,
    "prediction": Prediction,
    "span": Span,
    "ending": Ending,
    "sequences": Sequences,
    "forest_info": ForestInfo,
    "forest_node": ForestNode,
    "plan_node": PlanNode,
    "plan_options": PlanOptions,
    "prefix_report": PrefixReport,
    "history_options": HistoryOptions,
    "tokens": Tokens,
    "rollout": Rollout,
    "digest": Digest,
    "draft": Draft,
    "history_stats": HistoryStats,
    "dialogue_options": DialogueOptions,
    "bytes": Bytes,
    "turn": Turn,
    "query": Query,
    "found": Found,
    "dialogue_stats": DialogueStats,
}
