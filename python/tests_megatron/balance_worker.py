"""One rank of test_balance.py: models whose routers balance experts in other states than training,
and losses without a graph.

``python balance_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
what each of :data:`CASES` with this many ranks returns.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import conftest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils

import cases
import expert_counts
from agreement_worker import Calls
from dormouse.megatron.balancing import routers_of
from dormouse.megatron.refusals import unwrapped
from failing_worker import joined, unshared
from in_use import left_by
from models import largest


def routers(calls: Calls) -> list:
    return [each for chunk in calls.chunks for each in routers_of(unwrapped(chunk)) if each]


def difference(plain: cases.Tensors, shared: cases.Tensors) -> dict:
    return {
        "largest": largest(float(each.abs().max()) for each in plain.values()),
        "difference": largest(float((shared[name] - plain[name]).abs().max()) for name in plain),
    }


@dataclass(frozen=True)
class EqualLogits:
    """Scores of all rows are equal, so every rank logs the same z-loss."""

    case: cases.Case

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        with torch.no_grad():
            for router in routers(calls):
                router.weight.zero_()
        found = {}
        for way, function in (("plain", get_forward_backward_func()), ("shared", calls.shared)):
            moe_utils.clear_aux_losses_tracker()
            calls.run(function)
            tracker = moe_utils.get_moe_layer_wise_logging_tracker()
            found[way] = tracker["z_loss"]["values"].clone()
        return found


@dataclass(frozen=True)
class Names:
    """The names under which losses are logged, in the order in which ranks reduce them."""

    case: cases.Case

    def __call__(self, runtime) -> dict:
        calls, found = Calls(self.case, runtime), {}
        for way, function in (("plain", get_forward_backward_func()), ("shared", calls.shared)):
            moe_utils.get_moe_layer_wise_logging_tracker().clear()
            calls.run(function)
            found[way] = list(moe_utils.get_moe_layer_wise_logging_tracker())
        return found


@dataclass(frozen=True)
class Changed:
    """The model is changed before both ways."""

    case: cases.Case
    change: Callable[[Calls], None]

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        self.change(calls)
        gradients, counted = [], []
        for function in (get_forward_backward_func(), calls.shared):
            for router in routers(calls):
                if router.expert_bias is not None:
                    router.expert_bias.zero_()
            calls.run(function)
            gradients.append(cases.gradients(calls.chunks))
            counted.append(dict(expert_counts.COUNTED))
        return difference(*gradients) | {"counted": counted}


@dataclass(frozen=True)
class ConstantLoss:
    """The loss of one microbatch is a constant: Megatron runs no backward of it."""

    case: cases.Case
    number: int | None
    """None: of all microbatches."""
    ranks: tuple[int, ...]
    """Where it is one."""

    def __call__(self, runtime) -> dict:
        calls, found = Calls(self.case, runtime), []
        for function in (get_forward_backward_func(), calls.shared):
            count = iter(range(3))

            def step(data_iterator, model, count=count):
                losses, own = cases.forward_step(self.case, data_iterator, model)
                is_constant = self.number in (None, next(count))
                if not is_constant or dist.get_rank() not in self.ranks:
                    return losses, own
                return losses, lambda given: (torch.zeros([]), {"loss": torch.zeros([])})

            calls.run(function, forward_step_func=step)
            found.append(cases.gradients(calls.chunks))
        return difference(*found)


@dataclass(frozen=True)
class ForwardOnly:
    """A call without a backward, where gradients are enabled: Megatron's routers do not know that
    none follows."""

    case: cases.Case
    unshared_ranks: tuple[int, ...] = ()
    """Whose rows share no prompt."""
    evaluates: bool = False
    """Whether the model is in evaluation mode."""

    def __call__(self, runtime) -> dict:
        calls, found = Calls(self.case, runtime), {}
        # Prompts sleep in a backward alone.
        calls.run(calls.shared)
        for chunk in calls.chunks:
            chunk.train(not self.evaluates)
        batches = cases.batches_of()
        if dist.get_rank() in self.unshared_ranks:
            batches = list(map(unshared, batches))
        for way, function in (("plain", get_forward_backward_func()), ("shared", calls.shared)):
            moe_utils.clear_aux_losses_tracker()
            for router in routers(calls):
                for buffer in counts_of(router).values():
                    buffer.zero_()
            prompts = calls.shared.sharing.prompts
            own = [iter(batches) for _ in calls.chunks]
            logged = calls.run(function, forward_only=True, data_iterator=own)
            found[way] = {
                "losses": [each["loss"] for each in logged],
                "prompts": calls.shared.sharing.prompts - prompts,
                "logged": {
                    name: each["values"].clone()
                    for name, each in moe_utils.get_moe_layer_wise_logging_tracker().items()
                },
                "counts": [
                    {name: each.clone() for name, each in counts_of(router).items()}
                    for router in routers(calls)
                ],
            }
        return found


COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


def counts_of(router) -> cases.Tensors:
    return {name: each for name, each in router.named_buffers() if name in COUNTS}


@dataclass(frozen=True)
class Refused:
    """A call is refused after one that is not."""

    case: cases.Case
    change: Callable[[Calls], None]

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        calls.run(calls.shared)
        self.change(calls)
        return {"error": calls.error()}


def evaluates(calls: Calls) -> None:
    for chunk in calls.chunks:
        chunk.eval()


def first_stage_evaluates(calls: Calls) -> None:
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        evaluates(calls)


def first_chunk_evaluates(calls: Calls) -> None:
    calls.chunks[0].eval()


def layers_evaluate(calls: Calls) -> None:
    for chunk in calls.chunks:
        for layer in unwrapped(chunk).decoder.layers[:2]:
            layer.eval()


def trains_the_head_alone(calls: Calls) -> None:
    for chunk in calls.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_("output_layer" in name or "final_layernorm" in name)


BIASES = cases.EXPERTS | {
    "moe_router_bias_update_rate": 0.05,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
Z_LOSS = cases.EXPERTS | {"moe_z_loss_coeff": 0.2}
SHARE = {"microbatch_tokens": 9}
LOGGED = {
    "context-parallel ranks": EqualLogits(
        cases.Case(2, context_parallel=2, config=Z_LOSS, share=SHARE)
    ),
    "ranks of a sequence": EqualLogits(
        cases.Case(2, 2, config=Z_LOSS | {"sequence_parallel": True}, share=SHARE)
    ),
}
KINDS = cases.BALANCED["moe_router_load_balancing_type"]
ORDERED = {
    "losses in another order": Names(
        cases.Case(
            config=cases.BALANCED | {"moe_router_load_balancing_type": KINDS[::-1]}, share=SHARE
        )
    ),
}
CHANGED = {
    "evaluation mode, biases": Changed(cases.Case(config=BIASES, share=SHARE), evaluates),
    "evaluation mode, losses": Changed(cases.Case(config=cases.BALANCED, share=SHARE), evaluates),
    "evaluation mode, biases, two stages": Changed(
        cases.Case(2, stages=2, config=BIASES, share=SHARE), evaluates
    ),
    "evaluation mode, biases, context": Changed(
        cases.Case(2, context_parallel=2, config=BIASES, share=SHARE), evaluates
    ),
    "the head alone is trained": Changed(
        cases.Case(config=cases.BALANCED, share=SHARE), trains_the_head_alone
    ),
    "the head alone is trained, context": Changed(
        cases.Case(2, context_parallel=2, config=cases.BALANCED, share=SHARE),
        trains_the_head_alone,
    ),
}
CONSTANT = {
    "the last loss": ConstantLoss(cases.Case(share=SHARE), 2, (0,)),
    "all losses of one, overlapped": ConstantLoss(
        cases.Case(
            ddp={"overlap_grad_reduce": True, "bucket_size": 1000},
            share=SHARE | {"graphs": "twice"},
        ),
        None,
        (0,),
    ),
    "the first loss": ConstantLoss(cases.Case(share=SHARE), 0, (0,)),
    "the last loss of context-parallel ranks": ConstantLoss(
        cases.Case(2, context_parallel=2, share=SHARE), 2, (0, 1)
    ),
    "the last loss of a replica, prompts of both": ConstantLoss(
        cases.Case(2, share=cases.ACROSS), 2, (0,)
    ),
}
BALANCED = BIASES | cases.BALANCED
FORWARD_ONLY = {
    "one rank": ForwardOnly(cases.Case(config=BALANCED, share=SHARE)),
    "one rank, evaluation mode": ForwardOnly(cases.Case(config=BALANCED, share=SHARE), (), True),
    "two stages": ForwardOnly(cases.Case(2, stages=2, config=BALANCED, share=SHARE)),
    "two replicas": ForwardOnly(cases.Case(2, config=BALANCED, share=SHARE)),
    "replica 0 shares no prompt": ForwardOnly(
        cases.Case(2, config=BALANCED, share=SHARE), unshared_ranks=(0,)
    ),
}
REFUSED = {
    "the first stage evaluates": Refused(
        cases.Case(2, stages=2, config=cases.BALANCED, share=SHARE), first_stage_evaluates
    ),
    "the first chunk evaluates": Refused(
        cases.Case(
            2,
            stages=2,
            chunks=2,
            config=cases.BALANCED | cases.INTERLEAVED,
            share=SHARE,
        ),
        first_chunk_evaluates,
    ),
    "layers evaluate": Refused(cases.Case(config=cases.BALANCED), layers_evaluate),
}
CASES = LOGGED | ORDERED | CHANGED | CONSTANT | FORWARD_ONLY | REFUSED


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found, ranks = {}, int(os.environ["WORLD_SIZE"])
    with conftest.a_runtime() as runtime:
        for name, case in CASES.items():
            if case.case.ranks == ranks:
                case = dataclasses.replace(case, case=case.case.wide)

                def run(name=name, case=case) -> dict:
                    # A refusal closes process groups.
                    with joined(directory / name, case.case):
                        return case(runtime)

                found[name] = left_by(runtime, run)
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
