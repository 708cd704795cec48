"""Configurations of DeepSpeed's engine in which a shared call is held against a padded batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from models import take_gradients, tiny
from padded_batch import mixed_loss, padded_values
from test_token_scores import a_batch

UPDATES = 2
RATE = 0.01
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One configuration, trained for :data:`UPDATES` updates of the optimizer."""

    stage: int
    dtype: torch.dtype = torch.float32
    accumulation: int = 1
    graphs: str = "kept"
    clipping: float = 0.0
    zero: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    direct: bool = False
    """The backward is torch's, not the engine's."""
    sleep: bool = True
    partly_frozen: bool = False
    """The embedding is tied to the head, and a layer is frozen."""
    experts: bool = False
    silent: str = ""
    """Rank 0 has microbatches whose loss depends on no token: ``"masked"``, or ``"empty"``, without
    a response."""

    def is_silent(self, rank: int, update: int, part: int) -> bool:
        """Returns whether a microbatch is one of those. One rank alone has an update of them."""
        is_one = rank == 0 and part == 0 and (update > 0 or self.accumulation > 1)
        return bool(self.silent) and is_one

    @property
    def engine_config(self) -> dict:
        precision = {torch.bfloat16: {"bf16": {"enabled": True}}}
        # Not Adam: it moves every weight by about the rate, whatever its gradient is.
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **precision.get(self.dtype, {}),
            **self.config,
        }


BF16 = torch.bfloat16
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
# Gradients reach FP32 sums whole; a bucket of a few matrices is reduced while the backward runs.
SMALL_BUCKETS = {"reduce_bucket_size": 20_000, "overlap_comm": True}
NO_PERSISTENT = {"stage3_param_persistence_threshold": 0}

CASES = {
    "stage 0": Case(0),
    "stage 0, BF16": Case(0, BF16, graphs="twice"),
    "stage 0, clipped": Case(0, clipping=5.0, accumulation=2, graphs="twice"),
    "stage 1": Case(1),
    "stage 1, accumulated, clipped": Case(1, accumulation=3, clipping=5.0, graphs="twice"),
    "stage 1, BF16": Case(1, BF16, accumulation=2),
    "stage 1, BF16, FP32 sums": Case(1, BF16, accumulation=2, config=FP32_SUMS),
    "stage 2": Case(2, sleep=False),
    "stage 2, FP64": Case(2, torch.float64, graphs="twice"),
    "stage 2, accumulated, clipped": Case(2, accumulation=3, clipping=5.0),
    "stage 2, small buckets": Case(2, accumulation=2, zero=SMALL_BUCKETS, graphs="twice"),
    "stage 2, BF16": Case(2, BF16, accumulation=2, graphs="twice"),
    "stage 2, offload": Case(2, accumulation=2, clipping=5.0, zero=OFFLOAD),
    "stage 2, torch's backward": Case(2, accumulation=2, direct=True),
    "stage 2, autocast": Case(2, config=AUTOCAST),
    "stage 2, timers": Case(2, config={"wall_clock_breakdown": True}),
    "stage 2, partly frozen": Case(2, partly_frozen=True),
    "stage 1, experts": Case(1, experts=True, accumulation=2),
    "stage 2, experts, BF16": Case(2, BF16, experts=True, graphs="twice"),
    "stage 2, experts, autocast": Case(2, experts=True, config=AUTOCAST),
    "stage 3, experts": Case(3, experts=True, zero=NO_PERSISTENT),
    "stage 3, experts, BF16": Case(3, BF16, experts=True, accumulation=2, zero=NO_PERSISTENT),
    "stage 3": Case(3, zero=NO_PERSISTENT),
    "stage 3, accumulated, clipped": Case(
        3, accumulation=3, clipping=5.0, graphs="twice", zero=NO_PERSISTENT
    ),
    "stage 3, persistent weights": Case(3, accumulation=2, graphs="auto"),
    "stage 3, BF16": Case(3, BF16, accumulation=2, zero=NO_PERSISTENT, graphs="twice"),
    "stage 3, partly frozen": Case(3, partly_frozen=True, zero=NO_PERSISTENT, graphs="twice"),
    "stage 3, torch's backward": Case(3, accumulation=2, direct=True, zero=NO_PERSISTENT),
    "stage 3, offload": Case(3, accumulation=2, zero=OFFLOAD | NO_PERSISTENT),
}
CASES |= {
    f"stage {stage}, {silent}, {accumulation} microbatches": Case(
        stage,
        silent=silent,
        accumulation=accumulation,
        graphs="twice",
        zero=NO_PERSISTENT if stage == 3 else {},
    )
    for stage in (1, 2, 3)
    for silent in ("masked", "empty")
    for accumulation in (1, 2)
}


def join_ranks() -> None:
    """Joins the ranks over gloo, or the process group that is there."""
    # Its operators for shared memory would be compiled first, and gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def engine_of(case: Case, model: torch.nn.Module | None = None):
    """``model``: None: that of the case."""
    model = model_of(case) if model is None else model
    engine, *_ = deepspeed.initialize(model=model, config=case.engine_config)
    return engine


def gradients(engine) -> Tensors:
    """Whole reduced gradients."""
    named = engine.module.named_parameters()
    return {name: safe_get_full_grad(p).clone() for name, p in named if p.requires_grad}


def model_of(case: Case) -> torch.nn.Module:
    """The model that the engine is given."""
    return _model(case, case.dtype if case.dtype is torch.float64 else torch.float32)


def true_model_of(case: Case) -> torch.nn.Module:
    """The same in FP64."""
    model = _model(case, torch.float64)
    model.load_state_dict(model_of(case).state_dict())
    return model


def _model(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    model = tiny(dtype=dtype, tie_word_embeddings=case.partly_frozen)
    if case.partly_frozen:
        model.model.layers[1].requires_grad_(False)
    return model


def truth(case: Case, ranks: int) -> tuple[list[Tensors], list[Tensors]]:
    """Gradients before each update and weights after it, in FP64: plain torch on one process, with
    the batches of all ranks."""
    model = true_model_of(case)
    own = dict(model.named_parameters())
    masters = {name: _rounded(p.detach(), case.dtype) for name, p in own.items()}
    gradients, weights = [], []
    for update in range(UPDATES):
        for name, parameter in own.items():
            parameter.data = _rounded(masters[name], case.dtype)
        for rank in range(ranks):
            ids, mask, keep = batch_of(rank, ranks)
            for part, rows in enumerate(parts(len(ids), case.accumulation)):
                if case.is_silent(rank, update, part):
                    continue
                values = padded_values(model, ids[rows], mask[rows], keep)
                total = mixed_loss(*values, mask[rows, -keep:]) / (case.accumulation * ranks)
                total.backward()
        zeros = {name: torch.zeros_like(p) for name, p in own.items() if p.requires_grad}
        gradients.append(zeros | take_gradients(model))
        norm = sum(float((g**2).sum()) for g in gradients[-1].values()) ** 0.5
        scale = min(1.0, case.clipping / norm) if case.clipping else 1.0
        for name, gradient in gradients[-1].items():
            masters[name] = masters[name] - RATE * scale * gradient
        weights.append(dict(masters))
    return gradients, weights


def _rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weights.to(dtype).to(torch.float64)


def rows_of(rank: int, ranks: int) -> slice:
    """Uneven shares: one rank has no prompt of the other's rows."""
    if ranks == 1:
        return slice(None)
    return slice(0, 3) if rank == 0 else slice(3, None)


def parts(rows: int, count: int) -> list[slice]:
    """The microbatches of an accumulation."""
    edges = [rows * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def batch_of(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    ids, mask, keep = a_batch()
    own = rows_of(rank, ranks)
    return ids[own], mask[own], keep
