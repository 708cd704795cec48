"""A GPTModel as the passes of a step see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from ..errors import ArgumentError
from ..hf.support import ModelView
from .mixers import GPTMixers


class Logits(NamedTuple):
    """What a pass returns: logits of this rank's part of the vocabulary, ``[1, rows, part]``."""

    logits: torch.Tensor


@dataclass(frozen=True)
class GPTView(ModelView):
    """A GPTModel and its layers, on one rank of a tensor-parallel group. Figures are the rank's."""

    selects_logits = False

    def run(self, tokens, positions, arguments, logits_rows=None):
        padded_tokens, padded_positions = self.own_mixers.padded(tokens, positions)
        logits = self.model(
            input_ids=padded_tokens[None],
            position_ids=padded_positions[None],
            attention_mask=None,
        )
        return Logits(logits[:, : len(tokens)])

    def run_dense(self, tokens, **arguments):
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
        return self.model.embedding.word_embeddings

    @property
    def vocab_size(self):
        return self.model.vocab_size


def view_of(gpt: GPTModel) -> GPTView:
    """Returns the model with its layers."""
    return GPTView(gpt, tuple(gpt.decoder.layers), gpt.config, own_mixers=GPTMixers(gpt))
