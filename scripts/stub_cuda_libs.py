"""Lets a torch built for GPUs load on a machine without its GPU libraries.

The torch wheel of the package index links about ten NVIDIA libraries (about 4 GB). A CPU run calls
none of them, but the loader requires each by name, with the symbols and symbol versions torch was
linked against. This script creates a stub for each missing one next to torch's own libraries, where
torch looks first. Every function in them returns 1, an error code in each of these APIs.

It also removes the GPU packages from torch's list of requirements, so that later installations do
not bring them in. Run it with the interpreter that has torch. Idempotent.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

# Which undefined symbols belong to which library: torch's libraries say what they need by name
# and do not say from whom.
SYMBOLS = {
    "libcublas": r"cublas(?!Lt)",
    "libcublasLt": r"cublasLt",
    "libcudart": r"(cuda[A-Z]|__cuda)",
    "libcudnn": r"cudnn",
    "libcufft": r"cufft",
    "libcufile": r"cuFile",
    "libcupti": r"cupti",
    "libcurand": r"curand",
    "libcusolver": r"cusolver",
    "libcusparse": r"cusparse(?!Lt)",
    "libcusparseLt": r"cusparseLt",
    "libnccl": r"(nccl|pnccl)",
    "libnvrtc": r"nvrtc",
    "libnvshmem_host": r"nvshmem",
}

GPU_REQUIREMENT = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton)", re.IGNORECASE)


@dataclass
class Linkage:
    """What torch's libraries need, lack and define."""

    needed: set[str] = field(default_factory=set)
    undefined: dict[str, str] = field(default_factory=dict)
    """Symbol to version; the version is empty where the symbol has none."""
    defined: set[str] = field(default_factory=set)


def main() -> int:
    site = Path(sysconfig.get_paths()["purelib"])
    directory = site / "torch" / "lib"
    if not directory.is_dir():
        print(f"no torch in {site}", file=sys.stderr)
        return 1
    linkage = read_linkage(sorted(directory.glob("lib*.so")))
    present = {path.name for path in (site / "nvidia").glob("**/lib/*.so*")}
    for name in sorted(linkage.needed):
        stem = name.split(".so")[0]
        if stem in SYMBOLS and name not in present and not (directory / name).exists():
            build_stub(directory / name, symbols_of(stem, linkage))
    for metadata in site.glob("torch-*.dist-info/METADATA"):
        forget_gpu_requirements(metadata)
    return 0


def read_linkage(libraries: list[Path]) -> Linkage:
    """What ``libraries`` need, lack and define, by readelf and nm."""
    linkage = Linkage()
    for library in libraries:
        dynamic = _output("readelf", "--dynamic", "--wide", str(library))
        linkage.needed |= set(re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic))
        for line in _output("nm", "--dynamic", str(library)).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.replace("@@", "@").partition("@")
            if kind == "U":
                linkage.undefined[name] = version or linkage.undefined.get(name, "")
            else:
                linkage.defined.add(name)
    return linkage


def symbols_of(stem: str, linkage: Linkage) -> dict[str, str]:
    """The undefined symbols that library ``stem`` is to provide, each with its version."""
    belongs = re.compile("_?" + SYMBOLS[stem])
    return {
        name: version
        for name, version in sorted(linkage.undefined.items())
        if belongs.match(name) and name not in linkage.defined
    }


def build_stub(path: Path, symbols: dict[str, str]) -> None:
    """Compiles a shared library called ``path.name`` that has ``symbols`` and does nothing."""
    names = list(symbols) or ["dormouse_stub_" + re.sub(r"\W", "_", path.name)]
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    script = version_script(symbols)
    map_path = path.with_name(path.name + ".map")
    try:
        if script:
            map_path.write_text(script)
            flags.append(f"-Wl,--version-script={map_path}")
        command = ["cc", *flags, "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
    finally:
        map_path.unlink(missing_ok=True)


def version_script(symbols: dict[str, str]) -> str:
    """The linker's version script that gives each symbol its version; empty if none has one."""
    versions: dict[str, list[str]] = {}
    for name, version in symbols.items():
        if version:
            versions.setdefault(version, []).append(name)
    return "".join(
        f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()
    )


def forget_gpu_requirements(metadata: Path) -> None:
    """Deletes GPU packages from a wheel's list of requirements."""
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not GPU_REQUIREMENT.match(line)]
    if kept != lines:
        metadata.write_text("".join(kept), encoding="utf-8")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
