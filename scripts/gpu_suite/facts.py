"""What a machine has, by the standard library alone: driver, links, compiler, limits, disks.

A fact that cannot be had is None. Sizes are in bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from . import paths

SECONDS_MAX = 20
# Attributes of cuDeviceGetAttribute: the two parts of the compute capability.
CAPABILITY_ATTRIBUTES = (75, 76)
NAME_BYTES = 256
VARIABLES = ("DORMOUSE_", "PYTORCH_", "CUDA_")
GPU_FIELDS = {
    "driver": "driver_version",
    "link_generation": "pcie.link.gen.gpucurrent",
    "link_generation_max": "pcie.link.gen.max",
    "link_width": "pcie.link.width.current",
    "link_width_max": "pcie.link.width.max",
    "power_limit_watts": "power.limit",
}


def driver() -> dict:
    """What libcuda.so.1 says: its CUDA version; name, capability and memory of its first GPU."""
    found = dict.fromkeys(("cuda", "name", "capability", "total_bytes"))
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return found | {"why": f"no NVIDIA driver: {error}"}
    number, total = ctypes.c_int(), ctypes.c_size_t()
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda"] = [number.value // 1000, number.value % 1000 // 10]
    status = library.cuInit(0)
    if status:
        return found | {"why": f"cuInit returned {status}"}
    status = library.cuDeviceGet(ctypes.byref(number), 0)
    if status:
        return found | {"why": f"the driver has no GPU for us: cuDeviceGet returned {status}"}
    device, name = number.value, ctypes.create_string_buffer(NAME_BYTES)
    if library.cuDeviceGetName(name, NAME_BYTES, device) == 0:
        found["name"] = name.value.decode(errors="replace")
    if library.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0:
        found["total_bytes"] = total.value
    found["capability"] = [
        number.value
        for attribute in CAPABILITY_ATTRIBUTES
        if library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0
    ]
    return found | {"why": None}


def system_management() -> dict:
    """What nvidia-smi says of the first GPU."""
    fields = ",".join(GPU_FIELDS.values())
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    return dict(zip(GPU_FIELDS, fields_of(said(command)), strict=True))


def fields_of(line: str | None) -> list[str | None]:
    """The fields of nvidia-smi's line; what it does not know is None."""
    known = [each.strip() for each in (line or "").split(",")]
    if len(known) != len(GPU_FIELDS):
        return [None] * len(GPU_FIELDS)
    return [None if each.startswith("[") or not each else each for each in known]


def compiler() -> str | None:
    """The C compiler that Triton and torch.compile call."""
    name = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc", "clang")), None)
    return said([name, "--version"]) if name else None


def variables(environment: dict[str, str]) -> dict[str, str]:
    """The settings in the environment that change what is measured."""
    named = sorted(name for name in environment if name.startswith(VARIABLES))
    return {name: environment[name] for name in named}


def locked_memory_limit() -> int | None:
    """Limit of locked memory; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk(folder: Path) -> int | None:
    """Bytes that this user may write below ``folder``, which need not exist yet."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), None)
    return shutil.disk_usage(there).free if there else None


def gather(folders: dict[str, Path]) -> dict:
    """All facts. ``folders``: whose disks count, by name."""
    return {
        "driver": driver() | system_management(),
        "compiler": compiler(),
        "sanitizer": str(paths.compute_sanitizer() or "") or None,
        "variables": variables(dict(os.environ)),
        "cores": len(os.sched_getaffinity(0)),
        "locked_memory_limit_bytes": locked_memory_limit(),
        "free_disk_bytes": {name: free_disk(folder) for name, folder in folders.items()},
    }


def said(command: list[str]) -> str | None:
    """The first line that a command prints."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return None


def major_minor(text: str) -> list[int] | None:
    """``12.8.93`` → ``[12, 8]``."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return [int(found[1]), int(found[2])] if found else None


def dotted(version: list[int] | None) -> str | None:
    """``[12, 8]`` → ``12.8``; None for what is unknown."""
    return ".".join(map(str, version)) if version else None
