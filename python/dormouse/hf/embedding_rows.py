"""The input embedding's gradient, computed once for the rows of many passes.

It is as large as the embedding, however few rows a pass reads: filling it and adding it up after
every microbatch takes longer than the microbatch's attention.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator

import torch

from .accumulation import add_embedded, has_rows_apart
from .support import TRANSFORMERS, ModelView
from .twins import Twins

# Number of rows whose gradients are converted to FP32 at a time.
WIDE_ROWS = 4096


class EmbeddingRows:
    """Rows that passes read, and the gradients that reach them."""

    def __init__(self, view: ModelView, twins: Twins):
        """``twins``: held by modules in the backward."""
        embedding, self._twins = view.embedding, twins
        self._is_plain = type(embedding) is torch.nn.Embedding and not embedding.sparse
        # A sparse gradient stays sparse.
        is_apart = _is_by_token(embedding) and not (embedding.sparse and twins.sums_wide)
        self._embedding = embedding if is_apart else None
        self._tokens: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")

    @contextlib.contextmanager
    def apart(self, *, is_prefix: bool = False) -> Iterator[None]:
        """Context of a forward whose backward ends at the embedding's output. ``is_prefix``: of one
        whose graph must be the probed one, but for this end."""
        if self._embedding is None or (is_prefix and not self._is_plain):
            yield
            return
        thread = threading.get_ident()

        @torch.compiler.disable
        def hook(module, args, output):
            if threading.get_ident() != thread or output.grad_fn is None:
                return None
            tokens = args[0]
            return Embedded.apply(
                self._anchor, output.detach(), lambda grad: self._add(tokens, grad)
            )

        handle = self._embedding.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def backward(self) -> None:
        """Runs the embedding's backward for all rows so far."""
        if not self._tokens:
            return
        tokens, self._tokens = torch.cat(self._tokens), []
        gradients, self._gradients = torch.cat(self._gradients), []
        weight = self._embedding.weight
        wide = self._twins.wide_sum(weight)
        if wide is not None:
            # A token is in rows of many passes, whose gradients are not to add up narrowly here.
            for some, own in zip(tokens.split(WIDE_ROWS), gradients.split(WIDE_ROWS), strict=True):
                rows = self._of_lookup(some, own)
                add_embedded(wide, some, rows.to(wide.dtype), self._embedding.padding_idx)
            return
        if weight.grad is None or not self._is_plain:
            self._embedding(tokens).backward(gradients)
            return
        # Of tied weights: another gradient would be as large.
        add_embedded(weight.grad, tokens, gradients, self._embedding.padding_idx)

    def _of_lookup(self, tokens: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of the rows that the embedding looks up, before it scales them."""
        if self._is_plain:
            return gradients
        with _Lookup() as lookup:
            self._embedding(tokens).backward(gradients)
        return lookup.rows.grad

    def _add(self, tokens: torch.Tensor, grad: torch.Tensor) -> None:
        self._tokens.append(tokens.flatten())
        self._gradients.append(grad.flatten(0, -2))


class _Lookup(torch.overrides.TorchFunctionMode):
    """Ends graphs at the rows that an embedding looks up."""

    rows: torch.Tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.embedding:
            self.rows = out = out.detach().requires_grad_()
        return out


class Embedded(torch.autograd.Function):
    """Rows without what computed them. Not a leaf: a model may change them in place."""

    @staticmethod
    def forward(ctx, anchor, rows, add: Callable[[torch.Tensor], None]):
        ctx.add = add
        return rows.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.add(grad)
        return None, None, None


def _is_by_token(embedding: torch.nn.Module) -> bool:
    """Returns whether a row, and its gradient, depend on its own token alone."""
    if not isinstance(embedding, torch.nn.Embedding):
        return False
    forward = type(embedding).forward
    is_known = forward is torch.nn.Embedding.forward or (
        inspect.getfile(forward).startswith(TRANSFORMERS)
    )
    has_hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    if not is_known or has_hooks or "forward" in vars(embedding):
        return False
    return has_rows_apart(embedding)
