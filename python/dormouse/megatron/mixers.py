"""Attention of a GPTModel's layers during a pass, and its rotary embedding by position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt import GPTModel

from ..hf import registry, substitutes
from ..hf.attention import Packed, Rules
from ..hf.mixers import Handlers, Route
from .routers import LastRouter, Routers


class GPTMixers:
    """What mixes tokens in the layers of a GPTModel. Their core attention is replaced for the
    thread of a pass; Megatron's own returns no log-sum-exp."""

    route = Route.OWN
    are_recurrent = False

    def __init__(self, gpt: GPTModel, routers: Routers):
        self._gpt, self.routers = gpt, routers
        self._cores = [layer.self_attention.core_attention for layer in gpt.decoder.layers]
        self._rows_of_shards = gpt.pg_collection.tp.size() if gpt.config.sequence_parallel else 1
        self._rows = 0

    @property
    def ends_at_keys(self) -> bool:
        """See :class:`dormouse.hf.mixers.Mixers`."""
        return not self.routers.end_prefixes

    def rows_of_prefix(self) -> LastRouter | None:
        """See :class:`dormouse.hf.mixers.Mixers`."""
        return self.routers.last

    def are_recurrent_in(self, layer: torch.nn.Module) -> bool:
        """Returns False: every layer is attention."""
        return False

    def select_keys_in(self, layer: torch.nn.Module) -> bool:
        """Returns False: every key is read."""
        return False

    def padded(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns 1-D tensors with as many rows as the ranks of sequence parallelism divide.
        Attention of the pass leaves out the last ones."""
        self._rows = len(rows[0])
        room = -self._rows % self._rows_of_shards
        return [torch.nn.functional.pad(each, (0, room)) for each in rows]

    @contextlib.contextmanager
    def taken_over(
        self,
        handlers: Handlers,
        packed: Packed | None = None,
        prefix_tokens: int = 0,
        experts: None = None,
    ) -> Iterator[dict]:
        """See :meth:`dormouse.hf.mixers.Mixers.taken_over`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.routers.in_pass(is_prefix=packed is None))
            for core in self._cores:
                forward = self._attention(core, handlers.attend)
                stack.enter_context(substitutes.forward(core, forward))
            # Without packed rows Megatron's own positions, from 0 on, are right.
            if packed is not None and self._gpt.position_embedding_type == "rope":
                rotary = self._gpt.rotary_pos_emb
                rows = prefix_tokens + packed.offsets
                forward = self._rotary(rotary.forward, rows)
                stack.enter_context(substitutes.forward(rotary, forward))
            yield {}

    def _attention(self, core: torch.nn.Module, attend: registry.Attend) -> Callable:
        rules = Rules(core.softmax_scale * (core.scale_mask_softmax.scale or 1.0))

        def forward(query, key, value, attention_mask, **named):
            """Shapes are Megatron's: ``[tokens, 1, heads, head_dim]``."""
            columns = (x[: self._rows].permute(1, 2, 0, 3) for x in (query, key, value))
            out = attend(registry.Call(core, *columns, rules, None))
            out = out.transpose(1, 2).reshape(self._rows, 1, -1)
            room = query.shape[0] - self._rows
            return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, room)) if room else out

        return forward

    def _rotary(self, own: Callable, positions: torch.Tensor) -> Callable:
        """Returns a forward of the rotary embedding that ignores the length."""
        # Megatron caches tables by length.
        length = 1 << int(positions.max()).bit_length()

        def forward(*arguments, **named):
            table = own(length)
            (index,) = self.padded(positions)
            return table[index.to(table.device)]

        return forward
