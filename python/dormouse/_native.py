"""Binds libdormouse.so with ctypes: the functions of ``dormouse.h``, and the names of :mod:`._structs`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_ssize_t,
    c_uint32,
    c_uint64,
    c_ulonglong,
    c_void_p,
)
from pathlib import Path

from ._structs import *  # noqa: F403: callers name the whole header by this module
from .errors import DormouseError, InternalError, from_status

_PTR = c_void_p
_OUT = POINTER(c_void_p)

# Argument types of every function that returns a status.
_PROTOTYPES = {
    "param_get": [c_uint32, POINTER(Param)],
    "runtime_create": [POINTER(Options), _OUT],
    "runtime_destroy": [_PTR],
    "runtime_get_info": [_PTR, POINTER(Info)],
    "runtime_get_stats": [_PTR, c_uint64, POINTER(Stats)],
    "runtime_trim": [_PTR, POINTER(c_uint64)],
    "runtime_set_budget": [_PTR, c_int32, c_uint64],
    "runtime_dump": [_PTR, c_int32, c_char_p],
    "runtime_write_dump": [_PTR, c_char_p, c_uint64, POINTER(c_uint64)],
    "mem_query": [_PTR, _PTR, POINTER(MemInfo)],
    "mem_read": [_PTR, _PTR, c_uint64, _PTR, _PTR],
    "tag_create": [_PTR, c_char_p, c_uint64, _OUT],
    "tag_destroy": [_PTR],
    "tag_enter": [_PTR],
    "tag_leave": [_PTR],
    "tag_add": [_PTR, _PTR, c_uint64],
    "tag_sleep": [_PTR, c_int32, _PTR],
    "tag_wake": [_PTR, _PTR],
    "forest_create": [POINTER(Sequences), _OUT],
    "forest_destroy": [_PTR],
    "forest_add": [_PTR, _PTR, c_uint32, c_uint64, c_uint64, POINTER(c_uint32)],
    "forest_get_info": [
        _PTR,
        POINTER(ForestInfo),
        POINTER(ForestNode),
        c_uint64,
        POINTER(Ending),
        c_uint64,
    ],
    "forest_get_json": [_PTR, c_char_p, c_uint64, POINTER(c_uint64)],
    "plan_create": [_PTR, POINTER(PlanOptions), _OUT],
    "plan_load": [c_char_p, _OUT],
    "plan_get_nodes": [_PTR, POINTER(PlanNode), c_uint64, POINTER(c_uint64)],
    "log_read": [c_char_p, c_uint64, POINTER(c_uint64)],
    "schedule_query": [c_char_p, c_char_p, c_uint64, POINTER(c_uint64)],
    "plan_destroy": [_PTR],
    "plan_get_op": [_PTR, POINTER(Op)],
    "plan_complete_op": [_PTR, c_uint64],
    "plan_predict": [_PTR, POINTER(Prediction)],
    "plan_get_json": [_PTR, c_char_p, c_uint64, POINTER(c_uint64)],
    "prefix_create": [_PTR, _PTR, c_uint32, c_uint32, _OUT],
    "prefix_destroy": [_PTR],
    "prefix_enter_phase": [_PTR, c_int32, _PTR],
    "prefix_mark_edge": [_PTR, c_int32, c_uint32, _PTR],
    "prefix_add_dormant": [_PTR, c_uint32, POINTER(c_uint64), c_uint64],
    "prefix_add_boundary": [
        *(_PTR, c_uint32, c_uint32, _PTR, c_uint64, c_uint64, c_int32, _PTR),
        _OUT,
    ],
    "prefix_accumulate": [_PTR, c_uint32, c_uint32, _PTR, c_uint64, c_int32, _PTR],
    "kernel_merge_lse": [POINTER(MergeArgs), _PTR],
    "prefix_get_report": [_PTR, POINTER(PrefixReport), c_char_p, c_uint64, POINTER(c_uint64)],
    "stash_put": [_PTR, _PTR, c_uint64, c_uint64, _PTR, POINTER(c_uint64)],
    "stash_get": [_PTR, c_uint64, _PTR, _PTR],
    "stash_drop": [_PTR, c_uint64],
    "torch_get_stats": [c_int32, POINTER(Stats), POINTER(Block), c_uint64, POINTER(c_uint64)],
    "history_create": [POINTER(HistoryOptions), _OUT],
    "history_destroy": [_PTR],
    "history_digest": [POINTER(Tokens), POINTER(Digest)],
    "history_record": [_PTR, POINTER(Rollout), c_uint64, POINTER(c_uint64)],
    "history_draft": [_PTR, POINTER(Draft), c_uint64],
    "history_feedback": [_PTR, POINTER(Draft), c_uint64],
    "history_save": [_PTR],
    "history_release": [_PTR, c_uint64],
    "history_get_stats": [_PTR, POINTER(HistoryStats)],
    "history_get_failure": [_PTR, c_char_p, c_uint64, POINTER(c_uint64)],
    "dialogue_create": [POINTER(DialogueOptions), _OUT],
    "dialogue_destroy": [_PTR],
    "dialogue_record": [_PTR, POINTER(Turn), c_uint64, POINTER(c_uint64)],
    "dialogue_retrieve": [_PTR, POINTER(Query), POINTER(Found), c_uint64, POINTER(c_uint64)],
    "dialogue_retrieve_texts": [
        *[_PTR, POINTER(Query), POINTER(Found), POINTER(c_uint64), c_uint64, POINTER(c_uint64)],
        *[c_void_p, c_uint64, POINTER(c_uint64)],
    ],
    "dialogue_get_text": [_PTR, c_uint64, c_int32, c_char_p, c_uint64, POINTER(c_uint64)],
    "dialogue_get_stats": [_PTR, POINTER(DialogueStats)],
    "dialogue_get_torn": [_PTR, c_char_p, c_uint64, POINTER(c_uint64)],
    "torch_record_history": [c_uint64, c_uint32, c_int, c_int],
    "torch_get_history": [
        *(c_int32, c_int32, POINTER(MemoryHistory)),
        *(POINTER(Range), c_uint64, POINTER(MemoryEvent), c_uint64),
    ],
    "torch_get_frames": [POINTER(Frame), c_uint64, POINTER(c_uint64)],
    "torch_get_tag_name": [c_int32, c_uint32, c_char_p, c_uint64, POINTER(c_uint64)],
}

# Functions that torch calls by address: result and argument types. None of them returns a status.
_TORCH_PROTOTYPES = {
    "torch_malloc": (_PTR, [c_ssize_t, c_int32, _PTR]),
    "torch_get_out_of_memory_construction": (c_int, []),
    "torch_pool_malloc": (_PTR, [c_ssize_t, c_int32, _PTR]),
    "torch_free": (None, [_PTR, c_size_t, c_int32, _PTR]),
    "torch_pool_free": (None, [_PTR, c_size_t, c_int32, _PTR]),
    "torch_record_stream": (None, [_PTR, _PTR]),
    "torch_empty_cache": (None, []),
    "torch_set_memory_fraction": (None, [c_double, c_int32]),
    "torch_get_memory_fraction": (c_double, [c_int32]),
    "torch_get_base": (_PTR, [_PTR, POINTER(c_size_t)]),
    "torch_get_pool_id": (None, [_PTR, POINTER(c_ulonglong), POINTER(c_ulonglong)]),
    "torch_set_graph_hooks": (None, [c_int]),
    "torch_set_profiled": (c_int, [c_int]),
    "torch_begin_pool": (None, [c_int, c_ulonglong, c_ulonglong, _PTR]),
    "torch_end_pool": (None, [c_int, c_ulonglong, c_ulonglong]),
    "torch_release_pool": (None, [c_int, c_ulonglong, c_ulonglong]),
    "torch_set_metadata": (None, [c_uint32]),
    "torch_annotate": (None, [_PTR, c_uint32]),
    "torch_set_out_of_memory_observer": (None, [_PTR]),
}


def library_path() -> Path:
    """Returns the path of libdormouse.so: ``DORMOUSE_LIB``, next to this package, or
    ``target/release``."""
    named = os.environ.get("DORMOUSE_LIB")
    here = Path(__file__).resolve().parent
    places = (
        [Path(named)]
        if named
        else [here / "libdormouse.so", here.parents[1] / "target" / "release" / "libdormouse.so"]
    )
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        "libdormouse.so not found at " + " or ".join(map(str, places)) + "; "
        "build it with `make lib` or set DORMOUSE_LIB to its path"
    )


def preload_path() -> Path:
    """Returns the path of libdormouse_preload.so, which is next to libdormouse.so."""
    return library_path().with_name("libdormouse_preload.so")


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the loaded library with its prototypes."""
    lib = ctypes.CDLL(str(library_path()))
    lib.dormouse_get_version.restype = c_uint32
    lib.dormouse_get_status_string.restype = c_char_p
    lib.dormouse_get_status_string.argtypes = [c_int32]
    lib.dormouse_get_last_error.restype = c_char_p
    for name, arguments in _PROTOTYPES.items():
        function = getattr(lib, f"dormouse_{name}")
        function.restype = c_int32
        function.argtypes = arguments
    for name, (result, arguments) in _TORCH_PROTOTYPES.items():
        function = getattr(lib, f"dormouse_{name}")
        function.restype = result
        function.argtypes = arguments
    return lib


def address_of(name: str) -> int:
    """Returns the address of ``dormouse_<name>``."""
    return ctypes.cast(getattr(library(), f"dormouse_{name}"), c_void_p).value


# Arguments that ctypes would truncate silently.
_INTEGERS = (c_int32, c_uint32, c_uint64, c_void_p)


def call(name: str, *arguments) -> int:
    """Calls ``dormouse_<name>``; raises on an error, returns ``OK`` or a positive notice."""
    for at, (kind, value) in enumerate(zip(_PROTOTYPES[name], arguments, strict=True)):
        if kind in _INTEGERS and isinstance(value, int) and (kind(value).value or 0) != value:
            said = f"argument {at} of dormouse_{name} is {value}; accepted: {limits(kind)}"
            raise refused(said)
    return check(getattr(library(), f"dormouse_{name}")(*arguments))


def check(status: int) -> int:
    """Returns ``status``; raises with this thread's last error message if it is an error."""
    if status < 0:
        raise from_status(status, last_error() or status_string(status))
    return status


def text(name: str, value: str | os.PathLike) -> bytes:
    """Encodes a name or path for C. Raises :class:`dormouse.ArgumentError` if it contains NUL."""
    encoded = os.fsencode(value)
    if b"\0" in encoded:
        raise refused(f"{name} is {value!r}; accepted: text without NUL")
    return encoded


def array_of(kind: type, name: str, values: Sequence[int]) -> ctypes.Array:
    """Converts values to a C array. Raises :class:`dormouse.ArgumentError` for values out of
    range."""
    values = values.tolist() if hasattr(values, "tolist") else values
    array = (kind * len(values))(*values)
    for at, (kept, value) in enumerate(zip(array, values, strict=True)):
        if kept != value:
            said = f"{name} has {value} at {at}; accepted: {limits(kind)}"
            raise refused(said)
    return array


def last_error() -> str:
    """Returns this thread's last error message."""
    return library().dormouse_get_last_error().decode("utf-8", "replace")


def status_string(status: int) -> str:
    """Returns the static text of a status."""
    return library().dormouse_get_status_string(status).decode("utf-8", "replace")


def create(owner, name: str, *arguments) -> None:
    """Calls a ``_create`` function with ``owner._handle``.

    The owner has the handle before the call, so an interrupt (Ctrl-C) closes what was created.
    """
    owner._handle = c_void_p()
    try:
        call(name, *arguments, ctypes.byref(owner._handle))
        if not owner._handle.value:
            raise InternalError(f"dormouse_{name} succeeded without a handle")
    except BaseException:
        # A kept traceback keeps the owner alive, so its collection may never happen.
        with contextlib.suppress(DormouseError):
            owner.close()
        raise
