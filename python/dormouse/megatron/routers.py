"""The routers of a GPTModel during passes: they add losses and counts of the rows that theirs stand
for (:mod:`.balancing`), and end prefixes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from ..hf.sharding import PrefixDone
from .balancing import Balancing, balances, ends_at_router, routers_of


# Methods of routers in whose place passes put their own, and those that then do not run.
REPLACED = ("apply_z_loss", "is_aux_loss_enabled", "_apply_expert_bias")
NOT_RUN = (
    "get_aux_loss_coeff",
    "_apply_aux_loss",
    "_apply_seq_aux_loss",
    "_apply_global_aux_loss",
    "attach_and_log_load_balancing_loss",
)
# Buffers in which routers count, and which no forward reads.
COUNTS_OF_ROUTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


class PrefixEnd:
    """What a prefix's graph has behind K and V of its last layer: the logits of a router, where
    gradients of scores begin, or the hidden states that a stage returns."""

    def __init__(self, live: torch.Tensor):
        self._live = live

    def roots(self) -> list[torch.Tensor]:
        """See :class:`dormouse.hf.prompt_rows.PromptRows`."""
        return [self._live]

    @property
    def need_backward(self) -> bool:
        """See :class:`dormouse.hf.prompt_rows.PromptRows`."""
        return self._live.requires_grad

    def seeds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`dormouse.hf.prompt_rows.PromptRows`."""
        return [(self._live, torch.zeros_like(self._live))] if self.need_backward else []


class Routers:
    """The routers of a model during passes."""

    def __init__(self, gpt: GPTModel):
        self._gpt = gpt
        self.balancing: Balancing | None = None
        """Of the call that runs; None: no row of a pass has an owner."""
        self.last: PrefixEnd | None = None
        """Of the last prefix that ran."""

    @property
    def end_prefixes(self) -> bool:
        """Whether a prefix ends at the last layer's router, not at its K and V."""
        return ends_at_router(self._gpt)

    @contextlib.contextmanager
    def of(self, balancing: Balancing | None) -> Iterator[None]:
        """Context of the passes of a call, or of a check or a probe: None."""
        before, self.balancing = self.balancing, balancing
        try:
            yield
        finally:
            self.balancing = before

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Context of a forward of Megatron's own, without losses and counts."""
        with contextlib.ExitStack() as stack:
            for router in filter(None, routers_of(self._gpt) if balances(self._gpt) else ()):
                stack.enter_context(_replaced(router, lambda logits: logits, lambda selected: None))
            yield

    @contextlib.contextmanager
    def in_pass(
        self, *, is_prefix: bool, owners_of: Callable[[Balancing], torch.Tensor]
    ) -> Iterator[None]:
        """Context of a pass of a step. ``owners_of``: returns those of this rank's rows, called in
        the forward."""
        self.last = None
        if not balances(self._gpt):
            yield
            return
        balancing = self.balancing or Balancing(self._gpt)
        routers = routers_of(self._gpt)
        owners: torch.Tensor | None = None

        def add(layer: int, router: TopKRouter, logits: torch.Tensor) -> torch.Tensor:
            nonlocal owners
            if owners is None:
                owners = owners_of(balancing)
            counted, scores = moe_utils.compute_routing_scores_for_aux_loss(
                logits, router.topk, router.score_function
            )
            squares = torch.logsumexp(logits, -1).square()
            balancing.count(layer, owners, counted, scores, squares)
            logits = _Added.apply(logits, scores, squares, balancing, layer, owners)
            if is_prefix and self.end_prefixes and layer == len(routers) - 1:
                self.last = PrefixEnd(logits)
            return logits

        def end(layer: int, selected: torch.Tensor) -> None:
            balancing.count_selected(layer, owners, selected)
            if self.last is not None:
                raise PrefixDone

        with contextlib.ExitStack() as stack:
            for layer, router in enumerate(routers):
                if router is not None:
                    own = (
                        lambda logits, layer=layer, router=router: add(layer, router, logits),
                        lambda selected, layer=layer: end(layer, selected),
                    )
                    stack.enter_context(_replaced(router, *own))
            yield


@contextlib.contextmanager
def _replaced(router: TopKRouter, add: Callable, end: Callable) -> Iterator[None]:
    """Context in which a router calls ``add(logits)`` in the place of adding its losses, and
    ``end(selected)`` in that of its counts."""
    thread = threading.get_ident()
    called = (
        lambda logits, padding_mask=None: add(logits),
        lambda: False,
        lambda selected, padding_mask=None: end(selected),
    )
    own = dict(zip(REPLACED, called, strict=True))

    def dispatched(name: str):
        before = getattr(router, name)

        def call(*args, **named):
            # Another thread may evaluate the model meanwhile.
            chosen = own[name] if threading.get_ident() == thread else before
            return chosen(*args, **named)

        return call

    vars(router).update({name: dispatched(name) for name in own})
    try:
        yield
    finally:
        for name in own:
            del vars(router)[name]


class _Added(torch.autograd.Function):
    """Logits as they are; the backward adds the gradients of the losses."""

    @staticmethod
    def forward(ctx, logits, scores, squares, balancing, layer, owners):
        ctx.of_call = balancing, layer, owners
        ctx.dtypes = scores.dtype, squares.dtype
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, gradient):
        balancing, layer, owners = ctx.of_call
        scale = moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
        scale = 1.0 if scale is None else scale.double()
        of_scores = balancing.of_scores[layer, owners] * scale
        of_squares = balancing.of_squares[owners] * scale
        scores, squares = ctx.dtypes
        return gradient, of_scores.to(scores), of_squares.to(squares), None, None, None
