"""verl's FSDP worker on a CPU, over gloo. verl 0.9.1 has platforms for accelerators alone, and
registers its engine for them; its own registries take another.

    with on_cpu.process_group():
        actor = on_cpu.worker("a directory with a model")
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(self, *arguments):
    return None


@PlatformRegistry.register("cpu")
class Cpu(PlatformBase):
    """A CPU as verl's platform."""

    device_name = "cpu"
    vendor_name = "any"
    # What verl asks of torch.cuda.
    device_module = SimpleNamespace(
        current_device=lambda: 0,
        get_device_name=lambda *ordinal: "CPU",
        is_available=lambda: True,
        max_memory_allocated=lambda *ordinal: 0,
        max_memory_reserved=lambda *ordinal: 0,
        memory_allocated=lambda *ordinal: 0,
        memory_reserved=lambda *ordinal: 0,
        mem_get_info=lambda *ordinal: (0, 0),
        empty_cache=lambda: None,
        synchronize=lambda *ordinal: None,
    )
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = manual_seed_all = _nothing

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def get_device_capability(self, ordinal=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "DORMOUSE_NO_DEVICES"

    def nvtx_range(self, text):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False


from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithLMHead)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Context of a process group; of one rank, unless the environment says otherwise."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in (alone | {"MASTER_PORT": port}).items():
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def worker(path, *, model=(), engine=(), actor=(), optimizer=()) -> TrainingWorker:
    """Returns verl's actor worker of a model in a directory. The rest: settings that differ."""
    engine_config = {
        "strategy": "fsdp2",
        "mixed_precision": FP32,
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 2,
    }
    model_config = {
        "load_tokenizer": False,
        "override_config": {"attn_implementation": "sdpa"},
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
    }
    optimizer_config = {"lr": 1e-3, "total_training_steps": 100, "lr_warmup_steps": 0}
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(path), **(model_config | dict(model))),
            engine_config=FSDPEngineConfig(**(engine_config | dict(engine))),
            optimizer_config=FSDPOptimizerConfig(**(optimizer_config | dict(optimizer))),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    losses = {"strategy": "fsdp2", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 2}
    made.set_loss_fn(partial(ppo_loss, config=ActorConfig(**(losses | dict(actor)))))
    return made
