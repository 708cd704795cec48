"""A small mixture of experts whose routing rounding does not change.

In BF16 about 9 % of the choices of a router flip between any two runs (docs/method.md §10), and a
flipped choice moves gradients farther than rounding does. So each token chooses its experts by
itself, as in hash layers: :data:`EXPERTS` channels of the residual stream carry a code of the token,
no layer writes to them, and routers read little else.
"""

from __future__ import annotations

import torch
from models import VOCAB, tiny

EXPERTS = 6
CHOSEN = 2
# Of a code: of the first and the second expert.
CODE = (4.0, 2.0)
ROUTER_WEIGHT = 0.75
ROUTER_NOISE = 0.01


def steady_moe(dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    """A Qwen3-MoE of which each token chooses two of six experts."""
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 48}
    model = tiny("qwen3_moe", dtype, seed, **(sizes | {"norm_topk_prob": True} | changes))
    with torch.no_grad():
        code = model.model.embed_tokens.weight[:, :EXPERTS]
        code.zero_()
        tokens = torch.arange(VOCAB)
        first = tokens % EXPERTS
        second = (first + 1 + (tokens // EXPERTS) % (EXPERTS - 1)) % EXPERTS
        code[tokens, first], code[tokens, second] = CODE
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:EXPERTS] = 0
            layer.mlp.experts.down_proj[:, :EXPERTS] = 0
            router = layer.mlp.gate.weight
            router.mul_(ROUTER_NOISE / float(router.std()))
            router[:, :EXPERTS] = ROUTER_WEIGHT * torch.eye(EXPERTS)
    if dtype is torch.float64:
        # The grouped products of experts have no FP64 kernel.
        model.set_experts_implementation("eager")
    return model
