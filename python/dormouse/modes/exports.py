"""Which symbols torch exports for its out-of-memory error and for its profiler.

libdormouse throws ``c10::OutOfMemoryError`` through what the loaded torch exports, which differs by
version. ``scripts/check-torch-exports`` compares :data:`VERSIONS` and :data:`PROFILER` with wheels of
torch.
"""

from __future__ import annotations

import torch

from .. import _native as native

_ARGUMENTS = "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_MAKE_OWN = f"_ZN3c1016OutOfMemoryErrorC1{_ARGUMENTS}"
_MAKE_BASE = f"_ZN3c105ErrorC1{_ARGUMENTS}"
_TYPE, _TABLE = "_ZTIN3c1016OutOfMemoryErrorE", "_ZTVN3c1016OutOfMemoryErrorE"

# Constructions as ``dormouse_torch_get_out_of_memory_construction`` numbers them.
RUNTIME_ERROR, OWN, BASE = 0, 1, 2

# The symbols that each construction requires, by library.
SYMBOLS = {
    OWN: {"libc10.so": {_MAKE_OWN, _TYPE}},
    BASE: {"libc10.so": {_MAKE_BASE}, "libc10_cuda.so": {_TYPE, _TABLE}},
}

# What reports memory to the profiler, in every version of the table.
PROFILER = {
    "libc10.so": {
        "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE",
    }
}

# The construction of each version, checked against its wheel; of 2.15 against an installed one.
VERSIONS = {"2.11": BASE, "2.12": BASE, "2.13": OWN, "2.14": OWN, "2.15": OWN}


def version() -> str:
    """Returns the loaded torch's version, ``major.minor``."""
    return ".".join(torch.__version__.split(".")[:2])


def notice() -> list[str]:
    """Returns a sentence if the loaded torch differs from :data:`VERSIONS`, else nothing."""
    found = native.library().dormouse_torch_get_out_of_memory_construction()
    if found == RUNTIME_ERROR:
        return [
            f"torch {torch.__version__} exports no known constructor of its out-of-memory error: "
            "out-of-memory is a RuntimeError whose text begins with 'CUDA out of memory'; "
            f"known versions: {', '.join(VERSIONS)}"
        ]
    if version() not in VERSIONS:
        return [
            f"torch {torch.__version__} is unknown: its out-of-memory error is thrown by the "
            f"symbols that it exports; known versions: {', '.join(VERSIONS)}"
        ]
    return []
