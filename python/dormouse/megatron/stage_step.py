"""Passes of a part of the model whose hidden states are from and for other parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..hf.step import Step
from ..schedule import Op


@dataclass(frozen=True)
class _SentRows:
    """In the place of rows that losses read: what the next stage read, and its gradient."""

    live: list[torch.Tensor]
    gradients: list[torch.Tensor]

    def seeds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.live, self.gradients, strict=True))


class StageStep(Step):
    """A step whose ops run one by one, with hidden states from and for other stages."""

    def probe(self, *, is_cut: bool) -> None:
        """Finds the probes of the prompt and, if it ``is_cut``, of chunks that follow others: their
        passes have hidden states of their own."""
        for is_inner in (False, True) if is_cut else (False,):
            self._find_probe(is_inner, self._batch.request)

    def prefix_forward(self, op: Op) -> None:
        """Runs phase A."""
        self._prefix_forward(op)

    def microbatch_forward(self, op: Op):
        """Returns what the stage computes for the rows of a microbatch, and where its scores are in
        it."""
        return self._packed_output(op)

    def dummy_forward(self, node: int) -> torch.Tensor:
        """Runs the forward of a dummy microbatch that follows ``node``; returns its logits."""
        return self._dummy_logits(node)

    def microbatch_backward(self, node: int, roots: list, seeds: list) -> None:
        """Runs the backward of a microbatch that follows ``node``."""
        # Of a frozen stage they have no graph.
        pairs = [each for each in zip(roots, seeds, strict=True) if each[0].requires_grad]
        with self._accepting(node):
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))

    def prefix_backward(self, op: Op, roots: list, seeds: list) -> dict:
        """Runs phase C; returns the runtime's report of the prefix. ``roots``: what it begins with
        beside K and V."""
        if any(root.requires_grad for root in roots):
            self._live[op.node].forward.rows = _SentRows(roots, seeds)
        self._prefix_backward(op.node, is_last=False)
        return self._report.prefixes[-1]
