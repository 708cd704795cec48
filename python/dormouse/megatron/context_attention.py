"""Attention of models whose rows are on several context-parallel ranks."""

from __future__ import annotations

import copy

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from ..trainers.refusals import UnsupportedTrainerError


class ContextAttention(DotProductAttention):
    """Core attention of a model with context parallelism, in the place of Megatron's
    DotProductAttention, which refuses it::

        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = ContextAttention

    It runs in shared passes alone: a call of the model outside them raises
    :class:`UnsupportedTrainerError`. Without context parallelism it is Megatron's.
    """

    def __init__(self, config: TransformerConfig, *args, **named):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **named)
        self.config = config

    def forward(self, *args, **named):
        """See Megatron's. Raises :class:`UnsupportedTrainerError` with context parallelism."""
        if self.config.context_parallel_size > 1:
            raise UnsupportedTrainerError(
                "the model is called outside shared passes with context_parallel_size "
                f"{self.config.context_parallel_size}, and its attention sees the keys of this "
                "rank's tokens alone; accepted: calls for the batches of a shared schedule, with "
                "gradients"
            )
        return super().forward(*args, **named)
