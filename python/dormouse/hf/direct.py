"""Attention that layers compute by torch's function, without transformers' attention registry.

While a thread is inside :class:`use`, ``scaled_dot_product_attention`` of its layers goes to a
step's attention, like the registry's. The step applies causality by its own schedule, so a mask
must say just that: windows, biases and padding in a mask are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention import Rules
from .hooked_mode import LayerMode
from .registry import Attend, AttentionCall, autocast
from .support import UnsupportedModelError

# The attention implementation under which transformers' layers call torch's function.
IMPLEMENTATION = "sdpa"


class use(LayerMode):
    """Context: torch's attention in this thread's ``layers`` goes to ``attend``."""

    def __init__(self, layers: Sequence[torch.nn.Module], attend: Attend):
        super().__init__(layers)
        self._attend = attend
        self._causal: tuple[torch.Tensor, int] | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not scaled_dot_product_attention or self.layer is None:
            return function(*args, **kwargs)
        return self._attention(*args, **kwargs)

    def _attention(
        self,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        name = type(self.layer).__name__
        if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{name} attends with a query of shape {list(query.shape)} over keys "
                f"{list(key.shape)}; accepted: [1, heads, tokens, width], as many keys as queries"
            )
        if dropout_p:
            raise UnsupportedModelError(f"attention dropout {dropout_p}; accepted: 0")
        is_plain = is_causal and attn_mask is None
        if not is_plain and not self._is_causal(attn_mask, query.shape[2]):
            raise UnsupportedModelError(
                f"{name} passes a mask to its attention that is not causal alone; accepted: no "
                "window, bias or padding in it"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = autocast(query, key, value)
        return self._attend(AttentionCall(self.layer, query, key, value, Rules(float(scale)), None))

    def _is_causal(self, mask: torch.Tensor | None, tokens: int) -> bool:
        if mask is None:
            return tokens == 1
        if self._causal is not None and self._causal[0] is mask:
            # The same mask in every layer: one comparison, which waits for the device.
            return self._causal[1] == mask._version
        if mask.shape[-2:] != (tokens, tokens):
            return False
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        if mask.dtype is torch.bool:
            says_so = mask == seen
        else:
            says_so = torch.where(seen, mask == 0, mask <= torch.finfo(mask.dtype).min)
        if bool(says_so.all()):
            self._causal = mask, mask._version
        return self._causal is not None and self._causal[0] is mask
