"""The context of a check: passes whose gradients leave the trainer's own alone."""

from __future__ import annotations

import functools

import torch

from . import adapters, graph, substitutes
from .support import UnsupportedModelError, free_bytes

# Widened weights and their gradients.
TRIAL_COPIES = 2
# Gradients stay on a GPU that has room for those of the next run, and a quarter of them for what
# computing these takes.
KEPT_ROOM = 1.25
# Of values in place of zeros: a tenth of what keeps the norm of a layer's input, so that a model
# stays what it is. One seed: replicated weights stay the same on all ranks. The number of values is
# a prime, so that rows differ.
ZEROS_SEED, ZEROS_VALUES = 20, 65_537
ZEROS_SCALE, ZEROS_SCALE_MAX = 0.1, 0.02
ZEROS_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Larger ones stay zeros: a whole vocabulary.
ZEROS_NUMEL_MAX = 1 << 24


class Trial:
    """Context of a check: runs passes whose gradients leave every ``.grad`` as it was."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None):
        """``dtype``: narrower weights are widened to it; None: as they are."""
        self._model, self._dtype = model, dtype

    def __enter__(self) -> Trial:
        self._own = dict(self._model.named_parameters())
        self._before = {name: (p.grad, p._version) for name, p in self._own.items()}
        self._digests = {p: _digest(p) for p in adapters.reregistered(self._model)}
        for parameter in self._own.values():
            parameter.grad = None
        self._others: dict[torch.Tensor, torch.Tensor | None] = {}
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._places: list[substitutes.Place] = []
        try:
            self._places = self._substitute()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        substitutes.put_back(self._places)
        for name, parameter in self._own.items():
            parameter.grad = self._before[name][0]
        for leaf, grad in self._others.items():
            leaf.grad = grad

    def adopt(self, output: torch.Tensor) -> None:
        """Leaves ``.grad`` alone also of the leaves from which ``output`` was computed and that no
        module holds as its parameter. They are not compared: some live for one forward."""
        known = {id(p) for p in (*self._own.values(), *self._model.parameters())}
        for leaf in graph.leaves(output):
            if id(leaf) not in known and leaf not in self._others:
                self._others[leaf], leaf.grad = leaf.grad, None

    def take(self, *, kept: bool = False) -> dict[str, torch.Tensor]:
        """Returns the gradients since the last call, by name. ``kept``: while another run computes
        its own, so in host memory if the GPU has little room."""
        for name, parameter in self._own.items():
            if parameter._version == self._before[name][1]:
                continue
            if parameter not in self._digests or self._digests[parameter] != _digest(parameter):
                raise UnsupportedModelError(
                    f"parameter {name!r} was written by a forward or backward; accepted: weights "
                    "that only the optimizer's step changes"
                )
        grads: dict[str, torch.Tensor] = {}
        # A module that kept a parameter elsewhere computes with the parameter itself.
        used = {p: name for name, p in self._own.items()}
        used |= {p: name for name, p in self._model.named_parameters()}
        to_host = kept and not has_room([p.grad for p in used if p.grad is not None])
        for parameter, name in used.items():
            if parameter.grad is not None:
                grad = self._local(parameter.grad)
                grad = grad.cpu() if to_host else grad
                grads[name] = grads[name] + grad if name in grads else grad
                parameter.grad = None
        return grads

    def summed(self, table: torch.Tensor) -> torch.Tensor:
        """Returns the sum of ``table`` over the ranks that hold parts of the gradients."""
        return table

    def _local(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def _substitute(self) -> list[substitutes.Place]:
        """Puts copies in place of parameters and buffers: neither hooks of the trainer nor its
        buffers see the check. Copies of the same dtype share memory with the parameters, except
        where these are zeros."""
        return substitutes.put(self._model, self._copy)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if tensor not in self._copies:
            copy = tensor.detach()
            if tensor.is_floating_point() and self._dtype is not None:
                copy = copy.to(torch.promote_types(tensor.dtype, self._dtype))
            if isinstance(tensor, torch.nn.Parameter):
                copy = substitutes.parameter_like(tensor, self._filled(tensor, copy))
            elif copy.data_ptr() == tensor.data_ptr():
                copy = copy.clone()
            self._copies[tensor] = copy
        return self._copies[tensor]

    def _filled(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Returns ``copy``, or small values in its place if it is zeros and trained: behind a new
        head or a new adapter, all gradients would be 0 in both runs."""
        if not parameter.requires_grad or not _is_zeros(copy):
            return copy
        # Others in each parameter: an error may exchange two layers.
        values = _values().roll(len(self._copies)).to(copy.device)
        inputs = copy.numel() // copy.shape[0]
        scale = min(ZEROS_SCALE * inputs**-0.5, ZEROS_SCALE_MAX)
        repeated = (values * scale).repeat(-(-copy.numel() // ZEROS_VALUES))[: copy.numel()]
        return torch.empty_like(copy).copy_(repeated.view(copy.shape))


def _is_zeros(weights: torch.Tensor) -> bool:
    if weights.dtype not in ZEROS_DTYPES or weights.layout is not torch.strided or weights.is_meta:
        return False
    # Biases, and norms that add 1, hide nothing.
    if weights.dim() < 2 or not 0 < weights.numel() <= ZEROS_NUMEL_MAX:
        return False
    # Most weights need a look at their first row only.
    return not bool(weights[:1].any()) and not bool(weights.any())


@functools.cache
def _values() -> torch.Tensor:
    """Returns the values that take the place of zeros, before they are scaled."""
    generator = torch.Generator().manual_seed(ZEROS_SEED)
    return torch.randn(ZEROS_VALUES, generator=generator, dtype=torch.float32, device="cpu")


def has_room(grads: list[torch.Tensor]) -> bool:
    """Returns whether gradients can stay where they are while as many more are computed."""
    needed_bytes = KEPT_ROOM * sum(grad.nbytes for grad in grads)
    return not grads or needed_bytes <= free_bytes(grads[0].device)


def _digest(tensor: torch.Tensor) -> int:
    """Returns a number that follows from the tensor's bytes."""
    return int(tensor.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64))
