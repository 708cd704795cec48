"""Dropout in a shared step: of the rows that each response has alone (decision 0023).

The responses of a group share the prompt's rows, so they would share a mask on them, which no dense
run does. A trainer may choose an objective that can be shared instead: the prompt's rows run
without dropout, and every response draws masks for its own rows, the first of which is the prompt's
last token.

These modes replace torch's dropout function for one thread, in modules and in code that calls it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import checkpointing
from .support import ModelView, UnsupportedModelError

ACCEPTED = (
    "accepted: 0, or prompt_dropout=False of SharedPrefix() and of share(), which drops in the "
    "rows of responses alone"
)

# Attributes of modules with rates of what acts on all rows or on none. A rare event could escape
# the check.
RANDOM_RATES = (
    *("drop_path", "layer_dropout", "layerdrop", "module_dropout", "rank_dropout"),
    # Of routers: noise in their input or choice.
    *("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps"),
)

# Names of the arguments; the defaults are those of torch.nn.functional.
_FUNCTIONS = {
    functional.dropout: ("input", "p", "training"),
    torch.dropout: ("input", "p", "train"),
}
_DEFAULTS = (None, 0.5, True)
_FORWARD, _DROPOUT = torch.nn.Dropout.forward, functional.dropout

_BITS = (1 << 32) - 1


def check(model: torch.nn.Module, prompt_dropout: bool) -> None:
    """Raises :class:`UnsupportedModelError` for randomness that no shared step reproduces."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        for attribute, value in vars(module).items():
            if attribute in RANDOM_RATES and (rate := _largest(value)):
                raise UnsupportedModelError(
                    f"{attribute} {rate} in {name or 'the model'!r}: a shared prefix would share "
                    "what it draws; accepted: 0"
                )
        is_dropout = isinstance(module, torch.nn.Dropout) and module.p > 0
        if prompt_dropout and model.training and is_dropout and _is_torchs(module):
            raise UnsupportedModelError(
                f"dropout {module.p} in {name!r}: a shared prefix would share its mask; {ACCEPTED}"
            )


def _is_torchs(module: torch.nn.Dropout) -> bool:
    """Returns whether torch draws the mask. Of other code the check finds out what it does."""
    is_own = type(module).forward is _FORWARD and "forward" not in module.__dict__
    return is_own and functional.dropout is _DROPOUT


def _largest(value) -> float:
    """Returns the largest rate in a number or, as peft keeps one per adapter, in a dict."""
    values = value.values() if isinstance(value, dict) else [value]
    return max((each for each in values if isinstance(each, (int, float))), default=0)


def of_prompt(view: ModelView) -> contextlib.AbstractContextManager:
    """Returns the context in which the prompt's rows run."""
    return contextlib.nullcontext() if view.prompt_dropout else NoDropout()


class NoDropout(TorchFunctionMode):
    """Dropout returns its input."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            return _arguments(func, args, kwargs)[0]
        return func(*args, **kwargs)


class FixedMasks(TorchFunctionMode):
    """Masks for a check: each element's follows from the token and the position of its row, its
    place in the row, and the number of the call in the forward.

    So a dense run and a shared step draw the same. A call is known by the state of torch's random
    generator, so that a checkpointed layer, for which torch restores it, meets its masks again.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._model = model
        self._prompt_rows = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context of a check on this thread."""
        self._thread = threading.get_ident()
        hook = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        try:
            with self, checkpointing.use(self._model, lambda: self):
                yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def dense(self, prompt_rows: int) -> Iterator[None]:
        """Context of a dense run, whose first ``prompt_rows`` rows drop nothing."""
        self._prompt_rows = prompt_rows
        try:
            yield
        finally:
            self._prompt_rows = 0

    def _begin(self, module, args, kwargs) -> None:
        if threading.get_ident() != self._thread:
            # The trainer evaluates the model meanwhile.
            return
        self._calls: dict[bytes, int] = {}
        # Kept for layers that are computed again in the backward.
        self._kept_rows = self._prompt_rows
        tokens = kwargs["input_ids"][0]
        positions = kwargs.get("position_ids")
        if positions is None:
            # A model that counts them does so after the tokens in its cache.
            cache = kwargs.get("past_key_values")
            first = 0 if cache is None else cache.get_seq_length()
            positions = first + torch.arange(len(tokens), device=tokens.device).unsqueeze(0)
        self._rows = _mixed(_mixed(tokens) + positions[0])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _FUNCTIONS:
            return func(*args, **kwargs)
        rows, rate, is_training = _arguments(func, args, kwargs)
        return rows * self._mask(rows, rate) if is_training and rate > 0 else rows

    def _mask(self, rows: torch.Tensor, rate: float) -> torch.Tensor:
        count = len(self._rows)
        if rows.dim() < 3 or rows.shape[:2] != (1, count):
            raise UnsupportedModelError(
                f"dropout {rate} of a tensor of shape {list(rows.shape)} in a forward of {count} "
                "tokens; accepted: [1, tokens, ...], of which each row is one token's"
            )
        state = torch.get_rng_state().numpy().tobytes()
        call = self._calls.setdefault(state, len(self._calls))
        # The next call finds another state.
        torch.rand(())
        places = torch.arange(rows[0, 0].numel(), device=rows.device)
        drawn = _mixed(_mixed(self._rows + call).unsqueeze(1) + places)
        mask = (drawn >= rate * _BITS).to(rows.dtype) / (1 - rate)
        mask[: self._kept_rows] = 1
        return mask.view(rows.shape)


def _arguments(func, args: tuple, kwargs: dict) -> list:
    """Returns input, rate, and whether to drop."""
    named = dict(zip(_FUNCTIONS[func], args, strict=False)) | kwargs
    return [named.get(name, d) for name, d in zip(_FUNCTIONS[func], _DEFAULTS, strict=True)]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Hashes integers to 32 bits."""
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & _BITS
    return numbers ^ (numbers >> 16)
