"""Rows of the heap alone: growth, sparse blocks, sizes of blocks, forks beside threads."""

from __future__ import annotations

import sys

from pairs import alternate, median_ratio
from rows import LOWER, Makers, Row
from running import BUILT, Libraries, Unavailable, run

# Kind and count of drivers/growth.c, and the bar.
RATIOS = {
    "realloc_growth_over_glibc": ("realloc", 1024, 2.0),
    "calloc_sparse_over_glibc": ("sparse", 200, None),
    "usable_size_over_glibc": ("usable", 5000, None),
}
GROWN_BYTES = 512 << 20
# The old string is live while the new one is filled: tracemalloc counts both.
STRING = f"""
import resource, tracemalloc
def grow():
    text, step = "", "x" * (4 << 20)
    while len(text) < {GROWN_BYTES}:
        text += step
tracemalloc.start()
grow()
live = tracemalloc.get_traced_memory()[1]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / live)
"""


def figure(settings: list[str], *command: str) -> float:
    result = run(list(command), settings)
    if result.status != 0:
        raise Unavailable(f"status {result.status}: {result.errors.strip()[-200:]}")
    return float(result.output)


def heap_makers(libraries: Libraries, pairs: int, forks: int) -> Makers:
    settings, growth = libraries.settings(), str(BUILT / "growth")

    def filled(row: Row, measured) -> list[Row]:
        try:
            measured(row)
        except Unavailable as reason:
            row.note("ours", reason)
        return [row]

    def ratio(name: str) -> list[Row]:
        kind, count, bar = RATIOS[name]

        def measured(row: Row) -> None:
            row.ours = median_ratio(
                alternate(
                    pairs,
                    lambda: figure(settings, growth, kind, str(count)),
                    lambda: figure([], growth, kind, str(count)),
                )
            )

        return filled(Row(name, "ratio", LOWER, f"growth {kind} {count}", bar=bar), measured)

    def grown() -> list[Row]:
        def measured(row: Row) -> None:
            string = (sys.executable, "-c", STRING)
            blocks = (growth, "longer", "512")
            row.ours = max(figure(settings, *string), figure(settings, *blocks))
            row.put("glibc", max(figure([], *string), figure([], *blocks)))

        how = "peak resident over peak live bytes, the larger of a Python string and of longer C blocks; 512 MiB"
        return filled(Row("grow_rss_over_live", "ratio", LOWER, how, bar=1.5), measured)

    def hangs() -> list[Row]:
        def measured(row: Row) -> None:
            row.ours = figure(settings, growth, "forks", str(forks))

        how = f"of {forks} children forked beside threads that allocate"
        return filled(Row("fork_hangs", "children", LOWER, how, bar=0.0), measured)

    ratios = [((name,), lambda name=name: ratio(name)) for name in RATIOS]
    return [(("grow_rss_over_live",), grown), *ratios, (("fork_hangs",), hangs)]
