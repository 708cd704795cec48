"""Rows of a prefix, as losses read them in phases A and B.

Losses never reach the prefix's graph, of which most is asleep: they read leaves with the values of
its rows. The gradients that the leaves collect join those of K and V in phase C. Leaves that many
microbatches read are FP32 (docs/method.md §1).

Losses of the prefix's own labels are computed at the end of phase A. The output embedding then
reads a leaf as well, so that their backward frees the logits at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from . import graph
from .outputs import Output, Request
from .support import ModelView, UnsupportedModelError


class _Gate:
    """Refuses gradients while it is closed. Apart from the leaves whose hook it is: a cycle would
    keep their memory."""

    def __init__(self, is_open: bool):
        self.is_open = is_open

    def check(self, grad: torch.Tensor) -> None:
        """Hook of a leaf."""
        if not self.is_open:
            raise UnsupportedModelError(
                "a loss reads what an earlier call received, whose gradients were taken already; "
                "accepted: losses of what they receive"
            )


class HeadInput:
    """What the output embedding reads in phase A: a leaf in place of the last hidden states, or no
    rows if no loss reads their logits."""

    def __init__(self, view: ModelView, request: Request):
        self._head = head_of(view)
        self._needs_logits = request.has_prompt_loss
        self._gate = _Gate(is_open=False)
        self.live: torch.Tensor | None = None
        self.leaf: torch.Tensor | None = None

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Context of the forward pass of phase A."""
        self._thread = threading.get_ident()
        handle = self._head.register_forward_pre_hook(self._hook)
        try:
            yield
        finally:
            handle.remove()
        if self.live is None:
            raise UnsupportedModelError(
                f"the output embedding ({type(self._head).__name__}) did not run over rows of a "
                "prefix that losses read; accepted: once in every forward"
            )

    @torch.compiler.disable
    def _hook(self, module, args):
        if threading.get_ident() != self._thread:
            return None
        if not args or self.live is not None:
            raise UnsupportedModelError(
                f"the output embedding ({type(module).__name__}) runs more than once or without "
                "positional arguments; accepted: once, with hidden states"
            )
        self.live = args[0]
        if not self._needs_logits:
            return (self.live[..., :0, :], *args[1:])
        self.leaf = self.live.detach().requires_grad_(self.live.requires_grad)
        if self.leaf.requires_grad:
            self.leaf.register_hook(self._gate.check)
        return (self.leaf, *args[1:])

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Context of the backward of the losses."""
        self._gate.is_open = True
        try:
            yield
        finally:
            self._gate.is_open = False


def head_of(view: ModelView) -> torch.nn.Module:
    """Returns the output embedding. Raises :class:`UnsupportedModelError` if there is none."""
    head = view.model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            "the model has no output embedding (get_output_embeddings() is None), so losses of a "
            "prefix's rows cannot be separated from its graph; accepted: one"
        )
    return head


class PromptRows:
    """Leaves in place of a prefix's rows, and the gradients that they collect."""

    def __init__(self, head: HeadInput, live: Output):
        """``live``: of the prefix's graph, with logits from the leaf of ``head``."""
        self._logits = live.logits
        if head.leaf is not None and head.live.grad_fn is not None:
            passed_by = graph.older(live.logits, head.live)
            if passed_by is not None:
                raise UnsupportedModelError(
                    f"logits of a prefix's rows read more than the last hidden states: {passed_by} "
                    "passes them by, and losses of these rows would run its backward twice; "
                    "accepted: what joins the hidden states before the output embedding"
                )
        self._head = head
        self._live = live.without_logits()
        self._gate = _Gate(is_open=True)
        self._leaves = self._live.mapped(self._leaf)

    def roots(self) -> list[torch.Tensor]:
        """Returns tensors of the prefix's graph from which a gradient may start."""
        live = [tensor for _, tensor in self._live.tensors()]
        return live if self._head.leaf is None else [self._head.live, *live]

    @property
    def need_backward(self) -> bool:
        """Whether any of them depends on a trainable parameter."""
        return any(tensor.requires_grad for tensor in self.roots())

    def scoring(self) -> contextlib.AbstractContextManager:
        """Returns the context of the backward of the prefix's own losses."""
        return self._head.scoring()

    def take_logits(self) -> torch.Tensor:
        """Returns the logits, once: nothing here keeps them."""
        logits, self._logits = self._logits, None
        return logits

    def output(self) -> Output:
        """Returns the leaves in the dtypes of the model, for the graph of one backward."""
        dtypes = iter([tensor.dtype for _, tensor in self._live.tensors()])
        return self._leaves.mapped(lambda leaf: leaf.to(next(dtypes)))

    def seeds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns tensors of the prefix's graph with the gradients that their leaves collected.
        Refuses later ones."""
        self._gate.is_open = False
        pairs = [
            (live, leaf)
            for (_, live), (_, leaf) in zip(
                self._live.tensors(), self._leaves.tensors(), strict=True
            )
        ]
        if self._head.leaf is not None:
            pairs.append((self._head.live, self._head.leaf))
        return [(live, leaf.grad.to(live.dtype)) for live, leaf in pairs if leaf.grad is not None]

    def _leaf(self, live: torch.Tensor) -> torch.Tensor:
        # A copy: what the graph saved may be asleep.
        wide = torch.promote_types(live.dtype, torch.float32)
        leaf = live.detach().to(wide, copy=True).requires_grad_(live.requires_grad)
        if leaf.requires_grad:
            leaf.register_hook(self._gate.check)
        return leaf
