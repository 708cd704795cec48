"""Recurrent layers: the states that the prompt leaves behind are boundary tensors.

A gated delta rule or a state space scan reads earlier tokens through a matrix per head, a causal
convolution through the last columns of its input. Phase A keeps what they are at the end of the
prompt, phase B starts every response from them, and the sums of their gradients are seeds of phase
C (docs/method.md §6).

States do not grow with the prompt, so they and their gradients stay awake, in torch's memory: the
runtime's prefix knows K and V alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad, silu, softplus

from . import calls
from .attention import Packed, Run
from .support import UnsupportedModelError

# A step so far below zero that its softplus is exactly 0.
NO_STEP = 1e4
# A gate that multiplies by about 1, and that no dtype rounds: states and their gradients keep their
# size, which FP16 cannot represent beyond 65,504.
GATE = 1.28125
# By what it multiplies.
GATED = GATE / (1 + math.exp(-GATE))


class _Recurrence(Protocol):
    """How one kind of function takes and returns tokens and states. Its first argument has the
    tokens; ``tokens_last``: they are the last dimension, else the second."""

    tokens_last: bool

    def run(
        self, call: calls.FunctionCall, start: torch.Tensor | None, *, wants_state: bool = True
    ):
        """Returns the outputs of the tokens of ``call`` after a state ``start`` (None: none come
        before), and the state after them, for which None may stand unless ``wants_state``."""

    def returned(self, out: torch.Tensor):
        """Returns what the module expects of a call that does not ask for the state."""


class _Convolution:
    """Tokens ``[rows, channels, tokens]`` and weights ``[channels, width]``."""

    tokens_last = True

    def run(self, call, start, *, wants_state=True):
        columns = call.args[0]
        weight = call.kwargs["weight"] if "weight" in call.kwargs else call.args[1]
        reach = weight.shape[-1] - 1
        seen = columns if start is None else torch.cat([start, columns], -1)
        out = call.function(seen, *call.args[1:], **call.kwargs)
        # Zeros stand before the first token.
        missing = max(0, reach - seen.shape[-1])
        end = pad(seen, (missing, 0)) if missing else seen
        return out[..., seen.shape[-1] - columns.shape[-1] :], end[..., end.shape[-1] - reach :]

    def returned(self, out):
        return out


class _Scan:
    """Tokens ``[rows, tokens, heads, ...]``, and every other argument shaped like them."""

    tokens_last = False

    def __init__(self, start: str, wants_end: str, *, returns_pair: bool):
        """``start``, ``wants_end``: names of the arguments for the state before the first token,
        and for whether to return the one after the last. ``returns_pair``: also without it."""
        self._start, self._wants_end, self._returns_pair = start, wants_end, returns_pair

    def run(self, call, start, *, wants_state=True):
        _check_has_no_cache(call, self._wants_end, self._start)
        return call.function(
            *call.args, **call.kwargs | {self._start: start, self._wants_end: True}
        )

    def returned(self, out):
        return (out, None) if self._returns_pair else out


class _SelectiveScan:
    """Tokens ``[rows, channels, tokens]``, steps of the same shape, decay rates ``[channels,
    width]``, and inputs and outputs of the state ``[rows, width, tokens]``."""

    tokens_last = True

    def run(self, call, start, *, wants_state=True):
        _check_has_no_cache(call, "return_last_state")
        if wants_state and torch.is_grad_enabled():
            out, end = self._run_to_state(call)
        else:
            found = call.function(*call.args, **call.kwargs | {"return_last_state": wants_state})
            out, end = found if wants_state else (found, None)
        if start is None:
            return out, end
        # The function takes no state, but is linear in it: what is left of it is added.
        _, steps, rates, _, readers = call.args[:5]
        if call.kwargs.get("delta_bias") is not None:
            steps = steps + call.kwargs["delta_bias"].to(steps.dtype)[..., None]
        if call.kwargs.get("delta_softplus"):
            steps = softplus(steps)
        left = start.unsqueeze(2) * (rates[:, None] * steps.cumsum(-1)[..., None]).exp()
        # Not by a matrix product, which autocast would round, in backward too.
        read = (left * readers.to(left.dtype).transpose(1, 2)[:, None]).sum(-1)
        if call.kwargs.get("z") is not None:
            read = read * silu(call.kwargs["z"])
        return out + read.to(out.dtype), None if end is None else end + left[:, :, -1]

    def _run_to_state(self, call):
        """Returns the outputs, and the state after the last token, with a gradient.

        The kernel of mamba_ssm returns that state without a gradient. Outputs have one: as many
        tokens as the state is wide follow, which change nothing, and of which each reads a column.
        """
        columns, steps, rates, inputs, readers, *others = call.args
        options = call.kwargs | {"return_last_state": True}
        tokens, width = columns.shape[-1], rates.shape[-1]
        bias = options.get("delta_bias")
        nothing = 0.0 if bias is None else -bias[..., None]
        if options.get("delta_softplus"):
            nothing = nothing - NO_STEP
        still = torch.zeros_like(steps[..., :1]) + nothing
        each = torch.eye(width, dtype=readers.dtype, device=readers.device)
        gate = options.get("z")
        if gate is not None:
            options["z"] = pad(gate, (0, width), value=GATE)
        out, end = call.function(
            pad(columns, (0, width)),
            torch.cat([steps, still.to(steps.dtype).expand(*steps.shape[:-1], width)], -1),
            rates,
            pad(inputs, (0, width)),
            torch.cat([readers, each.expand(*readers.shape[:-1], width)], -1),
            *others,
            **options,
        )
        read = out[..., tokens:].to(end.dtype)
        if gate is not None:
            read = read / GATED
        return out[..., :tokens], _InPlaceOf.apply(read, end.detach())

    def returned(self, out):
        return out


class _InPlaceOf(torch.autograd.Function):
    """A value that has the gradient of another, which was rounded."""

    @staticmethod
    def forward(ctx, rounded, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _check_has_no_cache(call: calls.FunctionCall, *arguments: str) -> None:
    for name in arguments:
        value = call.kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} passes {name!r} to {call.name}; accepted: a forward "
                "without cache"
            )


_RECURRENCES: dict[str, _Recurrence] = {
    calls.CONVOLUTION: _Convolution(),
    calls.SELECTIVE_SCAN: _SelectiveScan(),
    calls.STATE_SPACE_SCAN: _Scan("initial_states", "return_final_states", returns_pair=False),
    **dict.fromkeys(
        calls.DELTA_RULES, _Scan("initial_state", "output_final_state", returns_pair=True)
    ),
}


class State(NamedTuple):
    """A state at the end of the prompt."""

    layer: int
    live: torch.Tensor
    """In phase A's graph."""
    leaf: torch.Tensor
    """Its value for phase B, in FP32 or wider, so that its ``.grad`` sums in FP32. In memory of its
    own: ``live`` may be part of what falls asleep. Contiguous, so its ``.grad`` is too: ranks
    exchange both."""


class States:
    """The states of all recurrent layers at the end of the prompt."""

    def __init__(self):
        self._states: dict[tuple[torch.nn.Module, int], State] = {}

    def of(self, layer: int) -> list[torch.Tensor]:
        """Returns the layer's states in phase A's graph."""
        return [state.live for state in self._states.values() if state.layer == layer]

    @property
    def need_backward(self) -> bool:
        """Whether any state depends on a trainable parameter."""
        return any(state.live.requires_grad for state in self._states.values())

    def seeds(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Returns layer, state in phase A's graph and gradient of each that has one."""
        return [
            (state.layer, state.live, state.leaf.grad.to(state.live.dtype))
            for state in self._states.values()
            if state.leaf.grad is not None and state.live.requires_grad
        ]

    def start(self, call: calls.FunctionCall) -> torch.Tensor:
        """Returns the state from which a call after the prefix starts."""
        state = self._states.get((call.module, call.index))
        if state is None:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} calls {call.name}, which did not run over the "
                "prompt; accepted: the same calls over all tokens in every forward"
            )
        return state.leaf.to(state.live.dtype)

    def take_gradients(self, first: States) -> None:
        """Takes the gradients of an earlier forward without a graph over the same tokens."""
        for place, state in self._states.items():
            self._states[place] = state._replace(leaf=first._states[place].leaf)

    def clear(self) -> None:
        """Frees the states."""
        self._states = {}

    def recorder(
        self, layer: Callable[[], int | None], before: States | None = None
    ) -> calls.Handler:
        """Returns the handler of phase A, which keeps the states. ``layer``: the running one.
        ``before``: those at the end of the prefix that this one follows."""

        def record(call: calls.FunctionCall):
            if call.name in calls.FUSED:
                return None
            place, recurrence = (call.module, call.index), _RECURRENCES[call.name]
            if layer() is None or place in self._states:
                raise UnsupportedModelError(
                    f"{type(call.module).__name__} runs outside a layer or more than once over "
                    "the prompt; accepted: every recurrent module once"
                )
            out, end = recurrence.run(call, None if before is None else before.start(call))
            wide = torch.promote_types(end.dtype, torch.float32)
            # Without a graph, a second forward finds out whether it needs a gradient.
            needed = end.requires_grad or not torch.is_grad_enabled()
            leaf = end.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
            leaf.requires_grad_(needed)
            self._states[place] = State(layer(), end, leaf)
            return recurrence.returned(out)

        return record

    def resumed(self, packed: Packed) -> Resumed:
        """Returns the handler of a microbatch of phase B."""
        return Resumed(self, packed)

    def leaves(self) -> list[torch.Tensor]:
        """Returns what phase B reads."""
        return [state.leaf for state in self._states.values()]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of :meth:`leaves`; zeros where there is none."""
        return [
            torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad
            for leaf in self.leaves()
        ]

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Adds to the gradient of one of :meth:`leaves`. It takes ``gradient`` over."""
        leaf = self.leaves()[place]
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def empty_like(self) -> States:
        """Returns states of the same shapes, uninitialised and without a graph."""
        states = States()
        for place, state in self._states.items():
            leaf = torch.empty_like(state.leaf).requires_grad_()
            states._states[place] = state._replace(leaf=leaf)
        return states

    def places(self) -> set[tuple[torch.nn.Module, int]]:
        """Returns the modules and calls that left a state."""
        return set(self._states)


class Resumed:
    """Starts every packed response from the states at the end of the prompt."""

    def __init__(self, states: States | None, packed: Packed):
        """``states``: None if nothing comes before."""
        self._states, self._packed = states, packed
        self._left = set() if states is None else states.places()

    def __call__(self, call: calls.FunctionCall):
        if call.name in calls.FUSED:
            return None
        recurrence = _RECURRENCES[call.name]
        rows = call.args[0].shape[-1 if recurrence.tokens_last else 1]
        if rows != self._packed.rows or len(call.args[0]) != 1:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} calls {call.name} over {rows} of "
                f"{self._packed.rows} response rows; accepted: over all"
            )
        start = None if self._states is None else self._states.start(call)
        self._left.discard((call.module, call.index))
        outs = []
        for run in self._packed.runs:
            # As many rows as responses of this length.
            starts = start
            if start is not None:
                starts = start.expand(run.count, *start.shape[1:]).contiguous()
            own = _of_run(call, run, recurrence.tokens_last)
            out, _ = recurrence.run(own, starts, wants_state=False)
            outs.append(_in_one_row(out, recurrence.tokens_last))
        return recurrence.returned(torch.cat(outs, -1 if recurrence.tokens_last else 1))

    def check_complete(self) -> None:
        """Raises :class:`UnsupportedModelError` if a recurrence did not run."""
        for module, _ in self._left:
            raise UnsupportedModelError(
                f"{type(module).__name__} ran over the prompt and not over the responses; "
                "accepted: every recurrent module once in every forward"
            )


def _of_run(call: calls.FunctionCall, run: Run, tokens_last: bool) -> calls.FunctionCall:
    """Returns the call for the responses of ``run``, one per row."""
    rows = call.args[0].shape[-1 if tokens_last else 1]

    def of(value):
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or len(value) != 1:
            return value
        if value.shape[-1 if tokens_last else 1] != rows:
            return value
        if tokens_last:
            return run.of(value).contiguous()
        return run.of(value.transpose(1, 2)).transpose(1, 2).contiguous()

    args = tuple(map(of, call.args))
    return call._replace(args=args, kwargs={name: of(each) for name, each in call.kwargs.items()})


def _in_one_row(out: torch.Tensor, tokens_last: bool) -> torch.Tensor:
    """Reverses :func:`_of_run` for an output."""
    if tokens_last:
        return out.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    return out.flatten(0, 1).unsqueeze(0)
