"""Runs of verl's actor worker on tiny random models, with and without shared prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import on_cpu
import torch
from exact_layers import exact_layers
from models import VOCAB, tiny
from verl.utils import tensordict_utils
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import dormouse.verl

FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "buffer_dtype": "fp64"}
# Of every row, in shuffled order: which prompt, and the response's length. The batch is split into
# two mini-batches.
ROWS = ((0, 4), (1, 6), (0, 1), (2, 8), (1, 3), (0, 5), (1, 2), (0, 7))
PROMPTS = (17, 11, 9)


def saved(directory, **changes):
    """A directory with a tiny model."""
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    tiny("llama", torch.float64, **special, **changes).save_pretrained(directory)
    return directory


def exact(monkeypatch) -> None:
    """FP64 throughout: verl has no name for it, and the CPU no autocast to it."""
    exact_layers(monkeypatch)
    own = PrecisionType.to_dtype
    monkeypatch.setattr(
        PrecisionType,
        "to_dtype",
        staticmethod(lambda name: torch.float64 if name == "fp64" else own(name)),
    )


def batch_of(
    rows=ROWS,
    *,
    prompts=PROMPTS,
    seed: int = 3,
    temperature=0.8,
    tools: bool = False,
    nested: bool = False,
):
    """A batch as verl's trainer has it, in the layout that its workers get. ``tools``: some tokens
    of responses are not the model's. ``nested``: prompts and responses without padding."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(2, VOCAB, (n,), generator=generator) for n in prompts]
    left, right = max(prompts), max(length for _, length in rows)
    shape = (len(rows), left + right)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for row, (prompt, length) in enumerate(rows):
        start = left - len(texts[prompt])
        ids[row, start:left] = texts[prompt]
        ids[row, left : left + length] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, start : left + length] = 1
    losses = mask[:, left:].clone()
    if tools:
        losses[:, 1:3] = 0
    drawn = {"generator": generator, "dtype": torch.float64}
    noise = [torch.randn(losses.shape, **drawn) for _ in range(3)]
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": losses,
        "prompts": ids[:, :left],
        "responses": ids[:, left:],
        "advantages": noise[0],
        "old_log_probs": -4 + noise[1],
        "ref_log_prob": -4 + noise[2],
    }
    data = left_right_2_no_padding(
        tensordict_utils.get_tensordict(batch, {"temperature": temperature})
    )
    if nested:
        for name, places in (("prompts", slice(None, left)), ("responses", slice(left, None))):
            own, has = ids[:, places], mask[:, places] != 0
            parts = [row[kept] for row, kept in zip(own, has, strict=True)]
            data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return data


@dataclass
class Run:
    """What a run left."""

    log_probs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    gradients: list[dict] = field(default_factory=list)
    metrics: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    sharing: dormouse.verl.Sharing | None = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def run(
    monkeypatch, directory, *, runtime=None, batch=(), updates=(), options=(), **settings
) -> Run:
    """Log-probabilities of a batch, then two updates. ``runtime``: of shared prompts; None: verl as
    it is. ``settings``: of :func:`on_cpu.worker`."""
    worker = made(monkeypatch, directory, runtime=runtime, options=options, **settings)
    left = Run()
    step = worker.engine.optimizer_step

    def recorded():
        parameters = worker.engine.module.named_parameters()
        left.gradients.append({n: whole(p.grad) for n, p in parameters if p.grad is not None})
        return step()

    worker.engine.optimizer_step = recorded
    data = batch_of(**dict(batch))
    asked = data.copy()
    tokens = data["input_ids"].offsets().diff().tolist()
    tensordict_utils.assign_non_tensor(
        asked, compute_loss=False, calculate_entropy=True, global_token_num=tokens
    )
    found = worker.infer_batch(asked)
    left.log_probs = no_padding_2_padding(found["log_probs"], asked)
    left.entropies = no_padding_2_padding(found["entropy"], asked)
    asked = {"calculate_entropy": True, "epochs": 2, "dataloader_kwargs": {"shuffle": True}}
    size = len(data) // 2 * torch.distributed.get_world_size()
    asked |= {"global_batch_size": size, "mini_batch_size": size, "seed": 5, **dict(updates)}
    tensordict_utils.assign_non_tensor(data, **asked)
    left.metrics = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
    left.weights = {n: whole(p.detach()) for n, p in worker.engine.module.named_parameters()}
    left.sharing = getattr(worker.engine, "sharing", None)
    return left


def made(monkeypatch, directory, *, runtime=None, options=(), **settings):
    """Returns verl's worker."""
    key = ("cpu", "any")
    engines = EngineRegistry._engines["language_model"]["fsdp2"]
    if runtime is None:
        monkeypatch.delitem(engines, key, raising=False)
    else:
        shared = dormouse.verl.share(FSDPEngineWithLMHead, runtime=runtime, **dict(options))
        monkeypatch.setitem(engines, key, shared)
    settings["engine"] = {"model_dtype": "fp64", "mixed_precision": FP64} | dict(
        settings.get("engine", ())
    )
    # Of adapters.
    torch.manual_seed(1)
    worker = on_cpu.worker(directory, **settings)
    module = worker.engine.module
    if settings["engine"]["model_dtype"] == "fp64" and hasattr(module.config, "num_experts"):
        # The grouped products of experts have no FP64 kernel.
        module.set_experts_implementation("eager")
    return worker


def differences(got: dict, wanted: dict, tolerance: float) -> list[str]:
    """Returns what differs in the metrics; times and memory aside. A metric that is
    not finite in either run counts as different."""
    found = []
    for key in sorted(got.keys() | wanted.keys()):
        if key.startswith("perf/") or key == "mfu":
            continue
        ours, own = flat(got.get(key)), flat(wanted.get(key))
        if len(ours) != len(own) or any(
            not abs(a - b) <= tolerance * max(1.0, abs(b)) < math.inf
            for a, b in zip(ours, own, strict=True)
        ):
            found.append(f"{key} is {ours}, of verl {own}")
    return found


def flat(value) -> list[float]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in flat(part)]
    if hasattr(value, "aggregate"):
        return flat(value.aggregate())
    return [float(value)]
