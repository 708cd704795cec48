"""Batches with a prompt that is too short to be shared: they run as in the trainer, on every rank.

A trainer's own forward and backward hold other collectives than a shared call, or the same in
another order, so ranks of one model do the one or the other together.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist

from ..group import PROMPT_TOKENS_MIN
from ..hf import deepspeed_engine, sharding

_log = logging.getLogger(__name__)


def has_short(lengths: torch.Tensor, prompt_lengths: torch.Tensor) -> bool:
    """Returns whether a row with a response has a prompt that cannot be shared. Both: of rows."""
    is_short = (lengths > prompt_lengths) & (prompt_lengths < PROMPT_TOKENS_MIN)
    return bool(is_short.any())


def on_any_rank(model: torch.nn.Module, holds: bool, device: torch.device) -> bool:
    """Returns whether it holds on any rank that calls ``model``, with its wrappers, together with
    this one. A collective of these."""
    flag = torch.tensor(int(holds), device=device)
    for group in _groups(model):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


@functools.cache
def note(trainer: str) -> None:
    """Logs once that such a batch came."""
    _log.warning(
        "a batch with a prompt of fewer than %d tokens runs as in %s", PROMPT_TOKENS_MIN, trainer
    )


def _groups(model: torch.nn.Module) -> list[dist.ProcessGroup]:
    """Returns the process groups of the ranks that call the model together."""
    if deepspeed_engine.is_engine(model):
        # Without a graph its ranks wait for each other only where they gather weights.
        is_joint = torch.is_grad_enabled() or deepspeed_engine.gathers(model)
        return [model.seq_data_parallel_group] if is_joint else []
    if sharding.sharded_modules(model):
        return sharding.groups_of(model)
    return []
