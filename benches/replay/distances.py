"""How far the parameters of two runs are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

import torch

from dormouse.demo import gradcheck

Parameters = Mapping[str, torch.Tensor]


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters, each once, without copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def norm(parameters: Parameters) -> float:
    """Returns the L2 norm of all parameters as one vector."""
    return _norm(parameters.values())


def distance(one: Parameters, other: Parameters) -> float:
    """Returns the L2 norm of the difference."""
    return _norm(_differences(one, other))


def summary(one: Parameters, other: Parameters) -> dict[str, float]:
    """Returns maximum, mean and RMS of the absolute differences of single numbers."""
    # Of tensors: Python's max drops a NaN.
    largest = torch.zeros((), dtype=torch.float64)
    total, square, count = 0.0, 0.0, 0
    for difference in _differences(one, other):
        largest = torch.maximum(largest, difference.abs().max().double())
        total += float(torch.linalg.vector_norm(difference, 1, dtype=torch.float64))
        square += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
        count += difference.numel()
    return {"max": float(largest), "mean": total / count, "rms": (square / count) ** 0.5}


def against_truth(
    start: Parameters, truth: Parameters, dense: Parameters, other: Parameters
) -> dict[str, float | str | bool]:
    """Returns the figures of :class:`dormouse.demo.gradcheck.GradError` of how far the parameters
    moved from ``start``: those of ``other``, beside those of ``dense``, from the movement of
    ``truth``."""
    distances = {}
    for name, first in start.items():
        moved = (each[name].double() - first.double() for each in (truth, dense, other))
        exact, *runs = ({name: movement} for movement in moved)
        distances |= gradcheck.distances_of(exact.items(), *runs)
    return asdict(gradcheck.summarise(distances))


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    norms = (float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in tensors)
    return sum(value**2 for value in norms) ** 0.5


def _differences(one: Parameters, other: Parameters) -> Iterator[torch.Tensor]:
    # Of neighbouring numbers of one dtype the difference is exact; else the wider dtype has it.
    return (one[name] - value for name, value in other.items())
