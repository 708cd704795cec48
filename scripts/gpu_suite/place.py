"""``python -m gpu_suite.place ROOT NAME=FOLDER...``: what this machine is, and what fits it.

Prints the facts as one detail, figures of them as rows. The suite decides by the facts which parts
cannot run, and says so before it starts any.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path

from . import facts, needs
from .result import DONE
from .rows import row
from .say import say

GIB = 1 << 30
PACKAGES = ("torch", "transformers", "triton", "numpy", "peft", "accelerate", "pytest")


def main(root: str, *folders: str) -> int:
    """Gathers and prints; returns the part's status."""
    named = dict(each.partition("=")[::2] for each in folders)
    found = facts.gather({name: Path(folder) for name, folder in named.items()})
    found["driver_too_old"] = needs.driver_too_old(found["driver"]["cuda"], Path(root))
    found["python"] = platform.python_version()
    found["packages"] = {name: version(name) for name in PACKAGES}
    if found["packages"]["torch"]:
        found |= of_torch()
    say("detail", found)
    for each in figures(found):
        say("row", each)
    return DONE


def version(package: str) -> str | None:
    """The installed version; None where it cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def of_torch() -> dict:
    """What only torch knows, and the sizes that the headline would choose here."""
    import torch

    found = {"torch_cuda": torch.version.cuda, "cudnn": None, "torch_gpu_why": None}
    if not torch.cuda.is_available():
        return found | {"torch_gpu_why": "torch finds no GPU"}
    try:
        found["cudnn"] = torch.backends.cudnn.version()
    except RuntimeError as error:
        found["cudnn"] = f"refused: {str(error).splitlines()[0]}"
    found["gpu_free_bytes"], found["gpu_total_bytes"] = torch.cuda.mem_get_info()
    from dormouse import host_memory
    from dormouse.headline import arithmetic, machine, shapes

    host_bytes = machine.host_budget_bytes()
    found["host_free_bytes"] = host_memory.free_bytes()
    found["host_budget_bytes"] = host_bytes
    found["headline_layers"] = arithmetic.layers_that_fit(
        shapes.LLAMA3_8B, shapes.HEADLINE[0], found["gpu_total_bytes"], host_bytes
    )
    return found


def figures(found: dict) -> list[dict]:
    """The figures that sizes and limits follow from."""
    driver, disks = found["driver"], found["free_disk_bytes"]
    made = [
        ("GPU memory free", "GiB", _gib(found.get("gpu_free_bytes")),
         f"{driver['name']}, driver {driver['driver']}", {"total": _gib(driver["total_bytes"])}),
        ("link width", "lanes", _number(driver["link_width"]), "PCIe, as nvidia-smi says now",
         {"most": _number(driver["link_width_max"]),
          "generation": _number(driver["link_generation"]),
          "most_generation": _number(driver["link_generation_max"])}),
        ("host memory free", "GiB", _gib(found.get("host_free_bytes")),
         "available, within the limits of control groups",
         {"host_tier": _gib(found.get("host_budget_bytes"))}),
        ("locked memory allowed", "GiB", _gib(found["locked_memory_limit_bytes"]),
         "RLIMIT_MEMLOCK; nothing: unlimited", {}),
        *(
            (f"disk free, {name}", "GiB", _gib(free), "for this user", {})
            for name, free in disks.items()
        ),
        ("headline: layers that fit, of 32", "layers", found.get("headline_layers"),
         "10k/2k N=32, by the arithmetic of its peaks; fewer layers where memory is short", {}),
    ]  # fmt: skip
    return [row(name, unit, ours, how=how, **peers) for name, unit, ours, how, peers in made]


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
