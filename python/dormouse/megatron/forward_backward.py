"""Megatron's schedule with the model's losses from shared passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from ..errors import ArgumentError
from ..failures import fail_together
from ..group import PROMPT_TOKENS_MIN
from ..hf.one_thread import holding
from ..hf.padded import Places
from ..hf.token_scores import KEPT, TWICE
from ..hf.window import Window
from ..runtime import Runtime
from ..trainers.options import Options
from ..trainers.refusals import refuse
from ..trainers.runtimes import runtime_of
from ..trainers.sharing import Sharing
from .balancing import Balancing, balances
from .batches import Microbatch, Read, places_of, shape_of
from .calls import Calls
from .chunks import PROMPT_CHUNKS_MAX
from .context import Context, dummy_of
from .context_shards import ALL_GATHER, RING, choose_way
from .pipelined import check_schedule, run_pipelined, timed
from .plans import (
    all_share,
    compare_calls,
    compare_plans,
    compare_shapes,
    joint_places,
    overlaps,
)
from .refusals import check_groups, chunks_of, nested
from .replica_lists import sooner
from .replicas import CUT, WHOLE, Dealt, Replicas
from .shared_gpt import SharedGPT, is_expert_parallel, is_pipeline, largest, waits_in_passes
from .taken import take
from .work import Work

_log = logging.getLogger(__name__)


class SharedForwardBackward:
    """Called like Megatron's ``forward_backward_func``; see :func:`dormouse.megatron.share`."""

    def __init__(
        self,
        own: Callable,
        *,
        read: Read,
        prompt_chunks: int | None,
        across_replicas: bool,
        options: Options,
    ):
        functools.update_wrapper(self, own)
        self._own, self._runtime, self._read = own, options.runtime, read
        self._sleep, self._score_options = options.sleep, options.score
        self._across_replicas = across_replicas
        if prompt_chunks is not None and not 1 <= prompt_chunks <= PROMPT_CHUNKS_MAX:
            raise ArgumentError(
                f"prompt_chunks is {prompt_chunks}; accepted: None, or 1 to {PROMPT_CHUNKS_MAX}"
            )
        self._prompt_chunks = prompt_chunks
        # By the way of K and V, too: each has a check and probes of its own.
        self._models: dict[tuple[GPTModel, str], SharedGPT] = {}
        self._noticed = self._is_within = False
        self._finalize = _Finalize()
        self.sharing = Sharing()
        """Counts since the construction."""

    def __call__(
        self,
        *,
        data_iterator,
        model,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **named,
    ):
        named |= {
            "model": model if isinstance(model, list) else [model],
            "num_microbatches": num_microbatches,
            "forward_only": forward_only,
        }
        # Before this rank joins the others: a call that is refused has told them nothing.
        with _alone(named["model"]):
            if collect_non_loss_data:
                return self._own(data_iterator=data_iterator, collect_non_loss_data=True, **named)
            if self._is_within:
                return self._evaluated(data_iterator, named)
            # Ranks wait for each other in messages and collectives, which one that fails never
            # enters.
            with fail_together():
                chunks, end = chunks_of(named["model"]), None
                if is_pipeline(chunks[0]):
                    check_schedule(self._own)
                try:
                    taken = take(data_iterator, num_microbatches, self._read)
                except StopIteration as error:
                    end = error
                own = (self._across_replicas, forward_only, num_microbatches)
                compare_calls(*own, end is not None, chunks[0])
                if end is None:
                    self._is_within = True
                    try:
                        return self._shared_call(chunks, *taken, named)
                    finally:
                        self._is_within = False
            # No failure: the data ended on all ranks.
            raise end

    def _evaluated(self, data_iterator, named: dict):
        """Returns what the schedule returns for an evaluation in a loss of a call."""
        refuse(
            (
                not named["forward_only"],
                "the schedule is called within itself with a backward",
                "forward_only=True",
            ),
            (
                parallel_state.get_pipeline_model_parallel_world_size() > 1,
                "the schedule of a pipeline is called within itself, where one stage is alone",
                "an evaluation between two calls",
            ),
        )
        # Without gradients the model's calls are of no microbatch.
        with torch.no_grad():
            return self._own(data_iterator=data_iterator, **named)

    def _shared_call(
        self, chunks: list[GPTModel], batches: list, own: list[Microbatch], named: dict
    ):
        """Returns what the schedule returns. ``chunks``: this rank's parts of the model.
        ``batches``: of the data iterator, of which ``own`` has been read. ``named``: the other
        arguments."""
        context = Context(chunks[0])
        check_groups(named.get("pg_collection"), "the schedule's pg_collection")
        _check_overlap(named)
        if context.ways > 1:
            compare_shapes(own, chunks[0])
        microbatches = context.whole(own)
        has_backward = not named["forward_only"] and torch.is_grad_enabled()
        # Routers read every row of the trainer's. Megatron's do so wherever gradients are enabled:
        # they do not know whether a backward follows.
        whole = _balance(chunks) and torch.is_grad_enabled()
        replicas = self._replicas(chunks[0], whole)
        of_replicas = [microbatches] if replicas is None else replicas.gathered(microbatches)
        rows_of_all = list(itertools.chain.from_iterable(of_replicas))
        if context.ways > 1:
            places = _all_places(rows_of_all, context, whole)
        else:
            places = self._shared_places(rows_of_all, whole)
        options = self._options(rows_of_all, places or [], context.ways)
        pipeline = is_pipeline(chunks[0])
        if pipeline:
            options["prompt_chunks"] = self._prompt_chunks
        dealt: list[Dealt] = []
        if replicas is not None and places is not None:
            # Without a backward no lists run.
            has_lists = pipeline and has_backward and not waits_in_passes(chunks[0])
            for way in (CUT, WHOLE) if has_lists else (CUT,):
                runners = replicas.assigned(places, options["microbatch_tokens"], way)
                dealt.append(replicas.dealt(places, of_replicas, runners))
        plan = (rows_of_all, places, options, named["forward_only"])
        compare_plans(*plan, chunks[0], replicas, dealt)
        named["data_iterator"] = [iter(batches) for _ in chunks]
        if not all_share(named["model"], chunks[0], places is not None, named["forward_only"]):
            return self._own(**named)
        way = ALL_GATHER if context.ways == 1 else self._way(chunks, places)
        refuse(
            (
                pipeline and way == RING,
                "K and V of a prompt have no room on a rank, and pass round no ring in a pipeline",
                "a larger budget, or pipeline_model_parallel_size=1",
            )
        )
        rows, columns = shape_of(rows_of_all)
        shared = [self._shared(each, way) for each in chunks]
        own_part = None
        if dealt:
            own_part, *others = dealt
            if others:
                asked = (options["prompt_chunks"], options["microbatch_tokens"])
                own_part = sooner(shared, dealt, *asked)
            places, rows = own_part.places, own_part.rows
        # Without any, other replicas or ranks wait for this one's passes.
        run = places or [dummy_of(rows)]
        work = Work(run, (rows + 1, columns), options, microbatches if whole else None, own_part)
        if pipeline:
            # Megatron's too is of the first chunk, whatever the others have.
            config = get_model_config(named["model"][0])
            with timed(config):
                result = run_pipelined(shared, chunks[-1], context, own, work, config, named)
        else:
            calls = functools.partial(
                Calls,
                chunks[0],
                own,
                columns_of=context.columns_of,
                without_loss=work.without_loss,
            )
            result = self._run_whole(shared[0], chunks[0], context, calls, way, work, named)
        self.sharing.rows += sum(len(each.rows) for each in places)
        self.sharing.prompts += len(places)
        return result

    def _run_whole(
        self,
        shared: SharedGPT,
        gpt: GPTModel,
        context: Context,
        calls_of: Callable[..., Calls],
        way: str,
        work: Work,
        named: dict,
    ):
        """Returns what the schedule returns for a model that is not cut into stages.

        ``calls_of``: makes what gives the trainer its losses. ``way``: of K and V of prompts.
        """
        places, options = work.places, work.options
        has_graph = not named["forward_only"]
        if context.ways > 1:
            places = context.dealt(places, work.dummy_row)
        # Why each microbatch waits for those of other ranks.
        why = "K and V of prompts that pass round a ring" if way == RING else None
        if is_expert_parallel(gpt):
            why = "expert_model_parallel_size above 1"
        if why is not None:
            refuse(
                (
                    options.get("graphs") == KEPT,
                    f"graphs is 'kept' with {why}",
                    "'auto' or 'twice'",
                )
            )
            row, forward_only = work.dummy_row, named["forward_only"]
            places = joint_places(shared, gpt, places, row, options, forward_only)
            options |= {"graphs": TWICE}
        if has_graph and overlaps(named["model"]):
            # Every parameter needs a gradient, also where those of all values are 0.
            first, *others = places
            places = [dataclasses.replace(first, microbatches=max(1, first.microbatches)), *others]
        balancing = None
        if work.balanced is not None:
            # All responses run.
            places = [
                dataclasses.replace(each, microbatches=max(1, each.microbatches))
                for each in places
            ]
            balancing = Balancing(gpt, work.balanced, places)
        own = places, work.shape, balancing, work.dealt
        window = functools.partial(shared.window, *own, **options)
        is_joint = work.dealt is not None or why is not None or context.ways > 1
        parts = _Parts(window, has_graph=has_graph, is_joint=is_joint)
        has_backward = has_graph and torch.is_grad_enabled()
        config = get_model_config(named["model"][0])
        calls = calls_of(parts.of, has_backward=has_backward)
        with calls.in_place(), parts.finished(config, self._finalize):
            return self._own(**named)

    def _replicas(self, gpt: GPTModel, whole: bool) -> Replicas | None:
        """Returns those that share prompts with this one. ``whole``: whether routers read all rows.

        Raises :class:`UnsupportedTrainerError`.
        """
        if not self._across_replicas:
            return None
        refuse(
            (
                whole,
                "routers balance experts and across_replicas is True: rows of a replica are on "
                "others",
                "across_replicas=False",
            )
        )
        return Replicas(gpt)

    def _shared_places(
        self, microbatches: list[Microbatch], whole: bool
    ) -> list[Places] | None:
        """Returns the groups of all rows; None if no prompt is shared. ``whole``: see
        :func:`places_of`."""
        places = places_of(microbatches, whole=whole)
        if places is not None and len(places) < sum(len(each.rows) for each in places):
            return places
        if not self._noticed:
            self._noticed = True
            cause = "rows share a prompt if they are equal up to the first label with a loss"
            if places is None:
                cause = (
                    f"a row has fewer than {PROMPT_TOKENS_MIN} tokens up to its first label with a "
                    "loss"
                )
            _log.warning(
                "no prompt is shared by the rows of %d microbatches, so they run as in Megatron: "
                "%s",
                len(microbatches),
                cause,
            )
        return None

    def _options(
        self, microbatches: list[Microbatch], places: list[Places], ways: int
    ) -> dict:
        """Returns the options of a window. A microbatch has as many tokens as the trainer's, of
        which a context-parallel rank, one of ``ways``, has a part."""
        of_row = [i for i, each in enumerate(microbatches) for _ in range(len(each.tokens))]
        tokens = [0] * len(microbatches)
        for each in places:
            for row, response in zip(each.rows, each.group.responses, strict=True):
                tokens[of_row[row]] += len(response)
        given = {name: each for name, each in self._score_options.items() if each is not None}
        return {"microbatch_tokens": max(1, -(-max(tokens) // ways)), **given}

    def _way(self, chunks: list[GPTModel], places: list[Places]) -> str:
        """Returns the way of K and V of all prompts, the same on all ranks that decide together:
        by the stage with the most layers. Collective of these.

        Raises :class:`UnsupportedTrainerError` if they fit in none.
        """
        gpt, layers = chunks[0], sum(len(each.decoder.layers) for each in chunks)
        room_bytes = self._runtime_of(gpt).info()["alloc_budget_bytes"]
        lengths = (len(each.group.prompt) for each in places)
        # Its last token runs with the responses. Without any, a dummy runs.
        tokens = max(lengths, default=PROMPT_TOKENS_MIN) - 1
        tokens, layers, room_bytes = largest(gpt, [tokens, layers, -room_bytes])
        return choose_way(gpt, tokens, layers, -room_bytes)

    def _shared(self, gpt: GPTModel, way: str) -> SharedGPT:
        if (gpt, way) not in self._models:
            runtime = self._runtime_of(gpt)
            may_cut = is_pipeline(gpt) and not waits_in_passes(gpt)
            cuts_prompts = may_cut and self._prompt_chunks != 1
            self._models[gpt, way] = SharedGPT(
                gpt, runtime, sleep=self._sleep, way=way, cuts_prompts=cuts_prompts
            )
        return self._models[gpt, way]

    def _runtime_of(self, gpt: GPTModel) -> Runtime:
        return self._runtime or runtime_of(next(gpt.parameters()).device)


@contextlib.contextmanager
def _alone(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Context in which no other thread runs passes of a model. ``modules``: its parts on this rank,
    wrapped or not."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(holding(nested(module)[-1]))
        yield


def _check_overlap(named: dict) -> None:
    """Checks that gradients are reduced in the last microbatch alone. Otherwise Megatron counts in
    its first call how often a parameter gets a gradient, and reduces it in later ones after as
    many: once in a shared call, and in others once for each microbatch. ``named``: arguments of the
    schedule.

    Raises :class:`UnsupportedTrainerError`.
    """
    refuse(
        (
            overlaps(named["model"])
            and get_model_config(named["model"][0]).no_sync_func is None
            and named["num_microbatches"] > 1
            and not named["forward_only"],
            f"overlap_grad_reduce is True and no_sync_func None with {named['num_microbatches']} "
            "microbatches: gradients would be reduced before the last of them",
            "no_sync_func=model.no_sync, of several chunks a list; overlap_grad_reduce=False; or "
            "one microbatch",
        )
    )


def _balance(chunks: list[GPTModel]) -> bool:
    """Returns whether routers balance experts.

    Raises :class:`UnsupportedTrainerError` for parts of the model in different modes.
    """
    found = set(map(balances, chunks))
    refuse(
        (
            len(found) > 1,
            "one chunk of the model balances experts and another is in evaluation mode",
            "all in one mode",
        )
    )
    return found.pop()


def _all_places(
    microbatches: list[Microbatch], context: Context, whole: bool
) -> list[Places]:
    """Returns the groups of all rows, of which some may have a prompt of their own. ``whole``: see
    :func:`places_of`.

    Raises :class:`UnsupportedTrainerError` for rows that cannot run in shared passes.
    """
    places = places_of(microbatches, whole=whole)
    refuse(
        (
            places is None,
            f"a row has fewer than {PROMPT_TOKENS_MIN} tokens up to its first label with a loss, "
            f"and context_parallel_size is {context.ways}, with which all rows run in shared "
            "passes",
            f"{PROMPT_TOKENS_MIN} tokens, or context_parallel_size=1",
        )
    )
    return places


class _Finalize:
    """In place of the trainer's ``finalize_model_grads_func``. One for all calls: it is part of the
    configuration, by whose changes a model is checked again."""

    __slots__ = ("_before", "_own")

    def __call__(self, *args, **named):
        self._before()
        return self._own(*args, **named)

    @contextlib.contextmanager
    def after(self, before: Callable[[], None], config: TransformerConfig) -> Iterator[None]:
        """Context of a schedule in which the trainer's function follows ``before``."""
        own = config.finalize_model_grads_func
        self._before, self._own = before, own
        if own is not None:
            config.finalize_model_grads_func = self
        try:
            yield
        finally:
            config.finalize_model_grads_func = own
            del self._before, self._own


class _Parts:
    """Parts of a window that is scored when the first is needed, within the schedule."""

    def __init__(self, find_window: Callable[[], Window], *, has_graph: bool, is_joint: bool):
        """``is_joint``: other ranks wait for this one's passes."""
        self._find_window = find_window
        self._has_graph, self._is_joint = has_graph, is_joint
        self._window: Window | None = None

    def of(self, rows: slice, is_last: bool) -> torch.Tensor:
        """Returns log-probabilities of labels."""
        with torch.set_grad_enabled(self._has_graph and torch.is_grad_enabled()):
            self._window = self._window or self._find_window()
            return self._window.part(rows, is_last=is_last).log_probabilities

    @contextlib.contextmanager
    def finished(self, config: TransformerConfig, finalize: _Finalize) -> Iterator[None]:
        """Context of a schedule, before whose reduction the passes have run backward: it runs no
        backward of a loss that is a constant."""
        try:
            with finalize.after(self._finish, config):
                yield
                self._finish()
        finally:
            # After an error a traceback may hold this.
            self._window = None

    def _finish(self) -> None:
        if self._window is not None and self._has_graph:
            self._window.finish(without_gradients=self._is_joint)
