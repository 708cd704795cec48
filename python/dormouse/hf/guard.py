"""Guards of a microbatch's graph against backwards that are not the step's own.

A loss function may run one, ``torch.autograd.grad`` by a weight for example. Its result lacks the
prompt's part if the prompt depends on that weight. K and V notice it: their gradients go through
dormouse (:meth:`.prefix.PrefixForward.accumulate`). States of recurrent layers and rows of the
prompt do not: they are leaves of autograd, which the backward need not even reach.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from .outputs import Output
from .prompt_rows import head_of
from .support import ModelView


@contextlib.contextmanager
def guarded(
    view: ModelView, check: Callable, *, has_states: bool, reads_prompt: bool
) -> Iterator[Callable[[Output], None]]:
    """Context of the forward; yields a function that guards what losses read of it.

    ``check``: called when a backward enters what is guarded. ``has_states``: guards everything up
    to the last layer. ``reads_prompt``: guards everything up to the last hidden states, which
    losses also read of the prompt.
    """
    thread = threading.get_ident()

    def guard(*tensors: torch.Tensor) -> None:
        # Another thread evaluates the model meanwhile.
        if threading.get_ident() == thread:
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(check)

    @torch.compiler.disable
    def guard_layer(module, args, output):
        guard(output[0] if isinstance(output, tuple) else output)

    @torch.compiler.disable
    def guard_head(module, args):
        guard(args[0])

    def guard_read(output: Output) -> None:
        if reads_prompt:
            guard(*(tensor for _, tensor in output.without_logits().tensors()))
        elif has_states:
            guard(*output.router_logits or ())

    with contextlib.ExitStack() as stack:
        if has_states:
            stack.callback(view.layers[-1].register_forward_hook(guard_layer).remove)
        if reads_prompt:
            stack.callback(head_of(view).register_forward_pre_hook(guard_head).remove)
        yield guard_read
