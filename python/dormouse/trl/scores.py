"""Log-probabilities of a trainer's batches, each shared prompt computed once per window."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..errors import ArgumentError, StateError
from ..hf import SharedPrefix, dropout, sharding, support
from ..hf.check import Checked
from ..hf.padded import Places, groups_of
from ..hf.token_scores import TokenScores
from ..hf.window import Window
from ..runtime import Runtime
from ..trainers import probe
from ..trainers.options import Options
from ..trainers.own_forward import outside_autocast, own_forward
from ..trainers.sharing import Sharing as Counts
from .positions import check_positions

_log = logging.getLogger(__name__)

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and their mask, ``[rows, columns]``, of one microbatch."""


@dataclass
class Sharing(Counts):
    """Counts of the rows that losses were computed of. ``prompts`` are those of whole windows."""

    prompts_of_microbatches: int = 0
    """Those that microbatches by themselves would have computed."""


@dataclass
class _Open:
    """A window of which parts are left."""

    window: Window
    batches: list[Batch]
    """Microbatches that are left."""
    row: int = 0


@dataclass
class SharedRows:
    """Computes the log-probabilities of one trainer."""

    options: Options
    runtime: Runtime
    wide_head: bool = False
    """Whether the trainer computes logits outside autocast."""
    sharing: Sharing = field(default_factory=Sharing)
    _models: dict[torch.nn.Module, SharedPrefix] = field(default_factory=dict)
    _probed: dict[tuple[int, bool], Checked] = field(default_factory=dict)
    """By identity of a check, which is kept alive, and whether gradients were compared."""
    _open: _Open | None = None
    _windows: list[Window] = field(default_factory=list)
    """The open one, and those of which the microbatch that runs has left the last part."""
    _heads: dict[torch.nn.Module, tuple[Callable, Callable]] = field(default_factory=dict)
    """The trainer's forward of a head, and that outside autocast."""
    _noticed: set[str] = field(default_factory=set)

    def check_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Checks what the first call would refuse of a model in training mode, after the first
        rollouts. ``device``: on which the trainer runs it.

        Raises :class:`.UnsupportedModelError`.
        """
        with self._own_forward(model), _in_training(model):
            view = support.resolve(model, self.options.prompt_dropout)
            dropout.check(model, self.options.prompt_dropout)
            # Some trainers move a model there later.
            if all(p.device.type == device.type for p in model.parameters()):
                support.check_step(model, view, self.runtime.device)

    def forget(self) -> None:
        """Forgets an open window, and the gradients that wait in it."""
        self._open = None
        self._windows.clear()

    def end_microbatch(self, model: torch.nn.Module, *, is_last: bool) -> None:
        """Runs the passes with the gradients that wait for a part which does not come.

        ``is_last``: whether the optimizer steps next. Raises :class:`StateError` if gradients that
        wait then would not be in its step.
        """
        if is_last:
            self._open = None
            is_reduced = sharding.process_group_of(model) is not None
            if is_reduced and any(each.waits for each in self._windows):
                self.forget()
                raise StateError(
                    "the last microbatch of a window ran no backward into the model, so gradients "
                    "of the others would not be reduced over ranks; accepted: a loss that reads "
                    "the log-probabilities, times 0 if it is to have no gradient"
                )
        kept = [] if self._open is None else [self._open.window]
        left, self._windows = [each for each in self._windows if each not in kept], kept
        for window in left:
            window.finish()

    def next_part(self, batch: Batch, *, is_last: bool) -> TokenScores | None:
        """Returns the scores of a microbatch from the open window; None if it is not the next.

        ``is_last``: whether gradients are reduced after it, so that nothing may wait.
        """
        opened = self._open
        if opened is None:
            return None
        if not _are_equal(opened.batches[0], batch):
            self._open = None
            # Before a backward that reduces gradients.
            opened.window.finish()
            return None
        opened.batches.pop(0)
        first, opened.row = opened.row, opened.row + len(batch[0])
        is_last = is_last or not opened.batches
        if is_last:
            self._open = None
        return opened.window.part(slice(first, opened.row), is_last=is_last)

    def start(
        self, model: torch.nn.Module, batches: list[Batch], own: probe.Scores, **options
    ) -> TokenScores | None:
        """Returns the scores of the first of ``batches``, the microbatches of a window, with a
        graph; None if no prompt is shared. ``own``: the trainer's way; ``options``: of
        :meth:`SharedPrefix.score`."""
        joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        places = self._places(joined, options["keep"])
        if places is None:
            return None
        self.sharing.rows += sum(len(each.rows) for each in places)
        self.sharing.prompts += len(places)
        self.sharing.prompts_of_microbatches += _prompts_of(places, batches)
        shared = self._shared(model)
        if len(batches) == 1:
            return self._scored(model, shared, joined, own, options)
        arguments = self._arguments(model, options)
        window = shared.window(*joined, **arguments)
        self._compare_if_new(model, shared, window.scores, own, options)
        self._open = _Open(window, list(batches))
        self._windows.append(window)
        return self.next_part(batches[0], is_last=False)

    def without_graph(
        self, model: torch.nn.Module, batch: Batch, own: probe.Scores, **options
    ) -> TokenScores | None:
        """Returns the scores of rows without a graph; None if no prompt is shared."""
        if self._places(batch, options["keep"]) is None:
            return None
        return self._scored(model, self._shared(model), batch, own, options)

    def _scored(self, model, shared: SharedPrefix, batch: Batch, own, options) -> TokenScores:
        scores = shared.score(*batch, **self._arguments(model, options))
        self._compare_if_new(model, shared, scores, own, options)
        return scores

    def _arguments(self, model: torch.nn.Module, options: dict) -> dict:
        return {**self.options.score, **options, "context": lambda: self._own_forward(model)}

    def _own_forward(self, model: torch.nn.Module) -> contextlib.AbstractContextManager:
        """Returns the context of passes: the forward of the model's class."""
        plain = sharding.unwrapped(model)
        return own_forward(plain, self._wide_head(plain) if self.wide_head else {})

    def _wide_head(self, model: torch.nn.Module) -> dict[torch.nn.Module, Callable]:
        """Returns the forward of the model's head outside autocast. The same function each time, so
        that the model is in the same state."""
        head = model.get_output_embeddings()
        own = vars(head)["forward"]
        known = self._heads.get(head)
        if known is None or own not in known:
            known = self._heads[head] = own, outside_autocast(own)
        return {head: known[1]}

    def _places(self, batch: Batch, keep: int) -> list[Places] | None:
        try:
            places = groups_of(*batch, keep)
        except ArgumentError as error:
            self._notice("not shared", f"a batch runs as in the trainer: {error}")
            return None
        if len(places) == sum(len(each.rows) for each in places):
            self._notice(
                "nothing shared",
                f"no prompt is shared by the {len(batch[0])} rows of a window, so it runs as in "
                "the trainer: raise gradient_accumulation_steps or num_generations"
            )
            return None
        return places

    def _notice(self, kind: str, text: str) -> None:
        """Logs a text once of each kind."""
        if kind not in self._noticed:
            self._noticed.add(kind)
            _log.warning(text)

    def _shared(self, model: torch.nn.Module) -> SharedPrefix:
        found = self._models.get(model)
        if found is None:
            with self._own_forward(model):
                found = self.options.shared_prefix(model, self.runtime)
            self._models[model] = found
        return found

    def _compare_if_new(
        self, model, shared: SharedPrefix, scores: TokenScores, own: probe.Scores, options: dict
    ) -> None:
        key = (id(scores.checked), torch.is_grad_enabled())
        if key in self._probed:
            return
        plain = sharding.unwrapped(model)
        with self._own_forward(model):
            check_positions(plain, shared.view, shared.device)

        def ours(ids, mask, keep):
            arguments = self._arguments(model, {**options, "keep": keep})
            found = shared.score(ids, mask, **arguments)
            return found.log_probabilities, found.entropies

        probe.compare(plain, shared, own, ours)
        self._probed[key] = scores.checked


@contextlib.contextmanager
def _in_training(model: torch.nn.Module) -> Iterator[None]:
    """Context of a model in training mode. Its method ``train`` may do more."""
    evaluated = [module for module in model.modules() if not module.training]
    for module in evaluated:
        module.training = True
    try:
        yield
    finally:
        for module in evaluated:
            module.training = False


def _are_equal(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))


def _prompts_of(places: list[Places], batches: list[Batch]) -> int:
    """Returns the number of pairs of a prompt and a microbatch with rows of it."""
    of_row = [number for number, (ids, _) in enumerate(batches) for _ in range(len(ids))]
    return sum(len({of_row[row] for row in each.rows}) for each in places)
