"""The demo's group on this device: gradient errors, exactness of sleeping, and savings.

SmolLM2-135M's shape on the tokens of a recorded group, with its weights if their package is
installed, else with random ones. One process: dormouse is the allocator of every side.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch

import dormouse
import dormouse.hf

from ..demo import checks, gradcheck, trace
from ..demo import model as demo_model
from . import dense, models
from .figures import Meter
from .group import DeviceGrpoLoss
from .rows import LOWER, emit, row
from .shapes import Geometry

SMOLLM2 = Geometry("smollm2-135m", 576, 1536, 30, 9, 3, 49152, k=1024, microbatch_tokens=512)
PEAK_MICROBATCH_TOKENS = 128
ROUNDS = 5
RATIOS_MAX = {
    "global": gradcheck.RATIO_GLOBAL_MAX,
    "median": gradcheck.RATIO_MEDIAN_MAX,
    "p99": gradcheck.RATIO_P99_MAX,
    "max": gradcheck.RATIO_MAX_MAX,
}


@dataclass(frozen=True)
class Digests:
    """Of the gradients of a step by parameter, with their norm and the most bytes asleep."""

    of_each: dict[str, str]
    norm: float
    slept_bytes: int


def exactness(asleep: Digests, awake: Digests) -> dict:
    """Returns the row of gradients that differ. It has no figure if equality would say nothing."""
    names = asleep.of_each.keys() | awake.of_each.keys()
    why = None
    if not names:
        why = "no parameter has a gradient"
    elif not 0.0 < awake.norm < math.inf:  # false for NaN
        why = f"the norm of all gradients is {awake.norm}"
    elif asleep.slept_bytes <= 0:
        why = "nothing slept"
    different = sum(asleep.of_each.get(name) != awake.of_each.get(name) for name in names)
    return row(
        "gradients asleep that differ from awake",
        "parameters",
        None if why else different,
        bar=0,
        better=LOWER,
        how=f"no figure: {why}"
        if why
        else f"BF16, SHA-256 of each of {len(names)}, deterministic kernels",
    )


class Small:
    """Measures one model on ``device``."""

    def __init__(self, device: torch.device, runtime_options: dict):
        # Read when cuBLAS starts; makes its results deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        place = "host" if device.type == "cpu" else device
        self._runtime = dormouse.install(place, **runtime_options).runtime
        self._device = device
        self._model, self.weights = _model(device)
        self._recorded = trace.read().load()
        rollouts = self._recorded.rollouts
        self._group = dormouse.Group(self._recorded.prompt, [r.tokens for r in rollouts])
        old = [torch.tensor(r.logprobs, device=device) for r in rollouts]
        self._loss = DeviceGrpoLoss(old, [r.advantage for r in rollouts])

    def run(self) -> None:
        """Compares FP32 and BF16 with FP64 of the same weights, then runs in BF16."""
        for dtype in (torch.float32, torch.bfloat16):
            self._gradients(dtype)
        self._shared = {
            sleep: dormouse.hf.SharedPrefix(self._model, self._runtime, sleep=sleep)
            for sleep in (True, False)
        }
        self._exact()
        self._times()
        self._peaks()

    def _gradients(self, dtype: torch.dtype) -> None:
        """Leaves the model in ``dtype``. Below FP32 attention is that of the kernels chosen here."""
        self._model.to(dtype)
        shared = dormouse.hf.SharedPrefix(self._model, self._runtime)
        group, loss = self._shortened()
        dense_grads = self._grads(lambda: self._dense(group, loss))
        ours = self._grads(lambda: shared.backward(group, loss, microbatch_tokens=checks.MICROBATCH_TOKENS))
        self._model.double()
        with checks.exact_norms(self._model):
            truth = self._grads(lambda: self._dense(group, loss))
        self._model.to(dtype)
        error = asdict(gradcheck.compare(truth.items(), dense_grads, ours))
        # Neither ever equals FP64; equality means that nothing was computed.
        computed = error["dense_global"] > 0.0
        precision = {torch.float32: "FP32", torch.bfloat16: "BF16"}[dtype]
        kernels = sorted({choice["kernel"] for choice in dormouse.hf.attention_choices()})
        how = (
            f"{self.weights}; worst {error['worst_parameter']}; "
            f"attention by {', '.join(kernels) or 'the only kernel'}"
        )
        for name, most in RATIOS_MAX.items():
            emit(
                "row",
                row(
                    f"gradients in {precision}, shared ÷ dense distance to FP64: {name}",
                    "ratio",
                    error[f"ratio_{name}"] if computed else None,
                    bar=most,
                    better=LOWER,
                    how=how,
                    dense_distance=error["dense_global"] if name == "global" else None,
                ),
            )

    def _shortened(self) -> tuple[dormouse.Group, DeviceGrpoLoss]:
        """Returns the shortened group of the demo's check, with the same shifted
        log-probabilities."""
        rollouts = sorted(self._recorded.rollouts, key=lambda r: -abs(r.advantage))
        rollouts = rollouts[: len(checks.WEIGHTS)]
        responses = [r.tokens[: checks.RESPONSE_TOKENS] for r in rollouts]
        prompt = self._recorded.prompt[-checks.PROMPT_TOKENS :]
        group = dormouse.Group(prompt, responses, checks.WEIGHTS[: len(rollouts)])
        old = [self._moved(group.prompt, response) for response in group.responses]
        return group, DeviceGrpoLoss(old, [r.advantage for r in rollouts])

    @torch.no_grad()
    def _moved(self, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        prompt, response = prompt.to(self._device), response.to(self._device)
        rows = dense.response_logits(self._model, prompt, response[None])[0]
        own = torch.log_softmax(rows, -1).gather(1, response[:, None])[:, 0]
        offsets = torch.tensor(checks.RATIO_OFFSETS, device=self._device)
        return own + offsets.repeat(len(own))[: len(own)]

    def _exact(self) -> None:
        # Makes the order of sums in flash attention's backward deterministic.
        torch.use_deterministic_algorithms(True)
        try:
            asleep, awake = (self._digests(sleep) for sleep in (True, False))
        finally:
            torch.use_deterministic_algorithms(False)
        emit("row", exactness(asleep, awake))

    def _digests(self, sleep: bool) -> Digests:
        reports = []
        grads = self._grads(lambda: reports.append(self._ours(sleep)))
        of_each = {
            name: hashlib.sha256(grad.cpu().view(torch.uint8).numpy()).hexdigest()
            for name, grad in grads.items()
        }
        slept_bytes = reports[0].prefix["asleep_bytes_peak"]
        return Digests(of_each, gradcheck.norm(grads.values()), slept_bytes)

    def _times(self) -> None:
        sides = {
            "dense": lambda: self._dense(self._group, self._loss),
            "asleep": lambda: self._ours(True),
            "awake": lambda: self._ours(False),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(1 + ROUNDS):  # the first is a warm-up
            for name, step in sides.items():
                self._zero()
                start = time.monotonic()
                step()
                self._wait()
                if index:
                    taken[name].append(time.monotonic() - start)
        middle = {name: median(each) for name, each in taken.items()}
        how = f"BF16, medians of {ROUNDS} rounds; prompt {len(self._group.prompt)} tokens"
        own = middle.pop("asleep")
        emit("row", row("step", "s", own, better=LOWER, how=how, **middle))

    def _peaks(self) -> None:
        peaks = {}
        for name, sleep in (("asleep", True), ("awake", False)):
            self._zero()
            self._runtime.trim()
            meter = Meter(self._device)
            self._ours(sleep, on_phase=meter.on_phase, microbatch_tokens=PEAK_MICROBATCH_TOKENS)
            phases = meter.close()
            peaks[name] = phases["B"]["driver_peak"] / (1 << 20)
        how = "BF16, driver's figure above parameters and gradients, read each ms"
        own = peaks.pop("asleep")
        emit("row", row("phase-B peak", "MiB", own, better=LOWER, how=how, **peaks))

    def _dense(self, group, loss) -> None:
        dense.backward(self._model, group, loss, self._device)

    def _ours(self, sleep: bool, microbatch_tokens: int = SMOLLM2.microbatch_tokens, on_phase=None):
        return self._shared[sleep].backward(
            self._group, self._loss, microbatch_tokens=microbatch_tokens, on_phase=on_phase
        )

    def _grads(self, step) -> dict[str, torch.Tensor]:
        self._model.zero_grad(set_to_none=True)
        step()
        grads = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        self._model.zero_grad(set_to_none=True)
        return grads

    def _zero(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _model(device: torch.device):
    """Returns the model in FP32 on the device, and the origin of its weights."""
    try:
        model = demo_model.load_model(demo_model.find()).to(device)
        model.config._attn_implementation = models.PLAIN_ATTENTION
        return model, "weights of " + demo_model.MODEL_ID
    except demo_model.ModelNotFound:
        config = models.config_of(SMOLLM2)
        config.tie_word_embeddings = True
        return models.build(config, device, torch.float32), "random weights"
