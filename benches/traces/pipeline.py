"""One stage of a pipeline under the interleaved 1F1B schedule, without its neighbours."""

from __future__ import annotations

from collections import deque

import torch
from dormouse.headline.models import config_of
from dormouse.headline.shapes import Geometry
from interleaved import CHUNKS, order
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

TOKENS = 4096


class Stage:
    """Layers, optimizer, and what is in flight."""

    def __init__(self, geometry: Geometry):
        config = config_of(geometry)
        layers = range(geometry.layers)
        with torch.device("meta"):
            made = torch.nn.ModuleList(LlamaDecoderLayer(config, i) for i in layers)
            made = made.to(torch.bfloat16)
        self._layers = made.to_empty(device="cuda").train()
        with torch.device("cuda"):
            self._rotary = LlamaRotaryEmbedding(config)
        per_chunk = geometry.layers // CHUNKS
        self._chunks = [self._layers[i * per_chunk : (i + 1) * per_chunk] for i in range(CHUNKS)]
        self._optimizer = torch.optim.AdamW(self._layers.parameters(), lr=1e-5)
        self._shape = (1, TOKENS, geometry.hidden)
        self._positions = torch.arange(TOKENS, device="cuda").unsqueeze(0)
        # Activations come from below and gradients from above, each by its own collective.
        self._from_below, self._from_above = torch.cuda.Stream(), torch.cuda.Stream()
        self._flight: list[deque] = [deque() for _ in range(CHUNKS)]

    def step(self) -> None:
        """Every microbatch forward and backward, then the update."""
        for kind, chunk in order():
            if kind == "forward":
                self._forward(chunk)
            else:
                self._backward(chunk)
        torch.nn.utils.clip_grad_norm_(self._layers.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _receive(self, stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            buffer = torch.empty(self._shape, dtype=torch.bfloat16, device="cuda")
        buffer.record_stream(torch.cuda.current_stream())
        return buffer

    def _forward(self, chunk: int) -> None:
        received = self._receive(self._from_below).requires_grad_()
        hidden = received
        rotary = self._rotary(hidden, self._positions)
        for layer in self._chunks[chunk]:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=self._positions)
        self._flight[chunk].append((received, hidden))

    def _backward(self, chunk: int) -> None:
        received, hidden = self._flight[chunk].popleft()
        torch.autograd.backward(hidden, self._receive(self._from_above))
        # The gradient goes to the stage below and is let go with the buffer it belongs to.
        del received, hidden
