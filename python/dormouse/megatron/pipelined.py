"""A call of the schedule on a pipeline stage.

All stages run the forwards of all groups; the last one then has all values, and runs Megatron's
schedule of a model that is not cut, in which the trainer computes its losses; then all stages carry
out the planner's lists. Megatron's pipeline schedule would send a row of each microbatch by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer import TransformerConfig

from ..trainers.refusals import refuse
from .balancing import set_scale
from .batches import Microbatch
from .calls import Calls
from .context import Context
from .plans import joint_places
from .shared_gpt import SharedGPT, waits_in_passes
from .stage import Stage
from .work import Work

# Arguments of the schedule that are of its messages.
_OWN_MESSAGES = ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection")
# Shared passes are in their place.
_SCHEDULES = (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)


def check_schedule(function: Callable) -> None:
    """Checks the schedule of a pipeline.

    Raises :class:`UnsupportedTrainerError` for a schedule that is not Megatron's own. Shared passes
    would replace it, and whatever else it does would be lost.
    """
    refuse(
        (
            function not in _SCHEDULES,
            f"the schedule of a pipeline is a {type(function).__name__} that is not Megatron's "
            "own: stages run shared passes in its place, so it would not be called",
            "what get_forward_backward_func() of Megatron returns, with nothing around it",
        )
    )


def run_pipelined(
    shared: list[SharedGPT],
    last: GPTModel,
    context: Context,
    own: list[Microbatch],
    work: Work,
    config: TransformerConfig,
    named: dict,
) -> list:
    """Returns what the schedule returns. ``shared``: this stage's parts of the model, of which
    ``last`` is the last. ``own``: this rank's batches. ``config``: of the schedule. ``named``: its
    arguments, a list of models and one of iterators among them.

    Raises :class:`UnsupportedTrainerError`.
    """
    places, options = work.places, work.options
    refuse(
        *(
            (named.get(name) is not None, f"{name} is given to a pipeline's schedule", "None")
            for name in _OWN_MESSAGES
        ),
        (
            options.get("graphs", "twice") not in ("auto", "twice"),
            f"graphs is {options.get('graphs')!r} in a pipeline",
            "'auto' or 'twice'",
        ),
    )
    forward_only, prompt_chunks = named["forward_only"], options["prompt_chunks"]
    if waits_in_passes(last):
        refuse(
            (
                prompt_chunks not in (None, 1),
                f"prompt_chunks is {prompt_chunks} with expert_model_parallel_size or "
                "context_parallel_size above 1",
                "None or 1",
            )
        )
        if context.ways > 1:
            places = context.dealt(places, work.dummy_row)
        places = joint_places(shared[0], last, places, work.dummy_row, options, forward_only)
        prompt_chunks = 1
    parts = [each.part(places, options["microbatch_tokens"], work.balanced) for each in shared]
    with Stage(parts, shared[0].held, prompt_chunks, options["microbatch_tokens"]) as stage:
        values = stage.values(work.shape)
        stored, tokens = [], torch.zeros([], dtype=torch.int, device=stage.device)
        if values is not None:
            values = context.joined(values)
            if work.dealt is not None:
                values = work.dealt.to_readers(values)
            values.requires_grad_(not forward_only)
            only = {name: named[name][-1:] for name in ("model", "data_iterator")}
            check_state, finalized = shared[-1].state_check(), _Unfinished(config, *only["model"])

            def part(rows: slice, is_last: bool) -> torch.Tensor:
                with finalized.suspended():
                    check_state()
                return values[rows]

            calls = Calls(
                last,
                own,
                part,
                context.columns_of,
                without_loss=work.without_loss,
                has_backward=not forward_only and torch.is_grad_enabled(),
            )
            with calls.in_place(), finalized:
                stored = forward_backward_no_pipelining(**named | only)
            tokens = tokens if finalized.tokens is None else finalized.tokens
            if values.grad is None:
                values.grad = torch.zeros_like(values)
        elif work.balanced is not None:
            set_scale(config, named["num_microbatches"], stage.device)
        if forward_only:
            return stored
        of_values = None
        if values is not None:
            check_state()
            of_values = values.grad
            if work.dealt is not None:
                of_values = work.dealt.to_runners(of_values, work.shape[0])
            # Other ranks' losses read values of this rank's responses.
            of_values = context.joined(of_values)
        gradients = stage.backward(of_values)
        pairs = zip(stage.parameters, gradients, strict=True)
        found = [(p.expand_as(p), gradient) for p, gradient in pairs if gradient is not None]
    if found:
        # As a backward: hooks of the parameters add to what Megatron reduces.
        torch.autograd.backward(*map(list, zip(*found, strict=True)))
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            named["model"],
            tokens if config.calculate_per_token_loss else None,
            force_all_reduce=named.get("force_all_reduce", False),
        )
    return stored


@contextlib.contextmanager
def timed(config: TransformerConfig) -> Iterator[None]:
    """Context of a call on a stage: Megatron's timer of its pipeline schedules. It may start with a
    barrier of all ranks, so every stage starts it."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()


class _Unfinished:
    """Context of a schedule that gives parameters no gradients, and reduces none; learns the number
    of tokens. It starts no timers: the other stages run no schedule."""

    def __init__(self, config: TransformerConfig, chunk: torch.nn.Module):
        """``config``: of the schedule, which would take that of ``chunk``."""
        self._config, self._chunk = config, chunk
        self.tokens: torch.Tensor | None = None

    def __enter__(self):
        config = self._config
        self._of_chunk, self._chunk.config = self._chunk.config, config
        self._own = config.finalize_model_grads_func, config.no_sync_func, config.timers
        config.finalize_model_grads_func, config.no_sync_func = self._learn, None
        config.timers = None
        return self

    def __exit__(self, *exc):
        config = self._config
        config.finalize_model_grads_func, config.no_sync_func, config.timers = self._own
        self._chunk.config = self._of_chunk

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context of the configuration as it is outside."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _learn(self, model, num_tokens=None, **named) -> None:
        self.tokens = num_tokens
