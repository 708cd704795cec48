"""``python -m dormouse.headline grid | frontier | small | arithmetic``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import arithmetic, shapes
from .time_budget import TimeBudget
from .rows import emit

DONE, UNFINISHED, CANNOT_RUN = 0, 1, 2

# Share of the machine's memory for sleeping bytes; the rest is for processes and the page cache.
HOST_SHARE = 0.7
SECONDS = 580.0
_CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m dormouse.headline", description=__doc__)
    parser.add_argument("command", nargs="?", default="grid", choices=COMMANDS)
    parser.add_argument(
        "--cells",
        type=_cells,
        default=shapes.by_importance(),
        help="of the grid, as 10k/2k:32:eager,6k/6k; parts from the end may be left out",
    )
    parser.add_argument("--tiny", action="store_true", help="a model that says nothing, quickly")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="(default: %(default)s)")
    parser.add_argument("--host-bytes", type=int, help=f"host tier (default: {HOST_SHARE:.0%})")
    parser.add_argument("--device-bytes", type=int, default=0, help="our budget (default: all)")
    parser.add_argument("--nvme-dir", help="directory of the file tier (default: none)")
    parser.add_argument("--nvme-bytes", type=int, default=0, help="bytes of its file")
    options = parser.parse_args(arguments)
    geometry = shapes.TINY if options.tiny else shapes.LLAMA3_8B
    return COMMANDS[options.command](options, geometry)


def _cells(text: str) -> list[shapes.Cell]:
    try:
        return shapes.choose(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _grid(options, geometry: shapes.Geometry) -> int:
    from .grid import Grid

    why = _no_device(options.device)
    if why is not None:
        return _cannot(why)
    budget = TimeBudget(options.seconds, geometry.name)
    with _pair(options, geometry) as pair:
        return DONE if Grid(pair, geometry, budget).run(options.cells) else UNFINISHED


def _frontier(options, geometry: shapes.Geometry) -> int:
    from ..demo.process import WorkerError
    from .frontier import Frontier

    why = _no_device(options.device)
    if options.device == "cpu":
        why = "a CPU's memory is shared with the whole machine: no limit to find"
    if why is not None:
        return _cannot(why)
    tiers = _host_bytes(options) + options.nvme_bytes
    budget = TimeBudget(options.seconds, geometry.name)
    with _pair(options, geometry) as pair:
        try:
            return DONE if Frontier(pair, geometry, budget, tiers).run() else UNFINISHED
        except WorkerError as error:
            return _cannot(str(error))


def _small(options, geometry: shapes.Geometry) -> int:
    import torch

    from .small import Small

    why = _no_device(options.device)
    if why is not None:
        return _cannot(why)
    Small(torch.device(options.device), _runtime(options)).run()
    return DONE


def _arithmetic(options, geometry: shapes.Geometry) -> int:
    """Prints a Markdown table of the eager cells."""
    print(f"{geometry.name}: {arithmetic.parameters(geometry) / 1e9:.2f} × 10⁹ parameters")
    for index, cell in enumerate(c for c in options.cells if c.way == shapes.EAGER):
        table = arithmetic.cell_table(geometry, cell)
        if index == 0:
            print("| P/S | N | " + " | ".join(table) + " |\n" + "|---" * (len(table) + 2) + "|")
        figures = " | ".join(f"{value:.2f}" for value in table.values())
        print(f"| {cell.lengths} | {cell.responses} | {figures} |")
    return DONE


COMMANDS = {"grid": _grid, "frontier": _frontier, "small": _small, "arithmetic": _arithmetic}


def _no_device(device: str) -> str | None:
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return None
    return "torch finds no GPU"


def _cannot(why: str) -> int:
    emit("cannot_run", why)
    return CANNOT_RUN


def _pair(options, geometry: shapes.Geometry):
    from .pair import Pair

    return Pair(geometry, options.device, _runtime(options))


def _runtime(options) -> dict:
    """Returns the given runtime options; the library chooses the others."""
    asked = {
        "host_budget_bytes": _host_bytes(options),
        "alloc_budget_bytes": options.device_bytes,
        "nvme_dir": options.nvme_dir,
        "nvme_file_bytes": options.nvme_bytes,
    }
    return {name: value for name, value in asked.items() if value}


def _host_bytes(options) -> int:
    if options.host_bytes is not None:
        return options.host_bytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_MAX.read_text().strip() if _CGROUP_MAX.is_file() else "max"
    if limit.isdigit():
        memory = min(memory, int(limit))
    return int(HOST_SHARE * memory)
