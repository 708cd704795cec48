"""A GPTModel as the passes of a step see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from ..errors import ArgumentError
from ..hf.support import ModelView
from .context_shards import Shards
from .hidden import Hidden
from .mixers import GPTMixers
from .routers import COUNTS_OF_ROUTERS, Routers


class Logits(NamedTuple):
    """What a pass returns, ``[1, rows, width]``: logits of this rank's part of the vocabulary. Of a
    pipeline stage before the last, hidden states."""

    logits: torch.Tensor


@dataclass(frozen=True)
class GPTView(ModelView):
    """A GPTModel and its layers, on one rank of a tensor-parallel group: the whole of it, or a
    pipeline stage. Figures are the rank's."""

    hidden: Hidden = field(default_factory=Hidden)

    selects_logits = False

    def run(self, tokens, positions, arguments, logits_rows=None):
        gpt = self.model
        padded_tokens, padded_positions = self.own_mixers.padded(tokens, positions)
        if not gpt.pre_process:
            like = next(self.layers[0].parameters())
            width = gpt.config.hidden_size
            own_tokens = self.own_mixers.own_part(padded_tokens)
            gpt.set_input_tensor(self.hidden.take_received(like, own_tokens, width))
        try:
            output = gpt(
                input_ids=padded_tokens[None],
                position_ids=padded_positions[None],
                attention_mask=None,
            )
        finally:
            # Of no later pass, and no change of the model.
            gpt.set_input_tensor(None)
        if not gpt.post_process:
            self.hidden.returned = output
            if gpt.config.sequence_parallel and not self.hidden.is_sent:
                # Each rank has the losses of all rows, so their gradients are no sum over ranks.
                output = gather_from_sequence_parallel_region(
                    output, tensor_parallel_output_grad=False, group=gpt.pg_collection.tp
                )
            output = output.transpose(0, 1)
        return Logits(output[:, : len(tokens)])

    def read_buffers(self):
        for name, buffer in self.model.named_buffers():
            if name.rpartition(".")[2] not in COUNTS_OF_ROUTERS:
                yield buffer

    def forget(self):
        self.hidden.returned = None
        for module in self.model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                _drop_graph(dispatcher)

    def run_dense(self, tokens, **arguments):
        with self.own_mixers.dense():
            return self.run(tokens, torch.arange(len(tokens), device=tokens.device), arguments)

    def log_probabilities(self, logits, labels, temperature):
        if temperature != 1.0:
            raise ArgumentError(f"temperature is {temperature}; accepted: 1.0")
        # Megatron's own, over all parts of the vocabulary: [rows, 1, part] and [1, rows].
        return -self.model.compute_language_model_loss(labels[None], logits.unsqueeze(1))[0]

    @property
    def _attention(self) -> torch.nn.Module:
        return self.layers[0].self_attention

    @property
    def heads(self):
        return self._attention.num_attention_heads_per_partition

    @property
    def kv_heads(self):
        return self._attention.num_query_groups_per_partition

    @property
    def head_dim(self):
        return self._attention.hidden_size_per_attention_head

    @property
    def embedding(self):
        # A later stage has none. In its place stands what runs first.
        if self.model.pre_process:
            return self.model.embedding.word_embeddings
        return self.layers[0].input_layernorm

    @property
    def vocab_size(self):
        return self.model.vocab_size


def view_of(gpt: GPTModel, routers: Routers, shards: Shards) -> GPTView:
    """Returns the model with its layers. ``shards``: of prompts, with context parallelism."""
    hidden = Hidden()
    own_mixers = GPTMixers(gpt, routers, shards, hidden)
    layers = tuple(gpt.decoder.layers)
    return GPTView(gpt, layers, _config_of(gpt), own_mixers=own_mixers, hidden=hidden)


def _config_of(gpt: GPTModel) -> SimpleNamespace:
    """Returns the model's configuration, with the number of learned positions, which Megatron's
    does not have: a check goes no further."""
    is_learned = gpt.position_embedding_type == "learned_absolute"
    positions = gpt.max_sequence_length if is_learned else None
    return SimpleNamespace(**vars(gpt.config) | {"max_position_embeddings": positions})


def _drop_graph(dispatcher) -> None:
    """Drops what a dispatcher of tokens to experts keeps of the last forward: the next one writes
    it anew. Probabilities have the graph of the layers below."""
    for name, value in list(vars(dispatcher).items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            setattr(dispatcher, name, None)
