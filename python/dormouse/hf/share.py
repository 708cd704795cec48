"""The share of a rank in :func:`dormouse.ranks.agree` for a shared-prefix step."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from .. import _native as native
from ..group import Group
from ..ranks import Share
from ..schedule import Plan
from .batch import GroupBatch
from .exchange import ExchangeReport
from .miniature import Reach
from .outputs import Request
from .sharding import ReplicatedWeights
from .step_report import StepReport
from .support import ModelView

@dataclass
class RanksReport:
    """Results of one rank in a step of all ranks."""

    loss: float
    """This rank's sum over its own groups."""
    groups: list[StepReport]
    """Results of the rank's groups, in their order."""
    dummy_microbatches: int
    """Microbatches run only to match other ranks: one token each, no loss, zero gradients."""
    dummy_groups: int
    """Groups run only to match other ranks; ``dummy_microbatches`` includes their microbatches."""
    microbatch_tokens: int
    """The minimum over ranks."""
    ranks: int
    exchange: ExchangeReport | None = None
    """What was exchanged; None without the option."""


# Version of the passes of a step: ranks with different versions refuse each other.
PASSES_VERSION = 4


def of(
    model: torch.nn.Module,
    view: ModelView,
    weights: ReplicatedWeights,
    plans: Sequence[Plan],
    *,
    microbatch_tokens: int,
    probes: int,
    check_reach: Reach | None,
    has_trees: bool,
    exchange: str,
    request: Request,
) -> Share:
    """Returns this rank's share. ``plans``: one per group, under ``microbatch_tokens``. ``probes``:
    number of probe steps the rank needs. ``check_reach``: of the check it needs. ``has_trees``: see
    :class:`dormouse.ranks.Share`. ``exchange``: the option of the step. ``request``:
    what losses read."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Share(
        must_match={
            "versions": f"dormouse {native.library().dormouse_get_version():#x}, passes "
            f"{PASSES_VERSION}, torch {torch.__version__}, transformers {transformers.__version__}",
            "model": f"{view.config.model_type}, {len(view.layers)} layers",
            "weights": _short(weights.description),
            "prompt_dropout": str(view.prompt_dropout),
            "trainable numbers": str(trainable),
            "parameters": _parameters(model),
            "losses read": request.description,
            "exchange": exchange,
        },
        budgets={"microbatch_tokens": operator.index(microbatch_tokens)},
        microbatches=tuple(map(microbatches_of, plans)),
        probes=probes,
        check_tokens=None if check_reach is None else check_reach.tokens,
        check_rows=0 if check_reach is None else check_reach.rows,
        passes_hold_collectives=weights.passes_hold_collectives,
        has_trees=has_trees,
    )


def microbatches_of(plan: Plan) -> int:
    """Returns the number of microbatches of the plan."""
    return plan.passes().count("microbatch")


def dummy_batch() -> GroupBatch:
    """Returns the smallest group with all passes: three tokens, weight 0."""
    return GroupBatch(Group([0, 0], [[0]], [0.0]))


# Characters of a description that are sent; longer ones are cut and a digest is appended.
_DESCRIPTION_CHARS = 120


def _short(description: str) -> str:
    if len(description) <= _DESCRIPTION_CHARS:
        return description
    return f"{description[:_DESCRIPTION_CHARS]}… (sha256 {_digest(description)})"


def _parameters(model: torch.nn.Module) -> str:
    """Returns names, shapes, dtypes and trainability of parameters, which determine gathers and
    reductions."""
    rows = [
        f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    return f"{len(rows)} (sha256 {_digest(json.dumps(rows))})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
