"""Whether a shared-prefix step of this model is exact, found by running it both ways.

A miniature group or tree of random tokens (:mod:`.miniature`) runs densely, through the model's
own forward and attention, and shared, through the code of a step. What losses read and every
parameter's gradient must agree. The lengths cover what matters: several responses, one of a single
token, a prompt longer and shorter than a response, several microbatches. Sliding windows are
short to this thread meanwhile, so that the lengths exceed them.

Weights below FP32 are widened for the check: in BF16 the rounding of a correct step is as large as
the error of many an incorrect one. The step also runs in its own dtype, with a wide tolerance.

Short lengths suffice for modules of torch, transformers and peft. Other code (classes, patched
functions, hooks, own attention, masks or experts) may change its behaviour at some length: a model
that contains such code also runs groups of doubling lengths, up to those of its own. In each the
response is longer than the prompt, so that every such length lies between the prompt alone and the
whole sequence of one of them. A row's place in a microbatch may matter as well: one more group
packs short responses into a microbatch as long as those of the step.

Dense runs take compiled layers without their compiled code, so that torch compiles half as much:
that of the shared step. They keep it where it may matter to attention: in flex attention, which has
no right backward without, and in other code.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch

from . import (
    checkpointing,
    dropout,
    outputs,
    routing,
    sharding,
    short_windows,
    support,
    wide_code,
)
from .compiled_layers import EAGER
from .miniature import PROMPT_TOKENS, Miniature
from .mixers import way_of
from .outputs import Losses, Output
from .sharding import ReplicatedWeights
from .support import UnsupportedModelError, Way
from .trial import Trial
from .unknown_code import unknown_code

# Relative distances that rounding explains. Correct models of 30 layers are at 1e-5 in FP32. Many
# modules of transformers compute in FP32 inside an FP64 model.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}
# In a dtype below FP32, or under autocast.
TOLERANCE_LOW = 0.2
# An error of a parameter's gradient is also compared with this part of the whole gradient's norm.
WHOLE = 1e-2
# Larger numbers, of which a norm in FP32 may be infinite, are masks.
MASKED_MIN = 1e16
# A model that amplifies rounding may differ by this many times the distance of a dense run in which
# the embedding's and every layer's output is off by ROUNDING, provided that is up to FLOOR_MAX.
FLOORS = 8
FLOOR_MAX = 1e-2
FLOOR_MAX_LOW = 0.5
ROUNDING = 4 * torch.finfo(torch.float32).eps
# Dense runs with other random numbers may differ by this many times what they differ by with the
# same: on a GPU some sums have no fixed order.
RANDOM_MAX = 4

Step = Callable[[Miniature, Losses], None]
"""Runs a shared step of a miniature with these losses."""


@dataclass(frozen=True)
class Checked:
    """A check that the model passed."""

    reason: str
    """Why it ran: the first step, or what had changed since the last check."""
    seconds: float
    tokens: int
    """Length of the longest sequence."""
    rows: int
    """Rows of the longest microbatch with the prefixes before it."""
    dtype: torch.dtype
    """The dtype of the closest comparison."""
    error: float
    """Relative distance of the shared gradient from the dense one."""
    tolerance: float
    """The distance that is accepted."""
    way: Way = Way.PARTS
    """How responses read the prompt. Ways other than parts hold all scores at once, and the last
    fills no microbatches."""


class _Run(NamedTuple):
    outputs: dict[int, Output]
    """What losses read, by number."""
    gradients: dict[str, torch.Tensor]


class _Compared(NamedTuple):
    """Distances of a run from the dense one."""

    worst: str
    """Name of the parameter, or of what losses read, with the largest relative error."""
    largest: float
    median: float
    distance: float
    """Relative distance of the gradients as a whole."""


class Check:
    """A check of one model in one configuration."""

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        step: Step,
        device: torch.device,
        miniatures: Sequence[Miniature],
    ):
        """``step``: runs a shared step of the model."""
        self._view, self._weights, self._step, self._device = view, weights, step, device
        self._miniatures = miniatures
        self._own_code = _own_code(view)
        self._masks = dropout.FixedMasks(view.model)

    @torch.compiler.disable
    def run(self, reason: str) -> Checked:
        """Compares both ways. Raises :class:`UnsupportedModelError` if they differ."""
        start = time.perf_counter()
        kind = self._device.type
        dtype = sharding.lowest_dtype(self._view.model)
        is_low = dtype not in TOLERANCE or torch.is_autocast_enabled(kind)
        widens = is_low and self._weights.fits_twice(self._view.model, torch.float32)
        wide = torch.float32 if widens else None
        tolerance = TOLERANCE_LOW if is_low and not widens else TOLERANCE[wide or dtype]
        autocast = torch.autocast(kind, enabled=False) if widens else contextlib.nullcontext()
        drops = not self._view.prompt_dropout
        masks = self._masks.active() if drops else contextlib.nullcontext()
        with undisturbed(self._device), masks:
            with autocast:
                error = max(self._compare(each, wide, tolerance) for each in self._miniatures)
            if widens:
                shortest = min(self._miniatures, key=_enough)
                self._compare(shortest, None, TOLERANCE_LOW, typical=True)
        longest = max(each.longest_tokens for each in self._miniatures)
        rows = max(each.rows for each in self._miniatures)
        seconds = time.perf_counter() - start
        way = way_of(self._view)
        return Checked(reason, seconds, longest, rows, wide or dtype, error, tolerance, way)

    def _compare(
        self,
        miniature: Miniature,
        dtype: torch.dtype | None,
        tolerance: float,
        *,
        typical: bool = False,
    ) -> float:
        """Returns the relative distance of the gradients. ``dtype``: weights are widened to it.
        ``typical``: the median parameter decides, since rounding alone may route a token to another
        expert."""
        self._miniature = miniature
        # The most frequent reason why such a run fails must be in its error.
        self._widened = f", with weights widened to {dtype}," if dtype is not None else ""
        model = self._view.model
        around = functools.partial(self._around, miniature, dtype)
        with (
            around(),
            # Checkpointed layers are computed again on a thread of autograd's.
            checkpointing.use(model, around),
            self._weights.trial(model, dtype) as trial,
        ):
            if way_of(self._view) is Way.ALONE and not typical:
                self._check_causal(tolerance)
            self._miniature = miniature = self._with_experts(miniature)
            before = _random_state(self._device)
            dense = self._dense(trial)
            if tolerance == TOLERANCE_LOW and not typical:
                self._check_draws_nothing(trial, dense, before)
            shared = _compared(self._shared(trial, miniature), dense, trial)
            if (shared.median if typical else shared.largest) <= tolerance:
                return shared.distance
            infinite = sum(not _is_finite(gradient) for gradient in dense.gradients.values())
            if float(trial.summed(torch.tensor(float(infinite), device="cpu"))):
                raise UnsupportedModelError(
                    "gradients of a dense run are not finite, so a shared step cannot be compared; "
                    "accepted: finite weights and gradients"
                )
            again = _compared(self._dense(trial), dense, trial).largest
            if not again <= tolerance:
                raise UnsupportedModelError(
                    f"two dense runs of the model differ by {again:.2g}: it is random or keeps "
                    "state; accepted: models that compute the same each time"
                )
            with _rounding(self._view):
                floor = _compared(self._dense(trial), dense, trial).largest
            limit = FLOOR_MAX if tolerance < FLOOR_MAX else FLOOR_MAX_LOW
            amplified = floor <= limit and shared.largest <= min(FLOORS * floor, FLOOR_MAX_LOW)
            # What is missing or doubled in one layer shows in that layer's parameters alone.
            if amplified and (tolerance < FLOOR_MAX or shared.median <= tolerance):
                return shared.distance
            raise UnsupportedModelError(self._described(trial, shared, tolerance))

    @contextlib.contextmanager
    def _around(self, miniature: Miniature, dtype: torch.dtype | None) -> Iterator[None]:
        """Context of the passes of a comparison. ``dtype``: weights are widened to it."""
        wide = contextlib.nullcontext() if dtype is None else wide_code.use(self._view)
        with short_windows.use(self._view.model, miniature.prompt_tokens // 2), wide:
            yield

    def _check_draws_nothing(self, trial: Trial, dense: _Run, before: list[torch.Tensor]) -> None:
        """Refuses a model whose values depend on random numbers, where the tolerance is too wide to
        show it. ``before``: the generators' states before the dense run."""
        now = _random_state(self._device)
        drew = not all(map(torch.equal, now, before))
        if not float(trial.summed(torch.tensor(float(drew), device="cpu"))):
            return
        # By other numbers than the first time; where it only draws them, it differs as much by the
        # same ones.
        others = _compared(self._dense(trial), dense, trial).median
        _set_random_state(self._device, before)
        same = _compared(self._dense(trial), dense, trial).median
        if not others <= RANDOM_MAX * same:
            raise UnsupportedModelError(
                f"dense runs of the model differ by {others:.2g} with other random numbers, and by "
                f"{same:.2g} with the same: a shared prefix would share what it draws; accepted: "
                "models that compute the same each time"
            )

    @contextlib.contextmanager
    def _own_pass(self, name: str) -> Iterator[None]:
        """Context of a forward or backward through the model's own code."""
        explained = support.explained(f"the model's own {name}{self._widened}")
        with self._own_code, explained:
            yield

    def _check_causal(self, tolerance: float) -> None:
        """Checks that rows do not depend on later tokens. A response alone is a whole pass, so what
        mixes its tokens could go unseen; whether its last token is fed is the trainer's choice."""
        index = max(range(len(self._miniature.sequences)), key=self._tokens_of)
        tokens = self._miniature.sequences[index].tokens.to(self._device)
        logits = []
        for end in (-1, None):
            with (
                torch.no_grad(),
                self._own_pass("forward"),
                self._masks.dense(self._miniature.shared_rows[index]),
            ):
                output = self._view.run_dense(tokens[:end])
                logits.append(support.logits_of(output)[0, : len(tokens) - 1])
        error, norm = _squares(logits[1], logits[0])
        distance = _ratio(error, norm) ** 0.5
        if not distance <= tolerance:
            raise UnsupportedModelError(
                f"rows of the model depend on later tokens: logits differ by {distance:.2g} if one "
                "more follows; accepted: causal models"
            )

    def _with_experts(self, miniature: Miniature) -> Miniature:
        """Returns the batch with the experts that a dense run selects, if routers of the step select
        recorded ones."""
        is_replay = miniature.request.replays_experts
        # A rank without groups checks together with ranks whose groups have records.
        is_joint = self._weights.passes_hold_collectives and routing.count_experts(self._view)
        if not is_replay and not is_joint:
            return miniature
        recorded = []
        for i, sequence in enumerate(miniature.sequences):
            tokens = sequence.tokens[:-1].to(self._device)
            with (
                torch.no_grad(),
                self._own_pass("forward"),
                self._masks.dense(miniature.shared_rows[i]),
                routing.Recorder(self._view, len(tokens)) as recorder,
            ):
                self._view.run_dense(tokens)
            recorded.append(recorder.experts())
        if not is_replay:
            return miniature
        if recorded[0] is None:
            raise routing.no_router()
        return miniature.with_experts(recorded)

    def _tokens_of(self, index: int) -> int:
        return len(self._miniature.sequences[index].tokens)

    def _described(self, trial: Trial, shared: _Compared, tolerance: float) -> str:
        place = self._first_difference(trial, tolerance)
        unknown = unknown_code(self._view)
        return (
            f"a shared step is not exact for this model: {shared.worst} differs from the dense run "
            f"by {shared.largest:.2g} with a prompt of {self._miniature.prompt_tokens} tokens, "
            f"accepted {tolerance:.2g}"
            + (f"; the first module whose output differs is {place}" if place else "")
            + (f"; the model contains {unknown}" if unknown else "")
            + "; train this model without shared prompts"
        )

    def _dense(self, trial: Trial) -> _Run:
        """Runs every sequence whole."""
        miniature, seen = self._miniature, {}
        names = miniature.request.response | miniature.request.prompt
        arguments = outputs.arguments_of(names)
        self._weights.keep_in_next_backwards()
        for i, sequence in enumerate(miniature.sequences):
            tokens = sequence.tokens[:-1].to(self._device)
            replay = contextlib.nullcontext()
            if sequence.routed_experts is not None:
                experts = sequence.routed_experts.to(self._device)
                replay = routing.replaying(self._view, experts)
            with (
                self._own_pass("forward"),
                self._masks.dense(miniature.shared_rows[i]),
                replay,
            ):
                output = self._view.run_dense(tokens, **arguments)
                output = outputs.read(output, names, len(tokens))
            read = miniature.read(output, i)
            seen |= {number: each.detached() for number, each in read.items()}
            losses = {number: miniature.loss(each, number) for number, each in read.items()}
            loss = sequence.weight * losses.pop(i) + sum(losses.values())
            trial.adopt(loss)
            if i == len(miniature.sequences) - 1:
                self._weights.reduce_in_next_backward()
            with self._own_pass("backward"):
                if loss.requires_grad:
                    loss.backward()
        return _Run(seen, trial.take(kept=True))

    def _shared(self, trial: Trial, miniature: Miniature) -> _Run:
        pieces: dict[int, dict[int, Output]] = {}
        self._weights.keep_in_next_backwards()
        with support.explained(f"the shared step{self._widened}"):
            losses = miniature.recording_losses(pieces)
            self._step(miniature, losses)
        seen = {number: _joined(own) for number, own in pieces.items()}
        return _Run(seen, trial.take())

    def _first_difference(self, trial: Trial, tolerance: float) -> str | None:
        """Returns name, class and distance of the first module whose output differs for the longest
        response alone; None if all agree, if ranks would have to run more passes together, or if
        the prompt's rows are on several."""
        if self._weights.passes_hold_collectives or self._weights.splits_prompts:
            return None
        alone = self._miniature.alone()
        tokens = alone.sequences[0].tokens[:-1]
        own = self._own_pass("forward")
        with _outputs(self._view.model) as dense, own, self._masks.dense(alone.shared_rows[0]):
            self._view.run_dense(tokens.to(self._device))
        with _outputs(self._view.model) as shared:
            self._shared(trial, alone)
        for name, (wanted,) in ((n, o) for n, o in dense.items() if len(o) == 1):
            parts = shared.get(name, [])
            if not parts or any(part.shape[2:] != wanted.shape[2:] for part in parts):
                continue
            got = torch.cat(parts, 1)
            if got.shape[1] > wanted.shape[1]:
                continue
            # In the last layer the prompt's rows are not run to their end.
            wanted = wanted[:, wanted.shape[1] - got.shape[1] :]
            error = float((got - wanted).norm() / wanted.norm())
            if not error <= tolerance:
                kind = type(self._view.model.get_submodule(name)).__name__
                return f"{name or 'the model'} ({kind}, by {error:.2g})"
        return None


@torch.compiler.disable
def let_hooks_register(
    view: support.ModelView, weights: ReplicatedWeights, device: torch.device, example: Miniature
) -> None:
    """Runs the model so that transformers registers the hooks by which it returns hidden states,
    once per model. They belong to it from then on: fingerprints contain them."""
    names = example.request.response | example.request.prompt
    settings = vars(view.config).items()
    if not names and not any(n.startswith("output_") and value is True for n, value in settings):
        return
    tokens = example.sequences[0].tokens.to(device)
    with undisturbed(device), weights.trial(view.model, None), torch.no_grad():
        with _own_code(view), support.explained("the model's own forward"):
            view.run_dense(tokens, **outputs.arguments_of(names))


def _own_code(view: support.ModelView) -> contextlib.AbstractContextManager:
    """Returns the context of the model's own passes, which may be entered again."""
    attention = getattr(view.config, "_attn_implementation", None) or ""
    needs_compiler = "flex" in attention or unknown_code(view) is not None
    return contextlib.nullcontext() if needs_compiler else EAGER


def _enough(miniature: Miniature) -> int:
    """Orders miniatures: the shortest whose prompt is no special case comes first."""
    is_special = miniature.prompt_tokens < PROMPT_TOKENS
    return miniature.longest_tokens + (is_special << 32)


def _compared(got: _Run, wanted: _Run, trial: Trial) -> _Compared:
    """Compares a run with the dense one. A missing gradient counts as zeros."""
    names = sorted(got.gradients.keys() | wanted.gradients.keys())
    squares = [_squares(got.gradients.get(name), wanted.gradients.get(name)) for name in names]
    read, found = _numbered(wanted.outputs), _numbered(got.outputs)
    squares += [_squares(found.get(key), tensor) for key, tensor in read.items()]
    table = trial.summed(torch.tensor(squares, dtype=torch.float64, device="cpu"))
    gradients, of_outputs = table[: len(names)], table[len(names) :]
    error, whole = gradients.sum(0).sqrt().tolist()
    ratios = {}
    for kind in dict.fromkeys(kind for _, kind, _ in read):
        rows = [row for row, (_, other, _) in enumerate(read) if other == kind]
        ratios[kind] = _ratio(*of_outputs[rows].sum(0).sqrt().tolist())
    telling = list(ratios.values())
    for name, (own_error, own) in zip(names, gradients.sqrt().tolist(), strict=True):
        ratios[name] = _ratio(own_error, own + WHOLE * whole)
        # Gradients that are 0 in both runs say nothing.
        if own_error or own:
            telling.append(ratios[name])
    # NaN is no agreement.
    worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
    median = math.nan if math.isnan(ratios[worst]) else statistics.median(telling or [0.0])
    return _Compared(worst, ratios[worst], median, _ratio(error, whole))


def _numbered(read: dict[int, Output]) -> dict[tuple[int, str, int], torch.Tensor]:
    """Returns tensors by number, field and place in it."""
    return {
        (number, kind, place): tensor
        for number, output in read.items()
        for place, (kind, tensor) in enumerate(output.tensors())
    }


def _joined(pieces: dict[int, Output]) -> Output:
    """Returns what losses read of a tree's labels as one output, or the only one of a response."""
    parts = [output for _, output in sorted(pieces.items(), key=lambda item: item[0])]
    return parts[0] if len(parts) == 1 else Output.joined(parts)


def _ratio(error: float, norm: float) -> float:
    if error == 0:
        return 0.0
    if not math.isfinite(norm):
        return math.nan
    return error / norm if norm else math.inf


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _squares(got: torch.Tensor | None, wanted: torch.Tensor | None) -> tuple[float, float]:
    """Returns the squared norms of the error and of what is wanted."""
    if wanted is None or got is None:
        present = wanted if got is None else got
        square = float(present.float().norm()) ** 2
        return square, square if got is None else 0.0
    if got.shape != wanted.shape:
        return float("inf"), 0.0
    wide = torch.promote_types(wanted.dtype, torch.float32)
    # A dense run's gradients may wait in host memory.
    wanted, got = wanted.to(got.device, wide), got.to(wide)
    error, norm = float((got - wanted).norm()), float(wanted.norm())
    if not (math.isfinite(error) and math.isfinite(norm)):
        # Logits masked with an infinity or the least number are equal where both are.
        equal = (got == wanted) & (wanted.abs() > MASKED_MIN)
        got, wanted = got.masked_fill(equal, 0), wanted.masked_fill(equal, 0)
        error, norm = float((got - wanted).norm()), float(wanted.norm())
    return error**2, norm**2


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restores the state of random generators."""
    state = random.getstate()
    # transformers imports numpy.
    numpy_state = numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)


def _random_state(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of torch's generators of the CPU and of the device."""
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device]


def _set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextlib.contextmanager
def _rounding(view: support.ModelView) -> Iterator[None]:
    """Multiplies outputs of the embedding and of every layer by numbers within ROUNDING of 1, below
    FP32 within the dtype's own rounding."""

    # Of its own: the masks of dropout come from torch's.
    generator = torch.Generator(view.embedding.weight.device).manual_seed(0)

    def off(hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(hidden, requires_grad=False).uniform_(-1, 1, generator=generator)
        return hidden * (1 + max(ROUNDING, torch.finfo(hidden.dtype).eps) * noise)

    def hook(module, args, output):
        return (off(output[0]), *output[1:]) if isinstance(output, tuple) else off(output)

    handles = [each.register_forward_hook(hook) for each in (view.embedding, *view.layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _outputs(model: torch.nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Records the output of every module whose first tensor has rows of tokens, in the order in
    which they end."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def recorder(name: str):
        def hook(module, args, output):
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            first = getattr(first, "logits", first)
            if not isinstance(first, torch.Tensor) or not first.is_floating_point():
                return
            if first.dim() >= 3 and first.shape[0] == 1:
                outputs.setdefault(name, []).append(first.detach())

        return hook

    handles = [m.register_forward_hook(recorder(n)) for n, m in model.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
