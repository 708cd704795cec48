"""Linear biases of attention (ALiBi) by the positions of keys.

Bloom, MPT and Falcon add a bias to scores that is linear in the place of a key. In a pass keys of
several responses lie behind each other, and two keys of equal position have equal biases.
transformers' functions that build biases have these names in all its models.
"""

from __future__ import annotations

import torch

from . import calls

_OF_MASK = "build_alibi_tensor"
BUILDERS = frozenset({_OF_MASK, "build_mpt_alibi_tensor"})


def build(call: calls.FunctionCall, positions: torch.Tensor) -> torch.Tensor:
    """Returns the biases that ``call`` would build, ``[..., keys]``. ``positions``: of the keys."""
    count = int(positions.max()) + 1
    args = call.args
    if call.name == _OF_MASK:
        # It counts the tokens of a mask, of which only a padding mask is one.
        args = (args[0].new_ones((1, count), dtype=torch.int64), *args[1:])
    built = call.function(*args, **call.kwargs)
    # Those of the last tokens: softmax is the same after any shift.
    return built[..., (built.shape[-1] - count + positions).to(built.device)]
