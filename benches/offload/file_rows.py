"""Rows of the file tier, compared with fio and DeepNVMe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import fio
from deepnvme import SETTINGS, DeepNvme
from gpu_rows import PUBLISHED_ROW, b_mapped, c_peak, overheads, run_ahead
from mark_rows import layer_mark
from ours import Ours, Run, Unavailable
from pages import Pages
from pairs import CONFIDENCE, PAIRS_MIN, alternate, lower_bound, median_ratio
from rows import HIGHER, LOWER, Row
from small_rows import small_tensors
from stall_rows import FAMILIES, row_name, stall
from sum_rows import sums

WAYS = ("write", "read")
# What two threads have on their way, four times 4 MiB each.
PAGES_BYTES = 32 << 20


@dataclass
class Setting:
    """One run of the bench."""

    directory: Path
    file_bytes: int
    pairs: int
    threads: int
    depth: int
    deepspeed_python: str | None

    def ours(self) -> Ours:
        return Ours(self.directory, self.file_bytes, self.threads, self.depth)


Maker = Callable[[], list[Row]]


def makers(setting: Setting) -> Iterator[tuple[tuple[str, ...], Maker]]:
    """Names of rows, and what measures them together."""
    for way in reversed(WAYS):
        name = f"nvme_{way}_over_fio"
        yield (name, f"{name}_lower_bound"), lambda way=way: over_fio(setting, way)
    yield ("layer_mark_ns",), lambda: [layer_mark()]
    yield ("small_tensors_over_alone",), lambda: [small_tensors(setting.directory)]
    yield ("sum_over_crate",), lambda: [sums()]
    yield ("checksum_cpu_s_per_gb",), lambda: [checksums(setting)]
    yield ("nvme_cpu_s_per_gb_over_deepnvme",), lambda: [over_deepnvme(setting)]
    yield ("gpu_sleep_wake_overhead", PUBLISHED_ROW), overheads
    yield ("gpu_c_peak_over_b_peak",), lambda: [c_peak()]
    yield ("gpu_b_mapped_over_in_use",), lambda: [b_mapped()]
    yield ("gpu_runahead_bytes",), lambda: [run_ahead()]
    for family in FAMILIES:
        yield (row_name(family),), lambda family=family: [stall(family)]


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def over_fio(setting: Setting, way: str) -> list[Row]:
    """GB/s with checksums off, as fio has none; the row says what they cost."""
    name = f"nvme_{way}_over_fio"
    how = (
        f"GB/s of our {way}s of a {setting.file_bytes >> 20} MiB file over those of fio's best "
        "O_DIRECT setting, on the same file and the same pages of memory, checksums off; median of "
        f"{setting.pairs} pairs in turn"
    )
    ratio = Row(name, "ratio", HIGHER, how, bar=0.95)
    how = f"lower bound of {name}'s median at {CONFIDENCE:.0%}, by order statistics"
    bound = Row(f"{name}_lower_bound", "ratio", HIGHER, how, bar=0.90)
    ours, pages = setting.ours(), Pages(PAGES_BYTES)
    try:
        pages.renew()
        ours.run("write", pages.path)
        chosen = fio.best(ours.file, setting.file_bytes, way, pages)
        say(f"fio's best for {way}: {' '.join(chosen)}")
        pairs = alternate(
            setting.pairs,
            lambda: ours.run(way, pages.path),
            lambda: fio.run(ours.file, setting.file_bytes, way, chosen, pages.path),
            pages.renew,
        )
        rates = [(one.gb_per_s, other.gb_per_s) for one, other in pairs]
        ratio.ours = median_ratio(rates)
        bound.ours = lower_bound([one / other for one, other in rates])
        ratio.how += (
            f"; fio: {' '.join(chosen)}; ours: {ours.engine}, {setting.threads} threads, depth "
            f"{setting.depth}; {spread(pairs)}; {with_sums(setting, ours, pages, way, chosen)}"
        )
    except Unavailable as reason:
        for row in (ratio, bound):
            row.note("ours", reason)
    finally:
        ours.close()
        pages.drop()
    return [ratio, bound]


def with_sums(
    setting: Setting, ours: Ours, pages: Pages, way: str, chosen: tuple[str, ...]
) -> str:
    """The same with checksums, which is our default, in words."""
    ours.run("write", pages.path, sums=True)
    pairs = alternate(
        PAIRS_MIN,
        lambda: ours.run(way, pages.path, sums=True),
        lambda: fio.run(ours.file, setting.file_bytes, way, chosen, pages.path),
        pages.renew,
    )
    ratio = median_ratio([(one.gb_per_s, other.gb_per_s) for one, other in pairs])
    return f"checksums on: {ratio:.3f}"


def checksums(setting: Setting) -> Row:
    how = (
        "CPU seconds per GB with checksums less those without, in turn; the larger of the medians "
        f"of {setting.pairs} pairs of writes and of reads"
    )
    row = Row("checksum_cpu_s_per_gb", "s/GB", LOWER, how, bar=0.1)
    ours, pages = setting.ours(), Pages(PAGES_BYTES)
    try:
        costs: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(setting.pairs):
            pages.renew()
            for way, pair in both(ours, pages).items():
                costs[way].append(pair[1].cpu_s_per_gb - pair[0].cpu_s_per_gb)
        cost_of = {way: median(found) for way, found in costs.items()}
        row.how += "; " + ", ".join(f"{way} {cost:.3f}" for way, cost in cost_of.items())
        put_cost(row, cost_of)
    except Unavailable as reason:
        row.note("ours", reason)
    finally:
        ours.close()
        pages.drop()
    return row


def put_cost(row: Row, cost_of: dict[str, float]) -> None:
    if all(cost > 0 for cost in cost_of.values()):
        row.ours = max(cost_of.values())
    else:
        row.note("ours", "checksums cost no time: they were not made, or other work hid them")


def both(ours: Ours, pages: Pages) -> dict[str, tuple[Run, Run]]:
    """Without checksums and with them: what was written with them is read with them."""
    plain = {way: ours.run(way, pages.path) for way in WAYS}
    summed = {way: ours.run(way, pages.path, sums=True) for way in WAYS}
    return {way: (plain[way], summed[way]) for way in WAYS}


def over_deepnvme(setting: Setting) -> Row:
    how = (
        "CPU seconds per GB, checksums off on both sides, over those of DeepNVMe 0.19.8 on the same "
        "file with the setting that costs it least; the larger of the median ratios of "
        f"{setting.pairs} pairs in turn of writes and of reads"
    )
    row = Row("nvme_cpu_s_per_gb_over_deepnvme", "ratio", LOWER, how, bar=1)
    if setting.deepspeed_python is None:
        row.note("ours", "no Python with DeepNVMe was named (--deepspeed-python)")
        return row
    ours, pages = setting.ours(), Pages(PAGES_BYTES)
    peers: list[DeepNvme] = []
    try:
        ratios = {}
        pages.renew()
        ours.run("write", pages.path)
        for way in WAYS:
            chosen, peer = cheapest(setting, ours, way)
            peers.append(peer)
            pairs = alternate(
                setting.pairs,
                lambda way=way: ours.run(way, pages.path),
                lambda way=way, peer=peer: peer.run(way),
                pages.renew,
            )
            ratios[way] = median_ratio([(a.cpu_s_per_gb, b.cpu_s_per_gb) for a, b in pairs])
            row.how += f"; {way} {ratios[way]:.3f}: {spread(pairs)}, theirs {chosen}"
        row.ours = max(ratios.values())
    except Unavailable as reason:
        row.note("ours", reason)
    finally:
        for process in (ours, *peers):
            process.close()
        pages.drop()
    return row


def cheapest(setting: Setting, ours: Ours, way: str) -> tuple[tuple, DeepNvme]:
    """DeepNVMe's setting with the least CPU time per byte, and a process that has it."""
    found = []
    for one in SETTINGS:
        peer = DeepNvme(setting.deepspeed_python, ours.file, setting.file_bytes, one)
        try:
            found.append((median(peer.run(way).cpu_s_per_gb for _ in range(3)), one))
        finally:
            peer.close()
    chosen = min(found)[1]
    return chosen, DeepNvme(setting.deepspeed_python, ours.file, setting.file_bytes, chosen)


def spread(pairs: list[tuple[Run, Run]]) -> str:
    ours, theirs = zip(*pairs, strict=True)
    return " against ".join(
        f"{median(run.cpu_s_per_gb for run in runs):.4f} s/GB at "
        f"{median(run.gb_per_s for run in runs):.2f} GB/s"
        for runs in (ours, theirs)
    )
