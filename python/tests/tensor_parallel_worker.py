"""One rank of test_tensor_parallel.py.

``python tensor_parallel_worker.py DIRECTORY`` runs all :data:`CASES` and leaves what this rank
found in ``CASE.RANK`` there.
"""

from __future__ import annotations

import datetime
import sys
import types
from collections.abc import Callable
from pathlib import Path

import models
import torch
import torch.distributed as dist
from conftest import a_runtime
from test_token_scores import a_batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers.distributed import DistributedConfig

from dormouse import Runtime
from dormouse.hf import SharedPrefix, UnsupportedModelError, graph

LAYERS = {"num_hidden_layers": 2}
LONG_GROUP = {"prompt": 300, "lengths": (5, 1, 9)}
OPTIONS = {
    "temperature": 0.7,
    "entropy": True,
    "outputs": ["last_hidden_state"],
    "microbatch_tokens": 7,
}


def planned(kind: str, directory: Path):
    """A model of :func:`models.tiny`, split by transformers' own plan."""
    whole, path = models.tiny(kind, **LAYERS), directory / kind
    if dist.get_rank() == 0:
        whole.save_pretrained(path)
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = type(whole).from_pretrained(path, dtype=torch.float64, distributed_config=config)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
            module.forward = types.MethodType(models._exact_norm, module)
    return model


def parallelized(mesh=None, **options):
    """The same, split by torch's own function."""
    model = models.tiny(**LAYERS, **options)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    plan = {f"self_attn.{name}": ColwiseParallel() for name in columns}
    plan |= {f"self_attn.{name}": RowwiseParallel() for name in rows}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {"mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def whole_gradients(model) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad, parameter.grad = parameter.grad, None
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def score(model, runtime: Runtime, graphs: str) -> dict:
    """Two calls whose gradients add up."""
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(1))
    for _ in range(2):
        scores = shared.score(ids, mask, keep=keep, graphs=graphs, **OPTIONS)
        loss = loss_of(scores.log_probabilities, scores.entropies, mask[:, -keep:])
        (loss + scores.last_hidden_state.sin().sum()).backward()
    with torch.no_grad():
        alone = shared.score(ids, mask, keep=keep, **OPTIONS)
    return {
        "graphs": scores.graphs,
        "counts": scores.counts,
        "hooks": len(seen) / len(list(model.parameters())),
        "values": scores.log_probabilities.detach(),
        "alone": alone.log_probabilities,
        "gradients": whole_gradients(model),
    }


def backward(model, runtime: Runtime, sleep: bool) -> dict:
    report = SharedPrefix(model, runtime, sleep=sleep).backward(
        models.group(**LONG_GROUP), models.loss_fn
    )
    return {"prefix": report.prefix, "gradients": whole_gradients(model)}


def of_one_rank(runtime: Runtime) -> dict:
    """Steps between which the model changes on one rank alone. Its code is that of transformers, so
    that lengths matter while one rank has a hook."""
    model = parallelized(dtype=torch.float32)
    shared, is_first = SharedPrefix(model, runtime), dist.get_rank() == 0
    ids, mask, keep = a_batch()
    found, reasons = [], []

    def run(graphs: str | None = None) -> None:
        if graphs is None:
            checked = shared.backward(models.group(**LONG_GROUP), models.loss_fn).checked
        else:
            scores = shared.score(ids, mask, keep=keep, graphs=graphs)
            scores.log_probabilities.sum().backward()
            checked = scores.checked
        found.append(whole_gradients(model))
        reasons.append(checked.reason)

    run()
    if is_first:
        model.note = 1
    run()
    run("kept")
    if is_first:
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *of_call: None)
    run("kept")
    run()
    if is_first:
        handle.remove()
    run("twice")
    run("kept")
    run()
    scores = shared.score(ids, mask, keep=keep, graphs="twice")
    if is_first:
        model.note = 2
    refusal = refused(lambda: scores.log_probabilities.sum().backward())
    return {"gradients": found, "reasons": reasons, **refusal}


def tree(model, runtime: Runtime) -> dict:
    SharedPrefix(model, runtime).backward(models.conversations(4), models.token_losses)
    return {"gradients": whole_gradients(model)}


def saved() -> dict:
    """Whether the walk finds what a split linear layer alone saved."""
    mlp, seen = parallelized().model.layers[0].mlp, []

    def see(module, args):
        seen.append(args[0].untyped_storage().data_ptr())

    # Before torch's own hook, which makes a DTensor of the input.
    mlp.down_proj.register_forward_pre_hook(see, prepend=True)
    hidden = torch.randn(1, 7, 96, dtype=torch.float64, requires_grad=True)
    found = graph.collect([mlp(hidden)], set())
    return {"is_found": seen[0] in found.storages.values()}


def refused(work: Callable[[], object]) -> dict:
    try:
        work()
    except UnsupportedModelError as error:
        return {"error": str(error)}
    return {}


def a_score(model, runtime: Runtime):
    ids, mask, keep = a_batch()
    return SharedPrefix(model, runtime).score(ids, mask, keep=keep)


def a_step(model, runtime: Runtime):
    return SharedPrefix(model, runtime).step([models.group()], lambda *arguments: 0.0)


def in_both(runtime: Runtime):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = parallelized(mesh["tp"])
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["dp"])
    return a_step(model, runtime)


CASES: dict[str, Callable[[Path, Runtime], dict]] = {
    "llama_kept": lambda path, runtime: score(planned("llama", path), runtime, "kept"),
    "llama_twice": lambda path, runtime: score(planned("llama", path), runtime, "twice"),
    "qwen2_auto": lambda path, runtime: score(planned("qwen2", path), runtime, "auto"),
    "torch_kept": lambda path, runtime: score(parallelized(), runtime, "kept"),
    "awake": lambda path, runtime: backward(planned("llama", path), runtime, False),
    "asleep": lambda path, runtime: backward(planned("llama", path), runtime, True),
    "one rank": lambda path, runtime: of_one_rank(runtime),
    "saved": lambda path, runtime: saved(),
    "tree": lambda path, runtime: tree(planned("llama", path), runtime),
    "qwen3": lambda path, runtime: refused(lambda: a_score(planned("qwen3", path), runtime)),
    "step": lambda path, runtime: refused(lambda: a_step(planned("llama", path), runtime)),
    "fully_shard": lambda path, runtime: refused(lambda: in_both(runtime)),
}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    # Ranks that run different passes wait for each other.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    with a_runtime(256 << 20) as runtime:
        for name, case in CASES.items():
            torch.save(case(directory, runtime), directory / f"{name}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
