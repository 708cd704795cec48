"""One rank of test_precision.py: ``python precision_worker.py DIRECTORY KIND...``, with the
environment of torchrun and :data:`KINDS`. See precision.py."""

from __future__ import annotations

import sys
from pathlib import Path

import models
import test_nemo_rl as nemo_rl
import test_openrlhf as openrlhf
import torch
import torch.distributed as dist
from conftest import a_runtime
from padded_batch import mixed_loss, padded_logits, padded_values
from precision import Case, Gradients, leave
from test_token_scores import padded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dormouse
from dormouse import Group
from dormouse.hf import SharedPrefix

# Added to prompts: what a layer saves of them are blocks that sleep, in BF16 too.
LONGER = 320
MICROBATCH_TOKENS = 9
BATCHES = 3


def spread(model, how: str, case: Case) -> torch.nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    kept = MixedPrecisionPolicy()
    if case.autocast:
        kept = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=kept)
    return fully_shard(model, mp_policy=kept)


def synchronise(model, whether: bool) -> None:
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = whether
    else:
        model.set_requires_gradient_sync(whether)


def a_batch(seed: int):
    """Rows of three prompts, of which one has no response."""
    lengths = [n + LONGER for n in (17, 11, 17, 23, 17)]
    return padded(lengths, [4, 6, 8, 0, 5], seed=seed)


def shared_prefix(model, runtime) -> SharedPrefix | None:
    return None if runtime is None else SharedPrefix(model, runtime)


def score(model, runtime):
    """One differentiable call."""
    shared = shared_prefix(model, runtime)

    def loss_of(seed: int):
        ids, mask, keep = a_batch(seed)
        if shared is None:
            values = padded_values(model, ids, mask, keep)
        else:
            options = {"entropy": True, "microbatch_tokens": MICROBATCH_TOKENS}
            scores = shared.score(ids, mask, keep=keep, **options)
            values = scores.log_probabilities, scores.entropies
        return mixed_loss(*values, mask[:, -keep:])

    return loss_of


def window(model, runtime):
    """Two microbatches that share a window."""
    shared = shared_prefix(model, runtime)

    def loss_of(seed: int):
        ids, mask, keep = a_batch(seed)
        if shared is not None:
            scores = shared.window(ids, mask, keep=keep, entropy=True)
        for part, is_last in ((slice(0, 2), False), (slice(2, None), True)):
            synchronise(model, is_last)
            if shared is None:
                values = padded_values(model, ids[part], mask[part], keep)
            else:
                found = scores.part(part, is_last=is_last)
                values = found.log_probabilities, found.entropies
            loss = mixed_loss(*values, mask[part, -keep:])
            if is_last:
                return loss
            loss.backward()

    return loss_of


def step(model, runtime):
    """Groups, and a loss of each response."""
    shared, members = shared_prefix(model, runtime), ([0, 2, 4], [1])

    def shared_step(seed: int) -> None:
        ids, mask, keep = a_batch(seed)
        rows = [row[kept] for row, kept in zip(ids, mask != 0, strict=True)]
        counts = mask[:, -keep:].sum(1).tolist()
        groups = [
            Group(
                rows[own[0]][: -counts[own[0]]],
                [rows[i][-counts[i] :] for i in own],
                [1.0] * len(own),
            )
            for own in members
        ]
        shared.step(groups, lambda logits, labels, i, g: models.loss_fn(logits.float(), labels, i))

    def loss_of(seed: int):
        ids, mask, keep = a_batch(seed)
        counts, first = mask[:, -keep:].sum(1).tolist(), ids.shape[1] - keep
        logits = padded_logits(model, ids, mask).float()
        return sum(
            models.loss_fn(
                logits[row, first - 1 : first - 1 + counts[row]],
                ids[row, first : first + counts[row]],
                i,
            )
            for own in members
            for i, row in enumerate(own)
        )

    return loss_of if shared is None else shared_step


def actor(model, runtime):
    """OpenRLHF's, of which a stand-in runs."""
    kind = openrlhf.copy_of(openrlhf.StandInActor)
    if runtime is not None:
        dormouse.openrlhf.share(kind, runtime=runtime)
    own = kind(model)

    def loss_of(seed: int):
        ids, actions, mask = openrlhf.a_batch(longer=LONGER, seed=seed)
        asked = {"return_output": True, "return_entropy": True}
        logps, output = own(ids, actions, attention_mask=mask, **asked)
        return openrlhf.loss_of(logps, output.entropy, actions)

    return loss_of


def policy(model, runtime):
    """NeMo-RL's, of which a stand-in runs."""
    module = nemo_rl.a_module()
    if runtime is not None:
        dormouse.nemo_rl.share(module, runtime=runtime)

    def loss_of(seed: int):
        loss, _, _ = module.forward_with_post_processing_fn(
            model=model,
            post_processing_fn=nemo_rl.processors().loss,
            processed_mb=nemo_rl.a_batch(longer=LONGER, seed=seed),
            **nemo_rl.COUNTS,
        )
        return loss

    return loss_of


# By name: what returns a function of a seed, that a loss, or None after a step of its own; and what
# the model is in.
KINDS = {
    "score, ddp": (score, "ddp"),
    "score, fully_shard": (score, "fully_shard"),
    "window, ddp": (window, "ddp"),
    "window, fully_shard": (window, "fully_shard"),
    "step, ddp": (step, "ddp"),
    "step, fully_shard": (step, "fully_shard"),
    "OpenRLHF, ddp": (actor, "ddp"),
    "NeMo-RL, fully_shard": (policy, "fully_shard"),
}


def take_whole(model) -> dict[str, torch.Tensor]:
    """Returns the gradients, cleared from the model."""
    found = models.take_gradients(model)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with a_runtime(256 << 20) as runtime:
        for name in names:
            kind, how = KINDS[name]

            def gradients_of(case: Case, way: str, model: torch.nn.Module) -> Gradients:
                model = spread(model, how, case)
                loss_of = kind(model, runtime if way == "shared" else None)
                autocasts = case.autocast and how == "ddp"
                found = []
                for batch in range(BATCHES):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                        loss = loss_of(10 * batch + rank)
                    if loss is not None:
                        loss.backward()
                    found.append(take_whole(model))
                return found

            leave(directory, runtime, gradients_of, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
