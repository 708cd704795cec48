"""Ranks of a model compare what they are about to run, before the first pass.

Stages carry out lists that fit together, and passes of tensor-parallel ranks hold collectives. A
rank with a different plan would wait for a message that no rank sends, or receive other rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from .. import _native as native
from .. import ranks
from ..hf.padded import Places
from .balancing import GLOBAL, adds_losses, balances, coefficients_of
from .batches import Microbatch, shape_of
from .context import dummy_of, is_context_parallel
from .refusals import settings_of
from .replicas import Dealt, Replicas
from .shared_gpt import (
    SharedGPT,
    all_hold,
    is_expert_parallel,
    joint_group,
    largest,
    model_groups,
)

# Of a digest: what an error shows.
DIGEST_CHARS = 12


def compare_plans(
    microbatches: Sequence[Microbatch],
    places: Sequence[Places] | None,
    options: dict,
    forward_only: bool,
    gpt: GPTModel,
    replicas: Replicas | None = None,
    dealt: Sequence[Dealt] = (),
) -> None:
    """Compares what determines the passes of a call over the ranks of a model. Collective.

    ``microbatches``: with whole rows. ``places``: None if no prompt is shared. ``options``: of a
    window. ``replicas``: those that share prompts with this one; ``dealt``: what it may run of
    theirs.

    Raises :class:`dormouse.ranks.RanksDifferError` on every rank if they differ.
    """
    rows, columns = shape_of(microbatches)
    share = ranks.Share(
        must_match=_versions()
        | {
            "microbatches": f"{len(microbatches)} of {rows} rows, {columns} columns",
            "direction": _direction(forward_only),
            "balanced experts": str(balances(gpt)),
            "prompts": "none is shared" if places is None else _described(places),
            "options": ", ".join(f"{name}={value!r}" for name, value in sorted(options.items())),
            "rows of replicas": " or ".join(each.digest[:DIGEST_CHARS] for each in dealt)
            or "their own",
        },
        budgets={},
        microbatches=(),
    )
    groups = model_groups(gpt)
    if replicas is not None:
        groups = [*groups, replicas.group]
    for group in groups:
        _agree(group, share, gpt)


def compare_calls(
    is_across: bool, forward_only: bool, microbatches: int, has_ended: bool, gpt: GPTModel
) -> None:
    """Compares what a call is, before it waits for anything else of other ranks. Over replicas:
    whether it has a backward, whether prompts are shared by rows of all, and the number of
    microbatches where routers sum the counts of each. Over all ranks: whether the data ended.
    Collective.

    Raises :class:`dormouse.ranks.RanksDifferError` on every rank of replicas, or of a model, that
    differ.
    """
    data = {"data": "no batch left" if has_ended else "batches"}
    must_match = {"across_replicas": str(is_across), "direction": _direction(forward_only)} | data
    if sums_over_replicas(gpt):
        must_match[f"microbatches with {GLOBAL}"] = str(microbatches)
    share = ranks.Share(must_match, budgets={}, microbatches=())
    _agree(parallel_state.get_data_parallel_group(), share, gpt)
    for group in model_groups(gpt):
        _agree(group, ranks.Share(data, budgets={}, microbatches=()), gpt)


def compare_shapes(microbatches: Sequence[Microbatch], gpt: GPTModel) -> None:
    """Compares the shapes of a call's batches over the ranks that have the tokens of the same rows.
    Collective.

    Raises :class:`dormouse.ranks.RanksDifferError` on every rank if they differ.
    """
    shapes = [tuple(each.tokens.shape) for each in microbatches]
    rows, columns = shape_of(microbatches)
    described = f"{len(shapes)} of {rows} rows, {columns} columns"
    must_match = {
        "microbatches": f"{described} (sha256 {ranks.digest(shapes)[:DIGEST_CHARS]})"
    }
    for group in model_groups(gpt):
        _agree(group, ranks.Share(must_match, budgets={}, microbatches=()), gpt)


def _agree(group: dist.ProcessGroup, share: ranks.Share, gpt: GPTModel) -> None:
    try:
        ranks.agree(group, share, next(gpt.parameters()).device)
    except ranks.RanksDifferError:
        # A rank that raises ends the waits of the others, one that is still reading included.
        with contextlib.suppress(RuntimeError):
            dist.barrier(group)
        raise


def all_share(
    chunks: Sequence[torch.nn.Module], gpt: GPTModel, shares: bool, forward_only: bool
) -> bool:
    """Returns whether the call shares prompts: ``shares``, and that of every replica of an
    expert-parallel group, and of all if their gradients are reduced as they arrive, or experts
    balanced over all. Collective of these.

    ``chunks``: parts of the model in their wrappers. ``gpt``: one of them, without.
    """
    if is_expert_parallel(gpt):
        shares = all_hold(gpt, shares)
    # Megatron's routers sum counts over replicas in forwards, too.
    if not (sums_over_replicas(gpt) or (overlaps(chunks) and not forward_only)):
        return shares
    # Gradients of shared passes arrive in another order than Megatron's, and so do reductions.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return all_hold(gpt, shares, group)


def sums_over_replicas(gpt: GPTModel) -> bool:
    """Returns whether routers sum the counts of a microbatch over replicas in its forward."""
    has_losses = torch.is_grad_enabled() and adds_losses(gpt)
    return has_losses and GLOBAL in coefficients_of(gpt.config)


def overlaps(chunks: Sequence[torch.nn.Module]) -> bool:
    """Returns whether gradients are reduced as they arrive. ``chunks``: in their wrappers."""
    return any(getattr(settings_of(each), "overlap_grad_reduce", False) for each in chunks)


def joint_places(
    shared: SharedGPT,
    gpt: GPTModel,
    places: list[Places],
    row: int,
    options: dict,
    forward_only: bool,
) -> list[Places]:
    """Returns groups with as many passes as those of every replica of an expert-parallel group:
    this rank's own, the one with the most microbatches first, then dummies. Collective of these.

    ``row``: of the values, for dummies. ``options``: of a window.

    Raises :class:`dormouse.ranks.RanksDifferError` on every rank if they cannot run together.
    """
    own = {name: value for name, value in options.items() if name != "microbatch_tokens"}
    microbatches = shared.microbatches(places, options["microbatch_tokens"])
    if is_context_parallel(gpt):
        # Its ranks have the same prompts, which they run at the same time.
        microbatches = largest(gpt, microbatches, gpt.pg_collection.cp)
    passes = ranks.Share(
        must_match=_versions() | {"direction": _direction(forward_only), "options": repr(own)},
        budgets={},
        microbatches=microbatches,
    )
    agreement = ranks.agree(joint_group(gpt), passes, next(gpt.parameters()).device)
    return [
        dataclasses.replace(
            dummy_of(row) if slot.group is None else places[slot.group],
            microbatches=slot.microbatches,
        )
        for slot in agreement.slots
    ]


def _versions() -> dict[str, str]:
    library = native.library().dormouse_get_version()
    return {"versions": f"dormouse {library:#x}, torch {torch.__version__}"}


def _direction(forward_only: bool) -> str:
    has_backward = not forward_only and torch.is_grad_enabled()
    return "forward and backward" if has_backward else "forward only"


def _described(places: Sequence[Places]) -> str:
    digest = hashlib.sha256()
    for each in places:
        sequences = (each.group.prompt, *each.group.responses)
        digest.update(repr((list(map(len, sequences)), each.rows, each.indices)).encode())
        for tokens in sequences:
            digest.update(tokens.to(torch.int64).numpy().tobytes())
    count = sum(len(each.rows) for each in places)
    return f"{len(places)} of {count} rows (sha256 {digest.hexdigest()[:DIGEST_CHARS]})"
