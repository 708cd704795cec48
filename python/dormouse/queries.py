"""Planning queries: JSON in, JSON out (docs/queries/).

:func:`query` takes any query by name. The helpers cover the most common queries: they name the fields,
fill in defaults, and return the answer unchanged.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from . import _native as native
from .errors import MemoryTierError

# Least size of the first answer buffer. A longer answer is computed twice, unless the last one of its
# query was at least half as long.
_ANSWER_BYTES = 1 << 16
# Size of the last answer of each query.
_last_bytes: dict[str, int] = {}


@dataclass(frozen=True)
class Machine:
    """The rates of a machine. ``dormouse_machine_t`` documents the fields; 0 means unknown."""

    flops_per_s: int = 0
    device_bytes: int = 0
    sleep_bytes_per_s: int = 0
    wake_bytes_per_s: int = 0
    host_bytes: int = 0
    nvme_write_bytes_per_s: int = 0
    nvme_read_bytes_per_s: int = 0
    link_bytes_per_s: int = 0
    op_overhead_ns: int = 0
    prefix_attention_flops_per_s: int = 0
    causal_attention_flops_per_s: int = 0


def query(name: str, **fields):
    """Answers one query. Forests, models and machines may be passed as objects.

    Raises :class:`dormouse.ArgumentError` if a field is not accepted.
    """
    request = {"version": 1, "query": name, **fields}
    text = json.dumps(request, default=_plain, allow_nan=False).encode()
    capacity = max(_ANSWER_BYTES, 2 * _last_bytes.get(name, 0))
    needed = ctypes.c_uint64()
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        try:
            native.call("schedule_query", text, buffer, capacity, ctypes.byref(needed))
        except MemoryTierError:
            if needed.value <= capacity:
                raise
            capacity = needed.value
            continue
        _last_bytes[name] = needed.value
        return json.loads(buffer.value)["answer"]


def _plain(value):
    if isinstance(value, native.ModelShape):
        return {name: field for name, field in vars(value).items() if name != "vocab"}
    if isinstance(value, Machine):
        return asdict(value)
    if hasattr(value, "to_json"):
        return json.loads(value.to_json())
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def rates(model: native.ModelShape, machine: Machine) -> dict:
    """Returns the seconds per unit of each feature, by counting operations."""
    return query("rates", model=model, machine=machine)


def fit(samples: Iterable[tuple[dict, float]], weighting: str = "absolute") -> dict:
    """Fits rates to measured steps, given as pairs of features and seconds."""
    listed = [{"features": features, "seconds": seconds} for features, seconds in samples]
    return query("fit", samples=listed, weighting=weighting)


def shares(
    forest,
    *,
    ranks: int,
    microbatch_tokens: int,
    model: native.ModelShape,
    machine: Machine | None = None,
    rates: dict | None = None,
    groups: Sequence[int] = (),
    logit_rows: Sequence[int] = (),
    method: str = "contiguous",
    unit: str = "leaf",
    exchange: bool = False,
    ops_hold_collectives: bool = False,
) -> dict:
    """Assigns leaves to ``ranks`` ranks. ``rates`` default to those of :func:`rates`."""
    machine = machine or Machine()
    if rates is None:
        rates = query("rates", model=model, machine=machine)
    options = {
        "ranks": ranks,
        "method": method,
        "unit": unit,
        "exchange": exchange,
        "ops_hold_collectives": ops_hold_collectives,
        "microbatch_tokens": microbatch_tokens,
        "rates": rates,
        "model": model,
        "machine": machine,
    }
    return query("shares", forest=forest, groups=groups, logit_rows=logit_rows, options=options)


def collective_order(passes: Sequence[Sequence[str]]) -> dict:
    """Returns one order of passes for all ranks, given each rank's :meth:`dormouse.Plan.passes`.

    ``kinds`` is the sequence that :func:`dormouse.ranks.confirm` compares.
    """
    return query("collective_order", passes=passes)


def pipeline(
    groups: Sequence[dict], *, stages: int, virtual_stages: int = 1, sleep: str = "never", **more
) -> dict:
    """Returns the op lists of pipeline stages. ``sleep``: whether what prefixes save sleeps between their ops:
    "never", "always" or "chosen". ``more``: order, chunks, bounds (docs/queries/pipeline.md)."""
    described = {"groups": groups, "stages": stages, "virtual_stages": virtual_stages, **more}
    return query("pipeline", pipeline=described, sleep=sleep)


def replicas(groups: Sequence[dict], *, replicas: int, stages: int, **more) -> dict:
    """Assigns groups to data-parallel replicas of a pipeline and returns the op lists of each. ``more``: as
    :func:`pipeline` (docs/queries/replicas.md)."""
    described = {"groups": groups, "stages": stages, "virtual_stages": 1, **more}
    return query("replicas", pipeline=described, replicas=replicas)


def layout(pieces: Sequence[dict], *, form: str = "packed", multiple: int = 1) -> dict:
    """Lays out the rows of a microbatch of pieces, ``packed`` or ``padded``."""
    answer = query("layout", pieces=pieces, form=form, options={"multiple": multiple})
    return answer[form]


def context(
    prefix: Sequence[dict],
    microbatch: Sequence[dict],
    *,
    ranks: int,
    kv: dict,
    cut: str | dict = "zigzag",
    multiple: int = 1,
    gathered: str = "kept",
    reduced: str = "each_microbatch",
    room_bytes: int | None = None,
    way: str | None = None,
) -> dict:
    """Shards prefix and microbatch over ``ranks`` context-parallel ranks, prices the ways of their exchange
    and lists one. ``room_bytes``: of a rank; None: enough. ``way``: "all_gather" or "ring"; None: chosen by
    the prices."""
    return query(
        "context",
        prefix=prefix,
        microbatch=microbatch,
        shards={"ranks": ranks, "cut": cut, "multiple": multiple},
        kv=kv,
        exchange={"gathered": gathered, "reduced": reduced, "room_bytes": room_bytes, "way": way},
    )


def experts(forest, microbatches: Sequence[int], *, baseline: dict, router: dict) -> dict:
    """Lists the router statistics to capture and how often each counts. ``microbatches``: one per sequence."""
    return query("experts", forest=forest, microbatches=microbatches, baseline=baseline, router=router)


def rollout_assign(
    history: Sequence[dict],
    requests: Sequence[dict],
    *,
    step: int,
    workers: int,
    groups: int | None = None,
    cut: str = "equal_count",
    curve: dict | None = None,
    slope_permille: int | None = None,
    **predictor: int,
) -> dict:
    """Assigns prompts to workers. ``groups``, ``slope_permille``: None to choose them by trials on the
    history. ``predictor``: all of its fields, or none. :class:`dormouse.rollouts.Rollouts` drives steps."""
    options = {
        "step": step,
        "workers": workers,
        "groups": groups,
        "cut": cut,
        "curve": curve,
        "slope_permille": slope_permille,
    }
    more = {"predictor": predictor} if predictor else {}
    return query("rollout_assign", history={"prompts": history}, requests=requests, options=options, **more)


def rollout_migrate(
    assignment: dict, requests: Sequence[dict], rollouts: Sequence[dict], **options
) -> list[dict]:
    """Proposes migrations that are predicted to gain, of rollouts that have outgrown their prediction.
    ``options``: none, or all but those with a default (docs/queries/rollout_migrate.md)."""
    more = {"options": options} if options else {}
    progress = {"rollouts": rollouts}
    return query("rollout_migrate", assignment=assignment, requests=requests, progress=progress, **more)
