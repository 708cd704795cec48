"""Parameters that share memory with a model's and collect gradients of their own.

A differentiable call runs backwards inside one node of the trainer's graph. Hooks of the model's
parameters, those of DistributedDataParallel among them, must see the node's result once, not the
gradient of each pass. So the passes run with twins, and the node returns what the twins collected.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from . import substitutes
from .support import UnsupportedModelError


class Twins:
    """A twin for every trainable parameter of a model."""

    def __init__(self, model: torch.nn.Module, *, sums_wide: bool = False):
        """``sums_wide``: gradients of passes add up in FP32."""
        self._model, self.sums_wide = model, sums_wide
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        """The model's own parameters that have one, each once."""
        # Made when passes begin: parameters may have no memory between them.
        self._twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        # Of twins below FP32.
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the passes: every module holds twins.

        Raises :class:`UnsupportedModelError` at its end if a pass reached a parameter itself.
        """
        for own in self.trainable:
            if own not in self._twins:
                self._twins[own] = twin = substitutes.parameter_like(own, own.detach())
                if self.sums_wide and sum_dtype(own) != own.dtype:
                    twin.register_post_accumulate_grad_hook(_adding_to(self))
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
        held = sum(grad.nbytes for grad in grads if grad is not None)
        return held + sum(each.nbytes for each in self._sums.values())

    @property
    def gradient_bytes_max(self) -> int:
        """Of the gradients of all parameters."""
        return gradient_bytes_max(self.trainable, sums_wide=self.sums_wide)

    def wide_sum(self, twin: torch.nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of a twin's gradients, to be added to; None if they add up in ``.grad``."""
        dtype = sum_dtype(twin)
        if not self.sums_wide or dtype == twin.dtype or not twin.requires_grad:
            return None
        if twin not in self._sums:
            self._sums[twin] = torch.zeros_like(twin, dtype=dtype, requires_grad=False)
        return self._sums[twin]

    def take(self, *, rounded: bool = True) -> list[torch.Tensor | None]:
        """Returns the gradients that the twins of :attr:`trainable` collected, and clears them.
        ``rounded``: in the dtypes of parameters; else sums in FP32 stay so."""
        grads = []
        for own in self.trainable:
            twin = self._twins[own]
            wide = self._sums.pop(twin, None)
            if wide is None:
                grads.append(twin.grad)
            else:
                grads.append(wide.to(own.dtype) if rounded else wide)
            twin.grad = None
        return grads

    def _add(self, twin: torch.nn.Parameter) -> None:
        grad, twin.grad = twin.grad, None
        if twin in self._sums:
            self._sums[twin].add_(grad)
        else:
            self._sums[twin] = grad.to(sum_dtype(twin))


def _adding_to(twins: Twins) -> Callable[[torch.nn.Parameter], None]:
    """Returns a hook that moves a twin's gradient to its sum. It does not hold ``twins``, which has
    the twin: Python's collector does not see the reference that torch keeps of the hook."""
    reference = weakref.ref(twins)

    def add(twin: torch.nn.Parameter) -> None:
        reference()._add(twin)

    return add


def gradient_bytes_max(parameters: Iterable[torch.nn.Parameter], *, sums_wide: bool) -> int:
    """Returns the bytes of the gradients of all ``parameters``."""
    dtypes = ((each, sum_dtype(each) if sums_wide else each.dtype) for each in parameters)
    return sum(each.numel() * dtype.itemsize for each, dtype in dtypes)


def sum_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """Returns the dtype in which gradients add up without the parameter's rounding."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _version(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else grad._version
