"""Rows of what each part of ``gpu-check`` found, with the bars of docs/evidence/gpu.md."""

from __future__ import annotations

from .rows import LOWER, row

MIB = 1 << 20
GB = 1e9
COPIES_MIN = 0.95
COPIES_FROM_BYTES = 4 * MIB
# Of what sleeps. The driver keeps a few MiB for streams and for registered host memory.
GIVEN_BACK_MIN = 0.98
# Made once for each handle that falls asleep and wakes.
HANDLE_CALLS = ("create", "map", "access", "unmap", "release")
# What sleeps in the headline's step.
DORMANT_BYTES = 62.4e9
WAYS = {"out": "device to host", "in": "host to device", "both": "both ways at once"}


def conformance(found: dict) -> list[dict]:
    """It holds or it fails."""
    how = f"every case of the device suite, pages of {found['page_bytes'] // MIB} MiB"
    return [row("device conformance", "held", 1, bar=1, how=how)]


def streams(found: dict) -> list[dict]:
    """A destroyed stream must not count as a lost GPU."""
    codes = ", ".join(f"{call} {code}" for call, code in found["destroyed"].items())
    how = f"the driver's codes: {codes}; ours: {found['said']}"
    name = "a destroyed stream is an unknown one"
    return [row(name, "held", int(found["is_unknown"]), bar=1, how=how)]


def sleep(found: dict) -> list[dict]:
    """Every byte was compared, or the part would have failed."""
    size = found["bytes"]
    return [
        row("bytes equal after sleep and wake", "GB", found["compared_bytes"] / GB, bar=size / GB,
            how="compared on the host, at unchanged addresses"),
        row("given back while asleep", "GB", found["given_back_bytes"] / GB,
            bar=GIVEN_BACK_MIN * size / GB, how="driver's own figure, after one cycle"),
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
    rates = found["merge_gb_per_s"].items()
    return [
        *made,
        *(row(f"merge {dtype}", "GB/s", rate, how="outputs read and written")
          for dtype, rate in rates),
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
    """Costs of the driver's calls, and what a launch on another thread waits meanwhile."""
    made = [
        row(f"launch on another thread, {each['state']}, no mapping", "µs",
            each["launch"]["call"]["median_us"], better=LOWER,
            how="host time of the call; then until the kernel ended",
            **_launch(each["launch"]))
        for each in found["alone"]
    ]  # fmt: skip
    for each in found["series"]:
        made += _one_size(each)
    made += [
        row(f"our map, handles of {_size(each['page_bytes'])}", "µs/GiB",
            each["map_fresh_us_per_gib"], better=LOWER,
            how="fresh pages; also parked pages and unmapping",
            parked=each["map_parked_us_per_gib"], unmap=each["unmap_us_per_gib"])
        for each in found["device"]
    ]  # fmt: skip
    if found["kernel_refused"] is not None:
        how = f"the driver refused the kernel that runs beside: error {found['kernel_refused']}"
        made.append(row("mapping beside kernels", "measured", 0, bar=1, how=how))
    return made


def _one_size(each: dict) -> list[dict]:
    calls, where = each["calls"], f"{_size(each['page_bytes'])}, {each['state']}"
    middles = {name: calls[name]["median_us"] for name in HANDLE_CALLS}
    longest = {f"{name}_longest": calls[name]["longest_us"] for name in HANDLE_CALLS}
    handles = DORMANT_BYTES / each["page_bytes"]
    runs = {name: calls[name]["median_us"] for name in ("access_run", "unmap_run")}
    launch = each["launch"]["call"]["median_us"]
    made = [
        row(f"a handle of {where}", "µs", sum(middles.values()), better=LOWER,
            how=f"medians of each call, its longest; runs: {each['run_handles']} handles a call",
            **middles, **longest, **runs,
            headline_seconds=handles * sum(middles.values()) / 1e6)
    ]  # fmt: skip
    if launch is not None:
        made.append(
            row(f"launch on another thread, {where}", "µs", launch, better=LOWER,
                how="host time of the call while handles come and go; then until the kernel ended",
                **_launch(each["launch"]))
        )  # fmt: skip
    return made


def _launch(launch: dict) -> dict:
    call, done = launch["call"], launch["done"]
    return {"longest": call["longest_us"], "done": done["median_us"],
            "done_longest": done["longest_us"]}  # fmt: skip


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count >> 10} KiB"
