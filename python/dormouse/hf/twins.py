"""Parameters that share memory with a model's and collect gradients of their own.

A differentiable call runs backwards inside one node of the trainer's graph. Hooks of the model's
parameters, those of DistributedDataParallel among them, must see the node's result once, not the
gradient of each pass. So the passes run with twins, and the node returns what the twins collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import substitutes
from .support import UnsupportedModelError


class Twins:
    """A twin for every trainable parameter of a model."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        """The model's own parameters that have one, each once."""
        # Made when passes begin: parameters may have no memory between them.
        self._twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the passes: every module holds twins.

        Raises :class:`UnsupportedModelError` at its end if a pass reached a parameter itself.
        """
        for own in self.trainable:
            if own not in self._twins:
                self._twins[own] = substitutes.parameter_like(own, own.detach())
        before = [(own, own.grad, _version(own.grad)) for own in self.trainable]
        places = substitutes.put(self._model, self._twins.get)
        try:
            yield
        finally:
            substitutes.put_back(places)
        for own, grad, version in before:
            if own.grad is not grad or _version(own.grad) != version:
                raise UnsupportedModelError(
                    f"a module computes with a parameter of shape {list(own.shape)} that it keeps "
                    "outside its parameters, so hooks of that parameter would see parts of its "
                    "gradient; accepted: parameters that modules hold as such"
                )

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that the twins hold."""
        grads = (twin.grad for twin in self._twins.values())
        return sum(grad.nbytes for grad in grads if grad is not None)

    def take(self) -> list[torch.Tensor | None]:
        """Returns the gradients that the twins of :attr:`trainable` collected, and clears them."""
        grads = []
        for own in self.trainable:
            twin = self._twins[own]
            grads.append(twin.grad)
            twin.grad = None
        return grads


def _version(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else grad._version
