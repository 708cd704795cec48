"""Who is compared: how each driver is built and started.

Peers come from the package index as wheels, into ``target/peers``; what is built from them stays
under ``target``. Nothing of theirs is in this repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).resolve().parent / "drivers"
TARGET = ROOT / "target"
STANDIN = TARGET / "standin"
BUILT = TARGET / "bench" / "drivers"
PEERS = TARGET / "peers"
SITE = PEERS / "site"
TORCH = Path(sysconfig.get_paths()["purelib"]) / "torch"

# Pinned: figures of other versions are other figures.
PEER_WHEELS = (
    "librmm-cu13==26.10.0",
    "rapids-logger==0.3.0",
    "nvidia-cuda-runtime==13.2.75",
    "nvidia-cuda-crt==13.2.86",
)
FLAGS = ("-std=c++20", "-O2", "-g", "-Wall", "-pthread")
CUDA_HEADERS = SITE / "nvidia" / "cu13" / "include"
RMM_LIBRARIES = (SITE / "librmm" / "lib64", SITE / "rapids_logger" / "lib64")

# More than any workload needs, so that only its own habits limit a contender, and little enough for
# torch, which reserves more addresses than that per stream. Nothing is behind the addresses
# (STANDIN_CUDA_BACKED=0), so no machine is too small for it.
DEVICE_BYTES = 256 << 30
RUN_SECONDS_MAX = 120


class Unavailable(Exception):
    """A contender that could not be built or run: the reason, for the table."""


@dataclass(frozen=True)
class Contender:
    """One column of the table."""

    name: str
    driver: str
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    budget_variable: str = "STANDIN_CUDA_TOTAL_BYTES"
    """What bounds the device memory it may hold."""

    def command_environment(self, extra: dict[str, str]) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DORMOUSE_", "STANDIN_", "PYTORCH_", "LD_"))
        }
        device = {
            "STANDIN_CUDA_TOTAL_BYTES": str(DEVICE_BYTES),
            "STANDIN_CUDA_BACKED": "0",
        }
        return {**inherited, **device, **self.environment, **extra}

    def path(self) -> Path:
        return BUILT / self.driver


OURS = Contender(
    "ours",
    "ours",
    {"LD_LIBRARY_PATH": f"{TARGET / 'release'}:{STANDIN}"},
    "DORMOUSE_CUDA_BUDGET_BYTES",
)


# Ours with torch's memory history on, without stacks.
OURS_RECORDING = replace(
    OURS, name="ours, recording", environment={**OURS.environment, "OURS_HISTORY_EVENTS": "65536"}
)
# Ours with pages of the driver's granularity alone.
ALONE = {"DORMOUSE_CUDA_PAGE_BYTES": "2MiB", "DORMOUSE_CUDA_LARGE_PAGE_BYTES": "2MiB"}
OURS_ALONE = replace(OURS, name="ours, 2 MiB", environment={**OURS.environment, **ALONE})
# torch's libraries name the directory of the real runtime, so the stand-in has to be first.
TORCH_ENVIRONMENT = {
    "LD_LIBRARY_PATH": f"{STANDIN}:{TORCH / 'lib'}",
    "LD_PRELOAD": str(STANDIN / "libcudart.so.13"),
}
NATIVE = Contender("torch native", "torch", TORCH_ENVIRONMENT)
EXPANDABLE = Contender(
    "torch expandable",
    "torch",
    {**TORCH_ENVIRONMENT, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)
RMM = Contender("rmm pool", "rmm", {"LD_LIBRARY_PATH": ":".join(map(str, RMM_LIBRARIES))})
ALL = (OURS, NATIVE, EXPANDABLE, RMM)


def fetch_peers() -> None:
    """Puts the peers' wheels under ``target/peers``, once per list of versions."""
    stamp = PEERS / "stamp"
    wanted = "\n".join(PEER_WHEELS)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--upgrade",
        "--target",
        str(SITE),
    ]
    output = subprocess.run([*command, *PEER_WHEELS], capture_output=True, text=True)
    if output.returncode != 0:
        raise Unavailable(f"pip could not install it: {output.stderr.strip().splitlines()[-1]}")
    stamp.write_text(wanted)


def build(contender: Contender) -> None:
    """Compiles the contender's driver if it is older than what it is made of."""
    source = DRIVERS / f"{contender.driver}.cpp"
    if contender is not OURS:
        fetch_peers()
    inputs = [source, *DRIVERS.glob("*.h"), ROOT / "ffi" / "include" / "dormouse.h"]
    target = contender.path()
    newest = max(path.stat().st_mtime for path in inputs)
    if target.exists() and target.stat().st_mtime >= newest:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", *FLAGS, *compile_flags(contender.driver), str(source), "-o", str(target)]
    command += [*link_flags(contender.driver), "-ldl"]
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode != 0:
        raise Unavailable(f"{source.name} does not compile: {first_error(output.stderr)}")


def compile_flags(driver: str) -> list[str]:
    if driver == "ours":
        return [f"-I{ROOT / 'ffi' / 'include'}"]
    if driver == "torch":
        return [f"-isystem{TORCH / 'include'}", f"-isystem{CUDA_HEADERS}"]
    headers = (
        SITE / "librmm" / "include" / "rapids",
        SITE / "librmm" / "include",
        SITE / "rapids_logger" / "include",
        CUDA_HEADERS,
    )
    # A release build of RMM does not look at errors of the CUDA runtime.
    return ["-DNDEBUG", *(f"-isystem{path}" for path in headers)]


def link_flags(driver: str) -> list[str]:
    if driver == "ours":
        return [f"-L{TARGET / 'release'}", "-ldormouse"]
    if driver == "torch":
        libraries = [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-lc10_cuda", "-lc10"]
        return [*libraries, "-Wl,--allow-shlib-undefined"]
    directories = [f"-L{path}" for path in RMM_LIBRARIES]
    return [*directories, "-lrmm", "-lrapids_logger"]


def first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line or "undefined" in line]
    return lines[0] if lines else text.strip()[:200]
