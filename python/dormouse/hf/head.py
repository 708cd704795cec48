"""The part of a model's forward after its decoder: from hidden states to logits, run by itself.

Logits are the largest tensor of a step, and follow from hidden states a hundred times as small. So
a graph that waits for its backward holds these, and logits are computed again.

It is the model's own code that runs, scaling and soft caps included: its forward, with what the
decoder returned in place of the decoder.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..errors import is_out_of_memory
from . import graph, substitutes, support
from .accumulation import Accumulation, accumulating, modules_of

# Rows of the run that compares both ways.
CHECK_TOKENS = 8


class Head:
    """What follows the decoder of a model. :func:`of` returns it."""

    def __init__(self, model: PreTrainedModel, decoder: torch.nn.Module):
        self._model, self._decoder = model, decoder
        # The class of what the decoder returns.
        self._kind: type | None = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[torch.Tensor]]:
        """Context of a forward of the model that computes no logits: they have 0 rows. Yields the
        list to which the decoder's hidden states are added, ``[rows, hidden_size]``."""
        found: list[torch.Tensor] = []

        def without_rows(output):
            found.append(support.rows_of(output.last_hidden_state))
            return _with_hidden(output, output.last_hidden_state[:, :0])

        with self._hooked(without_rows):
            yield found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of hidden states, ``[rows, vocab]``. Their backward adds to the
        gradient of the output embedding in place."""
        output = self._kind(last_hidden_state=hidden.unsqueeze(0))
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        # Nothing but the step has this graph.
        accumulation = Accumulation(hidden.device, is_private=True)
        with _returning(self._decoder, output), self._accumulating(accumulation):
            found = self._model(input_ids=tokens, use_cache=False)
        return support.rows_of(support.logits_of(found))

    def _accumulating(self, accumulation: Accumulation) -> contextlib.AbstractContextManager:
        """Returns the context in which the output embedding adds to its gradient in place."""
        embedding = self._model.get_output_embeddings()
        modules = [] if embedding is None else modules_of(embedding)
        return accumulating(modules, accumulation).in_place()

    def agrees(self, view: support.ModelView, device: torch.device) -> bool:
        """Returns whether logits computed apart are those of a whole forward, bit by bit, and read
        nothing but the decoder's last hidden states."""
        found = []
        tokens = torch.arange(CHECK_TOKENS, device=device) % view.vocab_size

        def cut(output):
            self._kind = type(output)
            hidden = getattr(output, "last_hidden_state", None)
            found.append(hidden)
            if not isinstance(hidden, torch.Tensor):
                return None
            return _with_hidden(output, hidden.detach().requires_grad_(hidden.requires_grad))

        with torch.enable_grad(), self._hooked(cut):
            wanted = support.logits_of(view.model(input_ids=tokens[None], use_cache=False))[0]
        if len(found) != 1 or not isinstance(found[0], torch.Tensor):
            return False
        hidden = found[0]
        if hidden.shape[:2] != (1, CHECK_TOKENS):
            return False
        if hidden.grad_fn is not None and graph.older(wanted, hidden) is not None:
            return False
        with torch.no_grad():
            with self.apart():
                view.model(input_ids=tokens[None], use_cache=False)
            return torch.equal(self.logits(hidden[0]), wanted)

    @contextlib.contextmanager
    def _hooked(self, see) -> Iterator[None]:
        """Context in which ``see(output)`` sees what the decoder returns to this thread; what it
        returns replaces that."""
        thread = threading.get_ident()

        @torch.compiler.disable
        def hook(module, args, output):
            return see(output) if threading.get_ident() == thread else None

        handle = self._decoder.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _returning(module: torch.nn.Module, output) -> contextlib.AbstractContextManager:
    return substitutes.forward(module, lambda *args, **kwargs: output)


def of(view: support.ModelView, device: torch.device) -> Head | None:
    """Returns the head of a model; None if it cannot run apart.

    Accepted: a forward of transformers' own in which one module returns the last hidden states,
    with or without peft's models around it, without hooks there and without dropout of logits.
    Runs :data:`CHECK_TOKENS` tokens.
    """
    around = _around(view.model)
    if around is None:
        return None
    model, decoder = around[-1], around[-1].base_model
    is_own = inspect.getfile(type(model).forward).startswith(support.TRANSFORMERS)
    if decoder is model or not is_own:
        return None
    for module in (*around, decoder):
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
    inner = set(decoder.modules())
    if any(_draws(module) for module in model.modules() if module not in inner):
        return None
    head = Head(model, decoder)
    try:
        return head if head.agrees(view, device) else None
    except support.ERRORS as error:
        if is_out_of_memory(error):
            raise
        return None


def _around(model: torch.nn.Module) -> list[torch.nn.Module] | None:
    """Returns the outermost model of transformers and what of peft is around it, that first."""
    around = [model]
    while not isinstance(around[-1], PreTrainedModel):
        children = around[-1]._modules
        # Not by attribute: peft's models pass on what they lack.
        inner = children.get("base_model", children.get("model"))
        if type(around[-1]).__module__.partition(".")[0] != "peft" or inner is None:
            return None
        around.append(inner)
    return around


def _draws(module: torch.nn.Module) -> bool:
    """Returns whether a second run of a module would draw other masks."""
    return module.training and isinstance(module, torch.nn.Dropout) and module.p > 0


def _with_hidden(output, hidden: torch.Tensor):
    return type(output)(**(dict(output) | {"last_hidden_state": hidden}))
