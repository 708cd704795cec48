"""Tiny random models, groups and the dense loop that the shared step is held against."""

from __future__ import annotations

import random
import types
from collections.abc import Iterable

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dormouse import Conversation, Group

VOCAB = 97
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Not run in FP64 as they are: steady_moe.py.
EXPERTS = {"qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}


def tiny(kind: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    """A small model of ``kind``. FP64 models compute norms in FP64 too (transformers casts to
    FP32 inside), so that FP64 comparisons can be held to 1e-10."""
    config_class, model_class = (KINDS | EXPERTS)[kind]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**(settings | changes))).to(dtype)
    for parameter in model.parameters():
        # The initial scale is so small that attention is nearly uniform: errors would hide.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    if dtype is torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_exact_norm, module)
    return model


def _exact_norm(self, x):
    variance = x.pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


def group(prompt: int = 37, lengths=(5, 1, 9, 3), weights=None, seed: int = 1) -> Group:
    """A random group; weights default to uneven ones of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(0, VOCAB, (n,), generator=generator)

    if weights is None:
        weights = [(-1) ** i * (0.4 + 0.3 * i) for i in range(len(lengths))]
    return Group(tokens(prompt), [tokens(n) for n in lengths], weights)


def loss_fn(logits, labels, i):
    """Differs per response, so that mixing responses up is seen."""
    return torch.nn.functional.cross_entropy(logits, labels) * (1 + 0.3 * i)


def dense_backward(model, group, loss_fn=loss_fn) -> float:
    """The ordinary way: every response with its whole prompt. Returns the total loss."""
    total = 0.0
    for i, response in enumerate(group.responses):
        tokens = torch.cat([group.prompt, response[:-1]]).unsqueeze(0)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden[len(group.prompt) - 1 :])
        loss = group.weights[i] * loss_fn(logits, response, i)
        loss.backward()
        total += float(loss.detach())
    return total


def token_losses(logits, labels, i, positions):
    """Differs by conversation and position, so that mixing either up is seen."""
    assert len(logits) == len(labels) == len(positions)
    scale = 1 + 0.3 * i + 0.1 * torch.arange(positions.start, positions.stop).sin()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses * scale.to(losses)


def dense_tree_backward(model, conversations, loss=token_losses) -> float:
    """Every conversation by itself, through the model's own forward."""
    total = 0.0
    for i, each in enumerate(conversations):
        if not each.used_tokens or each.weight == 0.0:
            continue
        logits = model(input_ids=each.tokens.unsqueeze(0), use_cache=False).logits[0]
        total_loss = sum(
            loss(logits[a - 1 : b - 1], each.tokens[a:b], i, range(a, b)).sum()
            for a, b in each.labels
        )
        (each.weight * total_loss).backward()
        total += each.weight * float(total_loss.detach())
    return total


def conversations(seed: int, count: int = 9, longest: int = 60) -> list[Conversation]:
    """Conversations with nested ends, duplicates, gaps in their labels and weights of both signs;
    the first are single roots."""
    drawn = random.Random(seed)
    sequences = [[drawn.randrange(VOCAB) for _ in range(drawn.randint(2, 30))] for _ in range(2)]
    while len(sequences) < count - 1:
        kept = drawn.choice(sequences)
        kept = kept[: drawn.randint(1, len(kept))]
        more = [drawn.randrange(VOCAB) for _ in range(drawn.choice([0, 0, 1, 4, 20]))]
        sequences.append((kept + more)[:longest])
    sequences.append(list(sequences[2]))
    found = []
    for ids in sequences:
        places = range(1, len(ids) + 1)
        cuts = sorted(drawn.sample(places, k=min(4, len(places)) // 2 * 2))
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))
        found.append(Conversation(ids, spans, drawn.uniform(-1, 2)))
    return found


def take_gradients(model) -> dict[str, torch.Tensor]:
    """The model's gradients by name, cleared from the model; absent ones are left out."""
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def largest(values: Iterable[float]) -> float:
    """The largest value, or NaN if one is NaN: ``max`` drops a NaN that is not the first."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def distance(got: dict, wanted: dict) -> float:
    """Relative L2 distance over all parameters; infinite where the sets of names differ."""
    if got.keys() != wanted.keys():
        return float("inf")
    error = sum(float(((got[n].double() - wanted[n].double()) ** 2).sum()) for n in wanted)
    norm = sum(float((wanted[n].double() ** 2).sum()) for n in wanted)
    return (error / norm) ** 0.5
