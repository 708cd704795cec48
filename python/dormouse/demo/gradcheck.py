"""Gradient check: distances to an FP64 reference, as defined in docs/method.md §10.

FP32 runs are not exact, dense or shared. So the distance of the shared schedule to the reference is
divided by that of the dense run, over all parameters and per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

RATIO_GLOBAL_MAX = 1.25
RATIO_MEDIAN_MAX = 1.25
RATIO_P99_MAX = 2.5
RATIO_MAX_MAX = 4.0
# Of one of several runs, over all parameters.
RATIO_RUN_MAX = 4.0

# This share of the reference's norm is always allowed: if dense is exact, a ratio would divide by
# zero.
ALLOWANCE = 1e-6


@dataclass(frozen=True)
class GradError:
    """Relative L2 distances to the reference, and the ratios shared ÷ dense.

    ``shared_global``/``dense_global``: over all parameters as one vector. The other ratios are
    quantiles over parameters. ``within_bounds``: whether method §10 holds, including its absolute
    allowance, which the ratios exclude; never where the whole reference is zero: nothing was
    compared.
    """

    shared_global: float
    dense_global: float
    ratio_global: float
    ratio_median: float
    ratio_p99: float
    ratio_max: float
    worst_parameter: str
    within_bounds: bool


@dataclass(frozen=True)
class Distance:
    """Squared norms of one parameter: of the reference, and of each run's difference from it."""

    truth: float
    dense: float
    shared: float


def compare(
    truth: Iterable[tuple[str, torch.Tensor]],
    dense: Mapping[str, torch.Tensor],
    shared: Mapping[str, torch.Tensor],
) -> GradError:
    """Returns the distances of ``dense`` and ``shared`` to ``truth``, each a gradient per parameter
    name.

    Raises :class:`ValueError` unless all three have the same parameters.
    """
    return summarise(distances_of(truth, dense, shared))


def distances_of(
    truth: Iterable[tuple[str, torch.Tensor]],
    dense: Mapping[str, torch.Tensor],
    shared: Mapping[str, torch.Tensor],
) -> dict[str, Distance]:
    """Returns the distances of each parameter. Arguments and errors: see :func:`compare`."""
    distances = {}
    for name, exact in truth:
        if name not in dense or name not in shared:
            raise ValueError(f"parameter {name!r} lacks a gradient; accepted: one in every run")
        exact = exact.double()
        distances[name] = Distance(
            _square(exact),
            _square(dense[name].double() - exact),
            _square(shared[name].double() - exact),
        )
    extra = (set(dense) | set(shared)) - set(distances)
    if extra or not distances:
        raise ValueError(f"parameters {sorted(extra)} are not in the reference")
    return distances


def compare_runs(runs: Sequence[Mapping[str, Distance]]) -> GradError:
    """Returns the figures of several runs together: in BF16 the ratio of a single run scatters
    widely. Each run counts relative to the norm of its whole reference: one with large gradients
    does not outweigh the others. Each run alone has a bound, too (:data:`RATIO_RUN_MAX`).

    Raises :class:`ValueError` unless all runs have the same parameters.
    """
    names = [run.keys() for run in runs]
    if any(each != names[0] for each in names):
        raise ValueError("the runs have different parameters; accepted: the same in each")
    relative = [_relative_to_all(run) for run in runs]
    error = summarise({name: _summed(run[name] for run in relative) for name in names[0]})
    of_runs = (_ratio(_summed(run.values()), allowance=ALLOWANCE) for run in runs)
    within = error.within_bounds and max(of_runs) <= RATIO_RUN_MAX
    return replace(error, within_bounds=within)


def _relative_to_all(run: Mapping[str, Distance]) -> dict[str, Distance]:
    truth = _summed(run.values()).truth

    def share(square: float) -> float:
        if truth == 0.0:
            # Nothing is a part of no gradient. NaN is never within bounds.
            return 0.0 if square == 0.0 else math.nan
        return square / truth

    return {
        name: Distance(share(d.truth), share(d.dense), share(d.shared)) for name, d in run.items()
    }


def _summed(distances: Iterable[Distance]) -> Distance:
    each = list(distances)
    return Distance(*(sum(getattr(d, k) for d in each) for k in ("truth", "dense", "shared")))


def summarise(distances: Mapping[str, Distance]) -> GradError:
    """Returns the figures over all parameters."""
    total = _summed(distances.values())
    plain = {name: _ratio(d, allowance=0.0) for name, d in distances.items()}
    allowed = [_ratio(d, allowance=ALLOWANCE) for d in distances.values()]
    within = (
        total.truth > 0.0
        and _ratio(total, allowance=ALLOWANCE) <= RATIO_GLOBAL_MAX
        and quantile(allowed, 0.5) <= RATIO_MEDIAN_MAX
        and quantile(allowed, 0.99) <= RATIO_P99_MAX
        and max(allowed) <= RATIO_MAX_MAX
    )
    return GradError(
        shared_global=_relative(total.shared, total.truth),
        dense_global=_relative(total.dense, total.truth),
        ratio_global=_ratio(total, allowance=0.0),
        ratio_median=quantile(plain.values(), 0.5),
        ratio_p99=quantile(plain.values(), 0.99),
        ratio_max=max(plain.values()),
        worst_parameter=max(plain, key=plain.get),
        within_bounds=within,
    )


def norm(gradients: Iterable[torch.Tensor]) -> float:
    """Returns the norm of all gradients as one vector, not finite if any of them is not."""
    wide = torch.float64
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=wide)) for each in gradients))


def quantile(values: Iterable[float], q: float) -> float:
    """Returns the ``q`` quantile: the smallest value that a share ``q`` of values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _ratio(d: Distance, allowance: float) -> float:
    """Returns shared ÷ dense, after subtracting ``allowance`` times the reference's norm from
    shared.

    Returns infinity where a distance is NaN or infinite: the ratio could pass a comparison.
    """
    if not all(map(math.isfinite, (d.shared, d.dense, d.truth))):
        return math.inf
    shared = max(0.0, math.sqrt(d.shared) - allowance * math.sqrt(d.truth))
    if shared == 0.0:
        return 0.0
    return shared / math.sqrt(d.dense) if d.dense > 0.0 else math.inf


def _relative(square: float, truth: float) -> float:
    if square == 0.0:
        return 0.0
    return math.sqrt(square / truth) if truth > 0.0 else math.inf


def _square(tensor: torch.Tensor) -> float:
    flat = tensor.reshape(-1)
    return float(torch.dot(flat, flat))
