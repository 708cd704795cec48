"""Rows of what each part of ``gpu-check`` found, with the bars of docs/evidence/gpu.md."""

from __future__ import annotations

from .rows import LOWER, row

MIB = 1 << 20
GB = 1e9
COPIES_MIN = 0.95
COPIES_FROM_BYTES = 4 * MIB
WAYS = {"out": "device to host", "in": "host to device", "both": "both ways at once"}


def conformance(found: dict) -> list[dict]:
    """It holds or it fails."""
    how = f"every case of the device suite, pages of {found['page_bytes'] // MIB} MiB"
    return [row("device conformance", "held", 1, bar=1, how=how)]


def sleep(found: dict) -> list[dict]:
    """Every byte was compared, or the part would have failed."""
    size = found["bytes"]
    return [
        row("bytes equal after sleep and wake", "GB", found["compared_bytes"] / GB, bar=size / GB,
            how="compared on the host, at unchanged addresses"),
        row("given back while asleep", "GB", found["given_back_bytes"] / GB, bar=size / GB,
            how="driver's own figure"),
        row("sleeping", "GB/s", found["sleep_gb_per_s"], how="map, copy and order included"),
        row("waking", "GB/s", found["wake_gb_per_s"], how="map, copy and order included"),
    ]  # fmt: skip


def kernels(found: dict) -> list[dict]:
    """Sums were compared bit for bit, or the part would have failed."""
    made = [
        row(f"accumulate {each['dtype']}", "GB/s", each["gb_per_s"],
            how=f"{each['compared']} sums equal to the CPU's bits")
        for each in found["accumulate"]
    ]  # fmt: skip
    worst = found["merge_worst_over_bound"]
    return [
        *made,
        row("merge, worst difference over its bound", "ratio", worst, bar=1, better=LOWER,
            how="against the CPU's"),
    ]  # fmt: skip


def copies(found: dict) -> list[dict]:
    """Ours over plain, each way and size."""
    return [
        row(
            f"copy {WAYS[each['way']]}, {_size(each['bytes'])}",
            "ratio",
            each["ratio"],
            bar=COPIES_MIN if each["bytes"] >= COPIES_FROM_BYTES else None,
            how="ours over plain pinned cuMemcpyAsync, medians of turns",
            ours_GB_per_s=each["ours_gb_per_s"],
            plain_GB_per_s=each["plain_gb_per_s"],
        )
        for each in found["rows"]
    ]


def mapping(found: dict) -> list[dict]:
    """Costs of the driver's own calls."""
    return [
        row(
            f"map, handles of {_size(each['page_bytes'])}",
            "µs/GiB",
            each["map_fresh_us_per_gib"],
            better=LOWER,
            how="fresh pages; also parked pages and unmapping",
            parked=each["map_parked_us_per_gib"],
            unmap=each["unmap_us_per_gib"],
        )
        for each in found["rows"]
    ]


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count >> 10} KiB"
