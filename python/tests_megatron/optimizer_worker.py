"""One rank of test_optimizer.py, over gloo.

``python optimizer_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: of each of :data:`CASES` with as many ranks, what :func:`trained` returns, by way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import conftest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.overrides import TorchFunctionMode

import cases
import dormouse.megatron
from dormouse.runtime import Runtime

UPDATES = 5
# Of each update, as cases.batches_of() makes them.
MICROBATCHES = 3
# A fraction of the norms of all updates: each is clipped.
CLIP = 0.1
SHARDED = {"ddp": {"use_distributed_optimizer": True}}
CASES = {
    "two replicas": cases.Case(2, **SHARDED),
    "two stages of two replicas": cases.Case(
        4, stages=2, share={"microbatch_tokens": 9}, **SHARDED
    ),
}
PLAIN, SHARED = WAYS = ("plain", "shared")


class DoubleAsFloat(TorchFunctionMode):
    """Tensors of FP64 name the type of FP32: Megatron's optimizer steps either, and accepts the
    name of one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and len(args) == 1:
            return found.replace("DoubleTensor", "FloatTensor")
        return found


def trained(case: cases.Case, runtime: Runtime | None) -> dict:
    """Returns the losses and norms of each update, and the parameters before the first and after
    the last. ``runtime``: with shared prompts."""
    chunks, function = cases.chunks_of(case), get_forward_backward_func()
    if runtime is not None:
        function = dormouse.megatron.share(function, runtime=runtime, **case.share)
    settings = OptimizerConfig(lr=1e-3, clip_grad=CLIP, **case.ddp)
    optimizer = get_megatron_optimizer(settings, chunks)
    assert all(isinstance(x, DistributedOptimizer) for x in optimizer.chained_optimizers)
    found = {"losses": [], "norms": [], "before": parameters(chunks)}
    for update in range(UPDATES):
        optimizer.zero_grad()
        logged = cases.run(case, function, chunks, cases.batches_of(update))
        found["losses"] += [float(each["loss"]) for each in logged]
        succeeded, norm, _ = optimizer.step()
        assert succeeded
        found["norms"].append(norm)
    found["after"] = parameters(chunks)
    if runtime is not None:
        found["sharing"] = function.sharing.rows, function.sharing.prompts
    return found


def parameters(chunks: list) -> cases.Tensors:
    """Returns copies of this rank's parameters."""
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime, DoubleAsFloat():
        for name, case in CASES.items():
            if case.ranks != int(conftest.os.environ["WORLD_SIZE"]):
                continue
            cases.join(case)
            found[name] = {
                way: trained(case, runtime if way == SHARED else None) for way in WAYS
            }
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
