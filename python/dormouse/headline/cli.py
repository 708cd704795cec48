"""``python -m dormouse.headline grid | frontier | small | arithmetic``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from . import arithmetic, bars, expected, machine, shapes
from .time_budget import TimeBudget
from .rows import emit, row

DONE, UNFINISHED, CANNOT_RUN = 0, 1, 2

SECONDS = 580.0
# With fewer the head outweighs what is measured.
LAYERS_MIN = 8


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
    parser.add_argument("--host-bytes", type=int, help="host tier (default: most of what is free)")
    parser.add_argument("--device-bytes", type=int, default=0, help="our budget (default: all)")
    parser.add_argument("--nvme-dir", help="directory of the file tier (default: none)")
    parser.add_argument("--nvme-bytes", type=int, default=0, help="bytes of its file")
    parser.add_argument("--layers", type=int, help="of the model (default: as many as fit)")
    parser.add_argument(
        "--microbatch-tokens", type=int, help="response rows of a microbatch (default: 4096)"
    )
    options = parser.parse_args(arguments)
    geometry = shapes.TINY if options.tiny else shapes.LLAMA3_8B
    if options.layers is not None:
        if not 1 < options.layers <= geometry.layers:
            parser.error(f"--layers {options.layers}; accepted: 2 to {geometry.layers}")
        geometry = replace(geometry, layers=options.layers)
    if options.microbatch_tokens is not None:
        if options.microbatch_tokens < 1:
            parser.error(f"--microbatch-tokens {options.microbatch_tokens}; accepted: at least 1")
        geometry = replace(geometry, microbatch_tokens=options.microbatch_tokens)
    why = machine.host_refused(options.host_bytes or 0)
    return COMMANDS[options.command](options, geometry) if why is None else _cannot(why)


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
    geometry, why = _fitting(options, geometry)
    if why is not None:
        return _cannot(why)
    budget = TimeBudget(options.seconds, geometry.name)
    with _pair(options, geometry) as pair:
        return DONE if Grid(pair, geometry, budget).run(options.cells) else UNFINISHED


def _fitting(options, geometry: shapes.Geometry) -> tuple[shapes.Geometry, str | None]:
    """Returns the model with as many layers as the first cell fits here, and says how many."""
    memory = machine.gpu_bytes()
    if options.tiny or options.layers or options.device == "cpu" or memory is None:
        return geometry, None
    cell, host_bytes = options.cells[0], _host_bytes(options)
    layers = arithmetic.layers_that_fit(geometry, cell, memory, host_bytes)
    how = (
        f"of {geometry.layers}; {cell} in {memory / 1e9:.1f} GB of GPU memory and a host tier of "
        f"{host_bytes / 1e9:.1f} GB"
    )
    emit("row", row("layers of the model", "layers", layers, how=how))
    if layers < LAYERS_MIN:
        return geometry, f"{layers} layers fit, {how}; accepted: at least {LAYERS_MIN}"
    return replace(geometry, layers=layers), None


def _frontier(options, geometry: shapes.Geometry) -> int:
    from .frontier import Frontier

    why = _no_device(options.device)
    if options.device == "cpu":
        why = "a CPU's memory is shared with the whole machine: no limit to find"
    if why is not None:
        return _cannot(why)
    tiers = _host_bytes(options) + options.nvme_bytes
    budget = TimeBudget(options.seconds, geometry.name)
    with _pair(options, geometry) as pair:
        return DONE if Frontier(pair, geometry, budget, tiers).run() else UNFINISHED


def _small(options, geometry: shapes.Geometry) -> int:
    import torch

    from .small import Small

    why = _no_device(options.device)
    if why is not None:
        return _cannot(why)
    Small(torch.device(options.device), _runtime(options)).run()
    return DONE


def _arithmetic(options, geometry: shapes.Geometry) -> int:
    """Prints Markdown tables: the eager cells, and page sizes for the first of them."""
    print(f"{geometry.name}: {arithmetic.parameters(geometry) / 1e9:.2f} × 10⁹ parameters")
    cells = [cell for cell in options.cells if cell.way == shapes.EAGER]
    figures = [expected.cell_table(geometry, cell) for cell in cells]
    _print_table(
        [{"P/S": c.lengths, "N": c.responses} | f for c, f in zip(cells, figures, strict=True)]
    )
    for cell in cells[:1]:
        print(f"\nPages, {cell}:")
        _print_table(expected.page_table(geometry, cell))
        for rows in (geometry.microbatch_tokens, geometry.microbatch_tokens // 2):
            for kernel in expected.ATTENTION_FLOPS:
                found = expected.whole_step(
                    geometry, cell, kernel, bars.STEP_PEAK_CUT_MIN_PERCENT, rows
                )
                print(f"\nWhole-step peak, microbatches of {rows} rows, {kernel}: {found}")
        late = {
            kernel: expected.late_copies_s(geometry, cell, kernel)
            for kernel in expected.ATTENTION_FLOPS
        }
        print(f"\nCopies of C that must begin before it, s: {late}")
    return DONE


def _print_table(rows: list[dict]) -> None:
    for index, row in enumerate(rows):
        if index == 0:
            print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
        cells = (f"{each:.2f}" if isinstance(each, float) else str(each) for each in row.values())
        print("| " + " | ".join(cells) + " |")


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
    return {name: value for name, value in asked.items() if value is not None}


def _host_bytes(options) -> int:
    return machine.host_budget_bytes() if options.host_bytes is None else options.host_bytes
