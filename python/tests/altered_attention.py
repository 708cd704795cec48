"""Alterations of attention, positions and inputs; see ``altered_models.py``."""

from __future__ import annotations

import math
import types

import torch
import transformers.models.llama.modeling_llama as llama
from altered_models import HIDDEN, NOT_EXACT, WIDE, exact, number, refused, wrap
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def softmax_attention(query, key, value, scaling, change=lambda scores: scores):
    """Causal attention over all keys at once, with ``change(scores)``."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = change(query @ key.transpose(-1, -2) * scaling)
    rows = query.shape[2]
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ value
    return out.transpose(1, 2).contiguous()


def distances(scores) -> torch.Tensor:
    """Rows between query and key."""
    rows = torch.arange(scores.shape[-1])
    return rows[:, None] - rows


def use_attention(model, patch, change) -> None:
    """Registers an attention function of the trainer's own, and selects it."""

    def attention(module, query, key, value, mask, scaling=None, **others):
        return softmax_attention(query, key, value, scaling, change), None

    patch.setitem(AttentionInterface._global_mapping, "own", attention)
    patch.setitem(AttentionMaskInterface._global_mapping, "own", sdpa_mask)
    model.config._attn_implementation = "own"


@exact
def registered_attention_that_is_softmax(model, patch):
    use_attention(model, patch, lambda scores: scores)


@refused(NOT_EXACT)
def registered_soft_cap(model, patch):
    use_attention(model, patch, lambda scores: 2 * torch.tanh(scores / 2))


@refused(NOT_EXACT)
def registered_linear_biases(model, patch):
    use_attention(model, patch, lambda scores: scores - 0.2 * distances(scores))


@refused(NOT_EXACT)
def registered_window(model, patch):
    use_attention(model, patch, lambda s: s.masked_fill(distances(s) >= 30, -math.inf))


@refused(NOT_EXACT)
def registered_scale_by_length(model, patch):
    use_attention(model, patch, lambda scores: scores * math.log(scores.shape[-1] + 1))


def windowed_attention(module, query, key, value, mask, scaling=None, **others):
    def change(scores):
        return scores.masked_fill(distances(scores) >= 30, -math.inf)

    return softmax_attention(query, key, value, scaling, change), None


def windowed_mask(*arguments, mask_function, **options):
    def in_window(batch, head, query, key):
        return query - key < 30

    options |= {"allow_is_causal_skip": False}
    return sdpa_mask(*arguments, mask_function=and_masks(mask_function, in_window), **options)


@refused(NOT_EXACT)
def assigned_attention(model, patch):
    # As ALL_ATTENTION_FUNCTIONS["sdpa"] = ..., which leaves what is registered as it is.
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", windowed_attention)
    model.config._attn_implementation = "sdpa"


@refused(NOT_EXACT)
def assigned_attention_of_the_file(model, patch):
    own = AttentionInterface()
    own["sdpa"] = windowed_attention
    patch.setattr(llama, "ALL_ATTENTION_FUNCTIONS", own)
    model.config._attn_implementation = "sdpa"


@exact
def assigned_mask(model, patch):
    # One response at a time: by the model's own masks.
    patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", windowed_mask)
    model.config._attn_implementation = "sdpa"


@exact
def registered_mask(model, patch):
    patch.setitem(AttentionMaskInterface._global_mapping, "sdpa", windowed_mask)
    model.config._attn_implementation = "sdpa"


@exact
def eager_attention(model, patch):
    # transformers' own function computes its softmax in FP32.
    patch.setattr(torch, "float32", torch.float64)
    model.config._attn_implementation = "eager"


def rewrite_attention(model, attend) -> None:
    """Replaces the forward of every attention by one that calls ``attend(self, q, k, v, mask)``."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **others):
        rows = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        out = attend(self, query, key, value, attention_mask)
        return self.o_proj(out.reshape(*rows, -1)), None

    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)


def through_the_interface(**arguments):
    """Attention with arguments, through transformers' interface or by :func:`softmax_attention`."""

    def own(module, query, key, value, mask, scaling, softcap=None, sliding_window=None, **others):
        def change(scores):
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sliding_window:
                scores = scores.masked_fill(distances(scores) >= sliding_window, -math.inf)
            return scores

        return softmax_attention(query, key, value, scaling, change), None

    def attend(self, query, key, value, mask):
        function = AttentionInterface().get_interface(self.config._attn_implementation, own)
        return function(self, query, key, value, mask, scaling=self.scaling, **arguments)[0]

    return attend


@exact
def soft_cap_through_the_interface(model, patch):
    model.config._attn_implementation = "eager"
    rewrite_attention(model, through_the_interface(softcap=2.0))


@exact
def window_through_the_interface(model, patch):
    model.config._attn_implementation = "eager"
    rewrite_attention(model, through_the_interface(sliding_window=8))


@refused("LlamaAttention passes 'temperature' to its attention")
def an_unknown_argument_through_the_interface(model, patch):
    model.config._attn_implementation = "sdpa"
    rewrite_attention(model, through_the_interface(temperature=2.0))


@refused(r"layer 0 \(LlamaDecoderLayer\) runs no attention through .*AttentionInterface")
def attention_past_the_interface(model, patch):
    def attend(self, query, key, value, mask):
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)

    rewrite_attention(model, attend)


@exact
def torch_attention_patched(model, patch):
    inner = functional.scaled_dot_product_attention
    patch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda query, key, value, *args, **named: inner(query, 1.5 * key, value, *args, **named),
    )


@refused("more than once in a layer")
def attention_run_twice(model, patch):
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(*args, **named):
        first, second = inner(*args, **named), inner(*args, **named)
        return first[0] + 0.5 * second[0], *first[1:]

    attention.forward = forward


@refused("config.is_causal is False")
def a_bidirectional_config(model, patch):
    model.config.is_causal = False


@refused("LlamaAttention is not causal")
def a_bidirectional_module(model, patch):
    model.model.layers[1].self_attn.is_causal = False


@exact
def keys_and_values_detached(model, patch):
    layers = model.model.layers
    for module in (layers[0].self_attn.v_proj, layers[1].self_attn.k_proj):
        module.register_forward_hook(lambda module, args, output: output.detach())


@exact
def values_of_the_first_layer_added(model, patch):
    kept = {}

    def keep(module, args, output):
        kept["value"] = output

    layers = model.model.layers
    layers[0].self_attn.v_proj.register_forward_hook(keep)
    for layer in layers[1:]:
        layer.self_attn.v_proj.register_forward_hook(
            lambda module, args, output: output + 0.5 * kept["value"]
        )


@exact
def attention_without_gradients(model, patch):
    attention = model.model.layers[-1].self_attn
    inner = attention.forward
    attention.forward = torch.no_grad()(lambda *args, **named: inner(*args, **named))


@refused("attention_dropout 0.1")
def attention_dropout_in_the_config(model, patch):
    model.config.attention_dropout = 0.1
    model.train()


@refused("attention dropout 0.1")
def attention_dropout_in_a_module(model, patch):
    model.model.layers[1].self_attn.attention_dropout = 0.1
    model.train()


# Positions.


def change_rotary(model, change) -> None:
    """``change(cos, sin, position_ids)`` returns the tables."""
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: change(*inner(x, position_ids), position_ids)


@exact
def positions_doubled(model, patch):
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, 2 * position_ids)


@refused(r"the first module whose output differs is model\.layers\.0\.self_attn|a patched forward")
def a_rotary_table_by_length(model, patch):
    change_rotary(model, lambda cos, sin, ids: (cos * (1 + 0.01 * (ids.max() + 1)), sin))


@refused(NOT_EXACT)
def a_rotary_table_beyond_40_tokens(model, patch):
    change_rotary(model, lambda cos, sin, ids: (cos * 1.1 if ids.max() >= 40 else cos, sin))


@refused("rotary scaling 'dynamic' depends on each trajectory's length")
def rotary_scaling_in_the_config(model, patch):
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@refused(NOT_EXACT)
def a_rotary_function_patched(model, patch):
    inner = llama.apply_rotary_pos_emb

    def rotate(query, key, *args, **named):
        query, key = inner(query, key, *args, **named)
        return query, key * (1 + 0.01 * query.shape[2])

    patch.setattr(llama, "apply_rotary_pos_emb", rotate)


@exact
def positions_of_the_caller_embedded(model, patch):
    table = model.model.positions = nn.Embedding(512, HIDDEN, **WIDE)
    inner = model.model.forward

    def forward(input_ids=None, position_ids=None, inputs_embeds=None, **named):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        embeds = model.model.embed_tokens(input_ids) + table(position_ids)
        return inner(inputs_embeds=embeds, position_ids=position_ids, **named)

    model.model.forward = forward


@refused(NOT_EXACT)
def positions_of_rows_embedded(model, patch):
    table = model.model.positions = nn.Embedding(512, HIDDEN, **WIDE)
    wrap(
        model.model.embed_tokens, lambda out, ids: out + table(torch.arange(ids.shape[1]))[None]
    )


@exact
def packed_positions_shifted(model, patch):
    inner = model.model.forward

    def forward(*args, position_ids=None, **named):
        if position_ids is not None and (position_ids[0].diff() != 1).any():
            position_ids = 2 * position_ids
        return inner(*args, position_ids=position_ids, **named)

    model.model.forward = forward


# Inputs.


@refused(NOT_EXACT + "|the shared step fails")
def a_soft_prompt(model, patch):
    soft = model.soft = nn.Parameter(number(1, 3, HIDDEN))
    inner = model.model.forward

    def forward(input_ids=None, position_ids=None, inputs_embeds=None, **named):
        embeds = torch.cat([soft, model.model.embed_tokens(input_ids)], 1)
        output = inner(inputs_embeds=embeds, **named)
        output.last_hidden_state = output.last_hidden_state[:, 3:]
        return output

    model.model.forward = forward


@exact
def a_soft_vector_on_every_token(model, patch):
    soft = model.soft = nn.Parameter(number(HIDDEN))
    wrap(model.model.embed_tokens, lambda out, ids: out + soft)


@refused(NOT_EXACT)
def padding_masked_by_its_token(model, patch):
    model.config.pad_token_id = 0
    inner = model.model.forward

    def forward(input_ids=None, **named):
        named["attention_mask"] = (input_ids != 0).long()
        return inner(input_ids=input_ids, **named)

    model.model.forward = forward


@refused("passes an attention mask of its own")
def a_mask_of_four_dimensions(model, patch):
    inner = model.model.forward

    def forward(input_ids=None, **named):
        rows = input_ids.shape[1]
        mask = torch.zeros(1, 1, rows, rows, **WIDE)
        named["attention_mask"] = mask.masked_fill(
            torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf
        )
        return inner(input_ids=input_ids, **named)

    model.model.forward = forward
