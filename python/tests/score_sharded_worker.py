"""One rank of test_score_sharded.py: ``python score_sharded_worker.py DIRECTORY``, with the
environment of torchrun, leaves ``CASE.RANK`` there: what the test looks at, or the error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from conftest import a_runtime
from score_sharded_cases import CASES, REFUSED, Case, batch_of, model_of, own_loss, row_losses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor

from dormouse import Group
from dormouse.hf import SharedPrefix, sharding
from dormouse.hf.step import LivePrefix
from dormouse.trainers import short_prompts


def placed(model, how: str) -> torch.nn.Module:
    if how == "FSDP1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    options = {
        "columns": {"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "gathered": {"reshard_after_forward": False},
    }.get(how, {})
    if how in ("replicated", "hooked"):
        options["mesh"] = mesh_of(dist.get_world_size(), 1)
    if how == "hybrid":
        options["mesh"] = mesh_of(1, dist.get_world_size())
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if how == "split norm":
        own = distribute_tensor(inner.model.norm.weight.detach(), mesh_of(2, 1)["replicate"])
        inner.model.norm.weight = torch.nn.Parameter(own)
    if how in ("without the norm", "split norm"):
        options["ignored_params"] = set(inner.model.norm.parameters())
    for layer in inner.model.layers if how != "root only" else ():
        if how == "nested":
            fully_shard(layer.mlp)
            fully_shard(layer.self_attn)
        narrow = how == "policies" and layer is inner.model.layers[0]
        policy = MixedPrecisionPolicy(param_dtype=torch.float32 if narrow else None)
        fully_shard(layer, mp_policy=policy, **options)
    if how == "every level":
        fully_shard([inner.model.norm, inner.lm_head])
        fully_shard(inner.model)
    fully_shard(model, **options)
    if how == "hooked":
        model.set_all_reduce_hook(lambda output: None)
    if how == "divided":
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(5.0)
    return model


def mesh_of(replicas: int, shards: int):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Run:
    """One case on this rank."""

    def __init__(self, case: Case, rank: int, runtime):
        self.case, self.rank = case, rank
        model = model_of(case)
        if case.how == "unused":
            model.extra = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.model = placed(model, case.spread)
        self.shared = SharedPrefix(self.model, runtime)
        self.ids, self.mask, self.keep = batch_of(case, rank)
        self.options = {"keep": self.keep, "entropy": True, "microbatch_tokens": 7}

    def scores(self):
        return self.shared.score(self.ids, self.mask, graphs=self.case.graphs, **self.options)

    def loss(self, change: Callable = lambda loss: loss) -> torch.Tensor:
        scores = self.scores()
        values = scores.log_probabilities, scores.entropies
        return change(row_losses(*values, self.mask[:, -self.keep :]).sum())

    def one_call(self):
        self.loss().backward()

    def window(self):
        window = self.shared.window(
            self.ids, self.mask, graphs=self.case.graphs, **self.options
        )
        for part, is_last in ((slice(1, None), False), (slice(0, 1), True)):
            scores = window.part(part, is_last=is_last)
            values = scores.log_probabilities, scores.entropies
            row_losses(*values, self.mask[part, -self.keep :]).sum().backward()

    def accumulated(self):
        for synchronises in (False, True):
            self.model.set_requires_gradient_sync(synchronises)
            self.one_call()

    def together(self):
        first, second = self.loss(), self.loss()
        (first + second).backward()

    def own_forward(self):
        own_loss(self.model, self.ids, self.mask, self.keep).backward()
        self.one_call()

    def own_in_one(self):
        loss = self.loss()
        (loss + own_loss(self.model, self.ids, self.mask, self.keep)).backward()

    def own_first_in_one(self):
        own = own_loss(self.model, self.ids, self.mask, self.keep)
        (own + self.loss()).backward()

    def forward_between(self):
        loss = self.loss()
        with torch.no_grad():
            self.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        loss.backward()

    def hidden_states(self):
        """Hooks by which transformers returns them come with the first call and stay."""
        self.options["outputs"] = ["last_hidden_state"]
        self.scores()
        for _ in range(2):
            self.one_call()
        found = self.model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
        assert len(found.hidden_states) == 4

    def frozen_between(self):
        loss = self.loss()
        self.model.requires_grad_(False)
        with torch.no_grad():
            self.scores()
        self.model.requires_grad_(True)
        loss.backward()

    def unused(self):
        self.one_call()
        assert self.model.extra.weight.grad is None

    def agreement(self):
        """What holds on one rank holds on both."""
        device = self.shared.device
        assert short_prompts.on_any_rank(self.model, self.rank == 1, device)
        assert not short_prompts.on_any_rank(self.model, False, device)
        self.one_call()

    def foreach(self):
        loss = self.loss()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(self.model.parameters(), foreach=True).step()
        loss.backward()

    def waiting(self):
        loss = self.loss()
        self.model.set_requires_gradient_sync(False)
        own_loss(self.model, self.ids, self.mask, self.keep).backward()
        self.model.set_requires_gradient_sync(True)
        loss.backward()

    def error(self):
        with contextlib.suppress(ZeroDivisionError):
            self.loss(lambda loss: loss / (1 // 0))
        self.one_call()

    def error_in_a_pass(self):
        loss = self.loss()
        failing = mock.patch.object(LivePrefix, "backward", lambda *_, **named: 1 // 0)
        with failing, contextlib.suppress(ZeroDivisionError):
            loss.backward()
        assert all(p.grad is None for p in self.model.parameters())
        self.one_call()

    def left(self):
        self.loss()
        self.one_call()

    def no_graph(self):
        with torch.no_grad():
            found = self.scores()
            own = self.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
        assert not found.log_probabilities.requires_grad and own.shape[1] == 3
        self.one_call()

    def step(self):
        """The rows of the batch as groups of one response, whose losses add up to the same."""
        groups, counts = [], self.mask[:, -self.keep :].sum(1).tolist()
        for row, kept, count in zip(self.ids, self.mask != 0, counts, strict=True):
            if count:
                tokens = row[kept]
                groups.append(Group(tokens[:-count], [tokens[-count:]], [1.0]))

        def loss_fn(logits, labels, i, g):
            found = torch.log_softmax(logits, -1)
            logps = found.gather(1, labels[:, None])[:, 0]
            entropies = -(found.exp() * found).sum(-1)
            values = torch.zeros(2, self.keep, dtype=logps.dtype)
            values[0, : len(labels)], values[1, : len(labels)] = logps, entropies
            mask = torch.arange(self.keep)[None] < len(labels)
            return row_losses(values[:1], values[1:], mask).sum()

        self.one_call()
        self.shared.step(groups, loss_fn, microbatch_tokens=7)

    def update(self):
        loss = self.loss()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        loss.backward()

    def result(self) -> dict:
        handed = []
        for name, parameter in self.model.named_parameters():
            # Those of a step see more than one gradient, and are refused there.
            if parameter.requires_grad and self.case.how != "step":
                parameter.register_post_accumulate_grad_hook(lambda p, n=name: handed.append(n))
        getattr(self, self.case.how.replace(" ", "_"))()
        whole = self.shared._whole
        assert all(each.numel() == 0 for each in whole._whole.values()), "memory is held"
        # A forward of the model's own leaves weights gathered, without the gradients of the shards.
        sharding.reshard(self.model)
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        kinds = {type(grad).__name__ for grad in grads.values()}
        gradients = {name: grad.full_tensor() for name, grad in grads.items()}
        return {"gradients": gradients, "handed": handed, "kinds": kinds}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with a_runtime(64 << 20) as runtime:
        for name, case in (CASES | REFUSED).items():
            try:
                result = Run(case, rank, runtime).result()
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
                if name not in REFUSED:
                    raise
            torch.save(result, directory / f"{name}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
