"""Log-probabilities of a model whose steps are checked: :meth:`ScoredModel.score`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator

import torch

from ..activations.forwards import Forwards
from ..asleep import why_no_tier, why_not_in_place
from ..errors import ArgumentError
from ..group import Group
from ..offload import in_place
from ..schedule import Plan
from . import head, sharding, support
from .batch import Batch, GroupBatch
from .check import undisturbed
from .checked_model import CheckedModel
from .filter.choice import Chosen, TokenChoice
from .filter.microbatch import check_filtered
from .head import Head
from .likelihood import check_temperature
from .padded import Places, RowPlaces, groups_of, groups_of_packed
from .score import GroupScores, batches_of, score_batches
from .score_trees import TreePlaces, with_trees
from .score_values import Asked, Measure, Values
from .sharding import ReplicatedWeights
from .step import Step
from .token_scores import (
    KEPT,
    TWICE,
    KeptCall,
    Passes,
    ScoreCall,
    Shapes,
    TokenScores,
    TwiceCall,
    differentiable,
)
from .twins import gradient_bytes_max
from .whole_weights import WholeParameters, WholeWeights
from .window import Window

AUTO = "auto"
# Share of the free memory that graphs of microbatches may take in the mode "kept".
KEPT_SHARE = 0.5
# Share of the size of all gradients, which come after them, that kept graphs with their logits take
# awake: they do not raise the peak, and waking them takes time.
AWAKE_SHARE = 0.5
# What a microbatch of a differentiable call takes on a CPU by default, and its rows, at least those
# of other steps. All its graphs are kept if memory allows, so larger ones cost little, and products
# of more rows are faster. Depends on the model alone, as bits depend on it.
SCORED_MICROBATCH_BYTES_MAX = 1 << 30
SCORED_MICROBATCH_TOKENS_MAX = 2048


def check_graphs(graphs: str) -> None:
    """Checks the option ``graphs`` of :meth:`ScoredModel.score`."""
    if graphs not in (AUTO, KEPT, TWICE):
        raise ArgumentError(f"graphs is {graphs!r}; accepted: {AUTO!r}, {KEPT!r}, {TWICE!r}")


class ScoredModel(CheckedModel):
    """A model that scores groups and padded batches."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # Bytes that calls keep awake until their backwards.
        self._awake: weakref.WeakKeyDictionary[ScoreCall, int] = weakref.WeakKeyDictionary()
        self._whole: WholeParameters | None = None

    def score(
        self,
        ids: torch.Tensor | Group,
        mask: torch.Tensor | None = None,
        *,
        keep: int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        outputs: Collection[str] = (),
        prompt_outputs: Collection[str] = (),
        microbatch_tokens: int | None = None,
        graphs: str = AUTO,
        token_filter: TokenChoice | None = None,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> TokenScores | GroupScores:
        """Returns log-probabilities of tokens, each shared prompt computed once.

        Of a padded batch: ``ids`` and ``mask`` are ``[rows, columns]``, the tokens of a row
        consecutive, padding on either side. ``keep``: the number of last columns that hold
        responses; the tokens before them are the row's prompt, and rows with equal prompts share
        it, in whatever order they come. Rows that only begin alike, such as turns of a
        conversation, run as a tree where the planner predicts that to be faster. Returns
        :class:`TokenScores` **with a graph**: compute any loss from the values and call its
        ``backward``. Prompts' and responses' passes run in that backward, the parameters' gradients
        arrive once, after the last pass, and their hooks see an ordinary backward. So
        DistributedDataParallel and DeepSpeed's engine reduce them, and a trainer's loss scaling and
        accumulation apply. One backward per call, before weights change.

        ``temperature`` divides the logits. ``entropy``: also returns entropies. ``outputs``: what
        else it returns of responses, with a graph too: ``"last_hidden_state"`` (for value heads),
        ``"router_logits"``, ``"chosen_logits"``; ``prompt_outputs``: of prompts, the first two.
        They are copies in the layout of the batch (:class:`TokenScores`), and their gradients take
        as much memory. Modules outside the model that a loss uses on them receive gradients too.
        ``prompt_outputs`` run prompts through their last layer, which otherwise ends at K and V.

        ``graphs``: ``"kept"`` runs one forward and keeps the graphs of all microbatches until the
        backward. With ``sleep=True`` they sleep meanwhile, on a CPU, unless they are small beside
        the gradients. Logits are kept too if they fit, and with ``sleep=True`` take no more than
        the gradients of all parameters, which come after them; otherwise the backward computes a
        microbatch's again, unless the model's head cannot run apart (:func:`.head.of`).
        ``"twice"`` runs the forward again in the backward, and keeps one microbatch's graph at a
        time; a model that is not as it was in the call, mode, adapters and buffers included, is
        refused then. ``"auto"`` keeps graphs that take at most half of the free memory awake.
        Values and gradients do not depend on it. Under ``torch.no_grad()`` there is no graph.
        ``microbatch_tokens``: rows of a microbatch; None: 4,096 on a GPU, on a CPU as many as take
        1 GiB with their logits, from 512 to 2,048. ``context``: entered around all passes, those of
        the backward included; the model is checked and run as it is in there.

        ``token_filter``: the tokens of responses that have a backward (:data:`.TokenChoice`): a
        mask, or a function that is called for each response when its log-probabilities are known.
        Values do not change. The row that predicts a dropped token gets no gradient in any layer,
        nor do its K and V, and what it saved is freed before anything sleeps. Rows of prompts count as
        kept. The gradient of a loss at a dropped token is ignored. Rows run as groups, not as trees.
        :attr:`TokenScores.filtered` says what was freed.

        Of a :class:`dormouse.Group`: returns :class:`GroupScores`, without a graph. Responses of
        weight 0 are scored in microbatches of their own, which have the rows of :meth:`backward`.

        Passes are those of :meth:`backward`: with equal weights and ``microbatch_tokens``, and
        :func:`log_probabilities` in the loss function, the ratio of a policy to these scores is
        exactly 1. Evaluation mode and training mode are two states of the model, and each is
        checked once.

        Contains no collective of its own, so ranks may call it independently; three exceptions:

        - An engine of DeepSpeed in stage 3: a call gathers all weights, and so does its backward.
          ``"auto"`` keeps no graphs, which would keep the weights.
        - A model under ``fully_shard``: a call gathers all weights, in the dtype of its
          ``MixedPrecisionPolicy``, and holds them until its backward, which averages the gradients
          into the shards. Every rank makes the same calls and backwards, with rows of its own.
        - A model that is split over ranks: passes hold its own collectives, so every rank of its
          mesh calls it with the same arguments. ``"auto"`` keeps no graphs.

        Arguments of other shapes raise :class:`dormouse.ArgumentError`.
        """
        asked = Asked.of(entropy, outputs, prompt_outputs)
        own = (context, temperature, asked, microbatch_tokens)
        if isinstance(ids, Group):
            if outputs or prompt_outputs or token_filter is not None:
                raise ArgumentError(
                    "score() of a Group with outputs, prompt_outputs or token_filter; accepted: "
                    "none of them, or a padded batch"
                )
            return self._ready_for(*own, self._score_group, ids)
        if mask is None or keep is None:
            raise ArgumentError("score() of a tensor without mask or keep; accepted: both")
        shapes = (len(ids), keep), (len(ids), ids.shape[-1] - keep)

        def find_places() -> list[RowPlaces]:
            places = groups_of(ids, mask, keep)
            return self._with_trees(places, asked, microbatch_tokens, token_filter)

        return self._call(find_places, shapes, graphs, *own, token_filter=token_filter)

    def score_packed(
        self,
        ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        prompt_lengths: torch.Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
        outputs: Collection[str] = (),
        prompt_outputs: Collection[str] = (),
        microbatch_tokens: int | None = None,
        graphs: str = AUTO,
        token_filter: TokenChoice | None = None,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> TokenScores:
        """Returns log-probabilities of a packed batch, as :meth:`score` of a padded one.

        ``ids``: token ids of all sequences, one after another, ``[tokens]``. ``cu_seqlens``: where
        each begins, and the end, ``[sequences + 1]``. ``prompt_lengths``: tokens of each sequence's
        prompt, ``[sequences]``. Values are ``[tokens]``: each at the place of its own token, not of
        the one before, and 0 in prompts. ``outputs`` are ``[tokens, ...]``, those of prompts too.
        """
        asked = Asked.of(entropy, outputs, prompt_outputs)

        def find_places() -> list[RowPlaces]:
            places = groups_of_packed(ids, cu_seqlens, prompt_lengths)
            return self._with_trees(places, asked, microbatch_tokens, token_filter)

        shapes = (tuple(ids.shape),) * 2
        own = (context, temperature, asked, microbatch_tokens)
        return self._call(find_places, shapes, graphs, *own, token_filter=token_filter)

    def window(
        self, ids: torch.Tensor, mask: torch.Tensor, *, keep: int, **options
    ) -> Window:
        """Returns the scores of the rows of several microbatches, to be taken in parts.

        Arguments are those of :meth:`score` for a padded batch. Rows with equal prompts share them
        whichever microbatches they are in::

            window = shared.window(ids, mask, keep=keep)
            for rows in microbatches:
                scores = window.part(rows, is_last=rows is microbatches[-1])
                loss_fn(scores.log_probabilities, rows).backward()

        The last part's backward runs the passes and gives parameters their gradients, those before
        it give them none. In DistributedDataParallel it alone is reduced; call ``window`` under
        ``no_sync()``. DeepSpeed's engine is refused with :class:`UnsupportedModelError`: it reduces
        after every backward.
        """
        sharding.check_windows(self._wrapped)
        return Window(self._wrapped, self.score(ids, mask, keep=keep, **options))

    def window_packed(
        self,
        ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        prompt_lengths: torch.Tensor,
        **options,
    ) -> Window:
        """Returns the scores of the sequences of several microbatches, to be taken in parts, as
        :meth:`window` does for rows. Arguments are those of :meth:`score_packed`. A part is a slice
        of the tokens, or their indices.
        """
        sharding.check_windows(self._wrapped)
        scores = self.score_packed(ids, cu_seqlens, prompt_lengths=prompt_lengths, **options)
        return Window(self._wrapped, scores)

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Context of calls of :meth:`score` whose gradients the caller takes by
        ``torch.autograd.grad``: nothing around the model prepares to reduce them."""
        before, self._is_reduced = self._is_reduced, False
        try:
            yield
        finally:
            self._is_reduced = before

    def _with_trees(
        self,
        places: list[Places],
        asked: Asked,
        microbatch_tokens: int | None,
        token_filter: TokenChoice | None,
    ) -> list[RowPlaces]:
        """Returns the same rows, some as trees. A tree has no prompt of its own, and drops nothing
        in other rows than a group. A token that a filter keeps in one row and drops in another
        would have one row in a tree."""
        drops_alike = self._prompt_dropout or not self._model.training
        if asked.request.prompt or not drops_alike or token_filter is not None:
            return places
        rows = self._scored_rows_of(microbatch_tokens)
        return with_trees(places, self._shape, rows)

    def _scored_rows_of(self, microbatch_tokens: int | None) -> int:
        """Returns the rows of a microbatch of a differentiable call."""
        rows = self._rows_of(microbatch_tokens)
        if microbatch_tokens is not None or self._runtime.device.type != "cpu":
            return rows
        row_bytes = self._saved_bytes_per_token + self._shape.vocab * self._shape.dtype_bytes
        fitting = SCORED_MICROBATCH_BYTES_MAX // row_bytes
        return max(rows, min(fitting, SCORED_MICROBATCH_TOKENS_MAX))

    def _call(
        self,
        find_places,
        shapes: Shapes,
        graphs: str,
        context,
        *options,
        token_filter: TokenChoice | None = None,
    ):
        """``find_places()``: the groups of the batch. ``shapes``: of its layouts."""
        check_graphs(graphs)
        chosen = None if token_filter is None else Chosen(token_filter, shapes[0])
        own = (find_places, shapes, graphs, chosen, context)
        return self._ready_for(context, *options, self._score_rows, *own)

    def _ready_for(
        self, context, temperature: float, asked: Asked, microbatch_tokens: int | None, work, *own
    ):
        """Returns ``work(*own, weights, temperature, asked, microbatch_tokens)``, run with the
        model as it is in ``context``."""
        has_graph = torch.is_grad_enabled()
        # The first call checks the model, which needs autograd whatever the caller is in.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(has_graph),
            self._passes(),
            self._gathered() as gathered,
            context(),
        ):
            check_temperature(temperature)
            weights = self._ready()
            return work(*own, gathered or weights, temperature, asked, microbatch_tokens)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[WholeWeights | None]:
        """Context of passes with the weights whole, if the model is under ``fully_shard``."""
        if not sharding.sharded_modules(self._model):
            yield None
            return
        if self._whole is None:
            self._whole = WholeParameters(self._model, self._runtime.device)
        weights = self._whole.gather()
        with weights.in_place():
            yield weights

    def _score_group(
        self,
        group: Group,
        weights: ReplicatedWeights,
        temperature: float,
        asked: Asked,
        microbatch_tokens: int | None,
    ) -> GroupScores:
        if self._model.training and not self._prompt_dropout:
            raise support.UnsupportedModelError(
                "the model is in training mode and prompt_dropout is False, so scores would depend "
                "on masks that no step draws again; accepted: model.eval()"
            )
        microbatch_tokens = self._rows_of(microbatch_tokens)
        batch, request = GroupBatch(group), self._request([group])
        self._check_if_needed(weights, [batch], microbatch_tokens, request)
        found: list[Values] = [None] * len(group.responses)

        def put(number: int, first: int, values: Values) -> None:
            found[number] = values

        counts = score_batches(
            self._view,
            weights,
            batches_of(group),
            lambda each: self._plan(each, microbatch_tokens),
            self._runtime.device,
            Measure(self._view, temperature, asked),
            put,
        )
        of_logits = [each.of_logits for each in found]
        entropies = [each[1] for each in of_logits] if asked.entropies else None
        own = [each[0] for each in of_logits], entropies
        return GroupScores(*own, counts, self._checked([batch], request))

    def _score_rows(
        self,
        find_places: Callable[[], list[RowPlaces]],
        shapes: Shapes,
        graphs: str,
        chosen: Chosen | None,
        context: Callable[[], contextlib.AbstractContextManager],
        weights: ReplicatedWeights,
        temperature: float,
        asked: Asked,
        microbatch_tokens: int | None,
    ) -> TokenScores:
        microbatch_tokens = self._scored_rows_of(microbatch_tokens)
        places, request = find_places(), asked.request
        batches = [each.batch() for each in places]
        if batches:
            self._check_if_needed(weights, batches, microbatch_tokens, request)
        if chosen is not None:
            check_filtered(self._model, self._view)

        def step_of(batch: Batch, plan: Plan, kind: type[Step]) -> Step:
            find = self._probe_finder(weights, batch, microbatch_tokens)
            return self._step(weights, batch, plan, find, kind=kind)

        @contextlib.contextmanager
        def in_backward() -> Iterator[None]:
            with self._passes(in_backward=True), weights.in_place(), context():
                yield

        state = self._state if batches else None

        def check_state() -> None:
            is_same = state is None or state.fingerprint.matches()
            (is_other,) = weights.agreed([not is_same])
            if is_other:
                what = "on another rank" if is_same else state.fingerprint.difference()
                raise support.UnsupportedModelError(
                    "the model was changed between the call and its backward, which runs the "
                    f"forward again: {what}; accepted: a change after the backward, or "
                    "graphs='kept'"
                )

        passes = Passes(
            weights,
            self._runtime.device,
            lambda batch, places: self._plan_of(places, batch, microbatch_tokens),
            step_of,
            Measure(self._view, temperature, asked),
            chosen,
            in_backward,
            check_state,
        )
        has_graph = torch.is_grad_enabled() and self._is_trainable
        found = self._find_head(weights) if has_graph and batches and graphs != TWICE else None
        holds_logits = found is None or self._holds_logits(places, weights)
        if not has_graph:
            graphs = TWICE
        elif graphs == AUTO:
            graphs = KEPT if self._fits(places, weights, logits=holds_logits) else TWICE
        call: ScoreCall
        if graphs == KEPT:
            asleep, filtered_in = self._asleep_in_place(places, weights), None
            if chosen is not None and asleep is not None:
                # What rows save sleeps when it is known which are kept.
                asleep, filtered_in = None, self._runtime
            own = {
                "head": found,
                "holds_logits": holds_logits,
                "asleep": asleep,
                "filtered_in": filtered_in,
            }
            call = KeptCall(passes, places, shapes, **own)
            if asleep is None:
                self._awake[call] = self._kept_bytes(places)
        else:
            call = TwiceCall(passes, places, shapes)
        if has_graph:
            around = self._wrapped if self._is_reduced else self._model
            values = sharding.inside(around, functools.partial(differentiable, call))
        else:
            values = call.forward()
        return TokenScores.of(
            values,
            asked,
            graphs if has_graph else "none",
            call.counts,
            self._checked(batches, request) if batches else None,
            call.filtered,
        )

    def _plan_of(self, places: RowPlaces, batch: Batch, microbatch_tokens: int) -> Plan:
        """Returns the plan of the passes of ``places``, which run next."""
        return self._plan(batch, microbatch_tokens)

    @property
    def _is_trainable(self) -> bool:
        return any(p.requires_grad for p in self._model.parameters())

    def _find_head(self, weights: ReplicatedWeights) -> Head | None:
        """Returns the head of the model as it is, if it runs apart."""
        heads = self._state.heads
        (is_missing,) = weights.agreed([self._autocast not in heads])
        if is_missing:
            with undisturbed(self._runtime.device):
                heads[self._autocast] = head.of(self._view, self._runtime.device)
        return heads[self._autocast]

    def _asleep_in_place(
        self, places: list[RowPlaces], weights: ReplicatedWeights
    ) -> Forwards | None:
        """Returns what lets kept graphs of microbatches sleep; None if they stay awake. On a GPU
        they do: copies of what a forward saved take longer there than the forward. So do graphs
        that are small beside the gradients."""
        if not self._sleep or self._runtime.device.type != "cpu":
            return None
        awake_bytes = self._kept_bytes(places) + sum(self._awake.values())
        if awake_bytes <= AWAKE_SHARE * self._gradient_bytes(weights):
            return None
        return in_place(self._model, self._runtime, self._view.layers)

    def _holds_logits(self, places: list[RowPlaces], weights: ReplicatedWeights) -> bool:
        """Returns whether to keep logits of a head that runs apart. Layers get their gradients when
        logits are gone. So up to the size of all gradients they hardly raise the peak, and are kept
        where memory matters too."""
        if not self._fits(places, weights, logits=True):
            return False
        return not self._sleep or self._logits_bytes(places) <= self._gradient_bytes(weights)

    def _gradient_bytes(self, weights: ReplicatedWeights) -> int:
        """Of all parameters that receive one, as passes add them up."""
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        return gradient_bytes_max(trainable, sums_wide=weights.sums_wide)

    def _fits(self, places: list[RowPlaces], weights: ReplicatedWeights, *, logits: bool) -> bool:
        """Returns whether the graphs of all microbatches fit, with or without ``logits`` of groups:
        those of trees are kept. Graphs of prompts count where they stay awake, and gradients where
        they are wider than the weights."""
        if not sharding.keeps_graphs(self._wrapped):
            return False
        trees = [each for each in places if isinstance(each, TreePlaces)]
        needed_bytes = self._graph_bytes(places) + self._logits_bytes(places if logits else trees)
        if not self._prompts_sleep:
            tokens = sum(each.prefix_tokens for each in places)
            needed_bytes += tokens * self._saved_bytes_per_token
        free_bytes = support.free_bytes(self._runtime.device)
        if weights.sums_wide:
            free_bytes -= self._gradient_bytes(weights)
        return needed_bytes <= KEPT_SHARE * free_bytes

    @property
    def _prompts_sleep(self) -> bool:
        """Whether what prompts saved may sleep until their backward."""
        reason = why_not_in_place(self._runtime) or why_no_tier(self._runtime)
        return self._sleep and reason is None

    def _kept_bytes(self, places: list[RowPlaces]) -> int:
        """Returns what kept graphs of all microbatches take with their logits."""
        return self._graph_bytes(places) + self._logits_bytes(places)

    def _graph_bytes(self, places: list[RowPlaces]) -> int:
        """Returns what the layers of all microbatches save."""
        tokens = sum(each.kept_tokens for each in places)
        return tokens * self._saved_bytes_per_token

    @property
    def _saved_bytes_per_token(self) -> int:
        return self._shape.layers * self._shape.saved_bytes_per_token_layer

    def _logits_bytes(self, places: list[RowPlaces]) -> int:
        tokens = sum(each.label_tokens for each in places)
        return tokens * self._shape.vocab * self._shape.dtype_bytes
