"""One rank of the gloo runs in test_ranks_gloo.py: runs every case in order, keeps what came of it.

``python ranks_worker.py RANK DIRECTORY SET``, with SET a name in ranks_cases.py. Results are
files ``CASE.RANK`` in the directory: what the test looks at, or the error.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import models
import ranks_cases
import torch
import torch.distributed as dist
from conftest import a_runtime
from model_zoo import in_fp64
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dormouse import Prefix, ranks
from dormouse.hf import SharedPrefix, check, compiled_layers, exchange, sharding
from dormouse.hf.exchange import Exchange, ReceivedForward
from dormouse.hf.probe import Probe
from dormouse.hf.step import LivePrefix

NVME_FILE_BYTES = 64 << 20
# Of a collective that another rank never enters: far below the test's own limit.
TIMEOUT = datetime.timedelta(seconds=40)
SHORT_TIMEOUT = datetime.timedelta(seconds=2)
COLLECTIVES = (
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_reduce"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)
PROBE = "probe"


def placed(model, how: str) -> torch.nn.Module:
    """The model as a trainer would spread it, or not quite."""
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "FSDP1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    options = {"reshard_after_forward": False} if "gathered" in how else {}
    if how == "FP32":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
    layers = model.model.layers
    if "nested" in how:
        for layer in layers:
            fully_shard(layer.mlp, **options)
            fully_shard(layer.self_attn.k_proj, **options)
    if how == "attention":
        fully_shard(layers[0].self_attn)
    if how != "root only":
        for layer in layers:
            fully_shard(layer, **options)
    if how == "every level":
        fully_shard([model.model.norm, model.lm_head])
        fully_shard(model.model)
    if how == "without the norm":
        options["ignored_params"] = set(model.model.norm.parameters())
    return model if how == "layers only" else fully_shard(model, **options)


class Run:
    """One case on this rank."""

    def __init__(self, case: ranks_cases.Case, rank: int, runtime):
        self.case, self.rank, self.runtime = case, rank, runtime
        self.bare = ranks_cases.model_of(case).train()
        self.groups = ranks_cases.groups_of(case, rank)
        self.loss = ranks_cases.loss_of(rank, case.reads)
        self.options = {"exchange": case.exchange}
        if case.reads:
            self.options["outputs"] = ["last_hidden_state"]
        if "prompt" in case.reads:
            self.options["prompt_outputs"] = ["last_hidden_state"]
            self.options["prompt_loss_fn"] = ranks_cases.prompt_loss_of(rank)
        self.roles: list[str] = []
        self.process_group = None

    def result(self) -> dict:
        """What the test looks at."""
        with contextlib.ExitStack() as stack:
            calls = stack.enter_context(recorded())
            # As if the FP64 models had no patched norms: one check for all lengths.
            stack.enter_context(mock.patch.object(check, "unknown_code", lambda view: None))
            if self.case.reads:
                # The output of the embedding, which transformers returns with hidden states, is a
                # view.
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            self.before_placing(stack)
            self.model = placed(self.bare, self.spread)
            self.shared = SharedPrefix(self.model, self.runtime, sleep=self.case.sleep[self.rank])
            # The check of the model is a step of its own.
            self.shared.step([], self.loss, **self.options)
            self.before_step(stack)
            calls.clear()
            report = self.step(self.loss)
            collectives = [call for call in calls if call[0] != PROBE]
            probes = [count for call, count in calls if call == PROBE]
        return {
            "gradients": gradients(self.model),
            "collectives": collectives,
            "probes": probes,
            "report": report,
            "roles": self.roles,
        }

    def step(self, loss):
        return self.shared.step(
            self.groups,
            loss,
            process_group=self.process_group,
            microbatch_tokens=self.case.microbatch_tokens[self.rank],
            **self.options,
        )

    @property
    def spread(self) -> str:
        differs = self.case.altered == "rank 1 is not sharded" and self.rank == 1
        return "plain" if differs else self.case.spread

    def before_placing(self, stack: contextlib.ExitStack) -> None:
        how, layers = self.case.altered, getattr(getattr(self.bare, "model", None), "layers", [])
        if how == "rank 1 freezes a layer" and self.rank == 1:
            layers[0].requires_grad_(False)
        if how.startswith("checkpointed"):
            self.bare.activation_checkpointing_enable({"use_reentrant": "reentrant" in how})
        if how == "rank 1 has dropout" and self.rank == 1:
            layers[1].extra = torch.nn.Dropout(0.25)
        if how == "rank 1 has much dropout" and self.rank == 1:
            layers[1].add_module("\U0001f4a4" * 2000, torch.nn.Dropout(0.25))
        if how == "rank 1 reads less" and self.rank == 1:
            self.options.pop("prompt_loss_fn")
        if how == "rank 1 asks for no output" and self.rank == 1:
            self.options["outputs"] = ["attentions"]
        if how == "no dummy microbatches" or (
            how == "no dummy microbatches on rank 1" and self.rank == 1
        ):
            stack.enter_context(mock.patch.object(ranks, "_padded", lambda rows: rows[self.rank]))

    def before_step(self, stack: contextlib.ExitStack) -> None:
        how, tokens = self.case.altered, torch.tensor([[1, 2, 3, 4]])
        if how == "weights twice":
            real = Prefix.gradient
            halved = mock.patch.object(Prefix, "gradient", lambda *at: real(*at) * 0.5)
            stack.enter_context(halved)
        if how == "dummy microbatches that count":
            stack.enter_context(mock.patch.object(torch, "zeros_like", torch.ones_like))
        if how == "two steps":
            self.step(self.loss)
        if how == "rank 1 has a generator" and self.rank == 1:
            self.groups = (group for group in self.groups)
        if how == "loss fails first":
            self.groups = self.groups or [models.group()]
            with contextlib.suppress(ZeroDivisionError):
                self.step(failing)
            self.model.zero_grad()
        if how == "a layer fails first":
            with mock.patch.object(Prefix, "mark", failing), contextlib.suppress(ZeroDivisionError):
                self.step(self.loss)
        if how == "forward without gradients":
            with torch.no_grad():
                self.model(input_ids=tokens)
        if how == "forward without backward":
            self.model(input_ids=tokens)
        if how == "a dense step first":
            self.model(input_ids=tokens).logits.sum().backward()
            self.model.zero_grad()
        if how == "gathered in the second step":
            self.step(self.loss)
            self.model.zero_grad()
            self.model.set_reshard_after_forward(False)
        if "gathered" in how + self.case.spread:
            self.loss = self.watching(self.loss)
        if how == "a group of one rank":
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            self.process_group = alone[self.rank]
        if how == "backward":
            self.shared.backward(self.groups[0], models.loss_fn)
        if how == "rank 1 exchanges nothing" and self.rank == 1:
            self.options["exchange"] = False
        if how == f"loss {self.rank} fails":
            self.loss = failing
        if how == f"forward {self.rank} fails":
            stack.enter_context(mock.patch.object(Exchange, "_forward", failing))
        if how == f"backward {self.rank} fails":
            stack.enter_context(mock.patch.object(LivePrefix, "backward", failing))
        if how == f"layout {self.rank} fails":
            stack.enter_context(mock.patch.object(exchange, "Layout", failing))
        if how == "rank 1 dies in loss" and self.rank == 1:
            self.loss = dying
        if how == "rank 1 dies in forward" and self.rank == 1:
            stack.enter_context(mock.patch.object(Exchange, "_forward", dying))
        if how == "rank 1 dies in backward" and self.rank == 1:
            stack.enter_context(mock.patch.object(LivePrefix, "backward", dying))
        if how == "layers stay awake":
            stack.enter_context(mock.patch.object(Probe, "awake", lambda self, layer, saved: None))
            stack.enter_context(mock.patch.object(compiled_layers, "why_awake", lambda *saved: how))
        if how == "sends zeros":
            sent = ReceivedForward.gradients
            zeros = lambda self: [torch.zeros_like(each) for each in sent(self)]
            stack.enter_context(mock.patch.object(ReceivedForward, "gradients", zeros))
        if how == "rank 2 dies" and self.rank == 2:
            self.loss = dying
        if how == "rank 2 stays away":
            self.process_group = dist.new_group(timeout=SHORT_TIMEOUT)
            if self.rank == 2:
                raise InterruptedError("this rank stays away")

    def watching(self, loss):
        """``loss``, noting in phase B what the runtime says of gathered weights."""

        def watching(*args):
            for layer in self.bare.model.layers:
                weight = layer.mlp.up_proj.weight
                if self.case.sleep[self.rank] and type(weight) is torch.nn.Parameter:
                    self.roles.append(self.runtime.query(weight.data_ptr())["role"])
            return loss(*args)

        return watching


def failing(*args, **kwargs):
    raise ZeroDivisionError("an error in the middle of a step")


def dying(*args, **kwargs):
    os._exit(3)


def gradients(model) -> dict[str, torch.Tensor]:
    """Whole gradients by name; a collective for each that is sharded."""
    found = models.take_gradients(sharding.unwrapped(model))
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


@contextlib.contextmanager
def recorded():
    """Inside, the collectives of this rank in order: name, and numbers in the last tensor. A
    probe's backward is among them, with how many parameters it asks for."""
    calls: list[tuple[str, int]] = []

    def recording(name, real):
        def call(*args, **kwargs):
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            calls.append((name, tensors[-1].numel()))
            return real(*args, **kwargs)

        return call

    def grad(loss, inputs, **options):
        calls.append((PROBE, len(inputs)))
        return real_grad(loss, inputs, **options)

    real_grad = torch.autograd.grad
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "grad", grad))
        for name in COLLECTIVES:
            if hasattr(dist, name):
                real = getattr(dist, name)
                stack.enter_context(mock.patch.object(dist, name, recording(name, real)))
        yield calls


def main() -> None:
    rank, directory, cases = int(sys.argv[1]), Path(sys.argv[2]), getattr(ranks_cases, sys.argv[3])
    world = len(next(iter(cases.values())).shares)
    torch.set_num_threads(1)
    # What is passed through sharded modules gives torch no cause to warn of lost hooks.
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    with a_runtime(NVME_FILE_BYTES) as runtime:
        for name, case in cases.items():
            try:
                with in_fp64() if case.kind else contextlib.nullcontext():
                    result = Run(case, rank, runtime).result()
            except Exception as error:
                result = {"error": [kind.__name__ for kind in type(error).__mro__]}
                result["message"] = str(error)
            torch.save(result, directory / f"{name}.{rank}")
    # No goodbye to ranks that may be dead.
    os._exit(0)


if __name__ == "__main__":
    main()
