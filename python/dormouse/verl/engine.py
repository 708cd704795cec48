"""What is put before verl's engine class: one batch at a time is scored as a window."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..failures import fail_together
from ..hf import SharedPrefix
from ..hf.window import Window
from ..install import install
from ..trainers import probe, short_prompts
from ..trainers.options import Options
from ..trainers.own_forward import own_forward
from ..trainers.sharing import Sharing
from .refusals import check_engine
from .rows import COLUMN, OpenWindow, Rows, setting
from .small import small_batch, values_of

_log = logging.getLogger(__name__)


def _no_forward(**inputs) -> None:
    """In place of the module while a window is open."""


class SharedScores:
    """Replaces the model's forward of each micro-batch by its part of a window.

    verl's own ``forward_step`` computes the loss and metrics, and its ``forward_backward_batch``
    calls ``backward``. All rows are scored before the first micro-batch.
    """

    sharing_options: Options

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        check_engine(self)
        self.sharing = Sharing()
        self._noticed = False
        # Before the model is loaded: only memory allocated by dormouse can sleep.
        self._runtime = self.sharing_options.runtime or install().runtime
        self._open: OpenWindow | None = None
        self._compared: set[tuple] = set()

    def initialize(self):
        super().initialize()
        # While a window is open, verl's attribute is another.
        self._own_module = self.module
        self._shared: SharedPrefix | None = None

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        with fail_together():
            rows = Rows.of(data, self._autocast_dtype)
            if self._is_short_on_any_rank(rows):
                short_prompts.note("verl")
                return super().forward_backward_batch(data, loss_function, forward_only)
            data[COLUMN] = torch.arange(len(rows))
            try:
                with self._scored(rows, data, has_graph=not forward_only):
                    return super().forward_backward_batch(data, loss_function, forward_only)
            finally:
                del data[COLUMN]

    def forward_step(self, micro_batch, loss_function, forward_only):
        if self._open is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        own, self.module = self.module, _no_forward
        try:
            return super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self.module = own

    def prepare_model_inputs(self, micro_batch):
        if self._open is None:
            return super().prepare_model_inputs(micro_batch)
        return {}, {}

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if self._open is None:
            own = super().prepare_model_outputs
            return own(output, output_args, micro_batch, logits_processor_func)
        return self._open.part(micro_batch)

    def _is_short_on_any_rank(self, rows: Rows) -> bool:
        """Ranks run a batch in the same way: each gathers the others' weights."""
        lengths = rows.cu_seqlens.diff()
        is_short = short_prompts.has_short(lengths, rows.prompt_lengths)
        flag = torch.tensor(int(is_short), device=self._runtime.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        return bool(flag)

    @contextlib.contextmanager
    def _scored(self, rows: Rows, data, *, has_graph: bool) -> Iterator[None]:
        """Context of a batch's micro-batches."""
        try:
            with torch.set_grad_enabled(has_graph), self._autocast():
                self._compare_if_new(rows, data)
                window = self._window(rows)
                self._open = OpenWindow(rows, window)
            yield
            if has_graph:
                # If the last micro-batch ran no backward into the model. Other ranks wait for it.
                window.finish(without_gradients=True)
        finally:
            self._open = None

    def _window(self, rows: Rows) -> Window:
        window = self._model.window_packed(
            rows.ids,
            rows.cu_seqlens,
            prompt_lengths=rows.prompt_lengths,
            **self._arguments(rows),
        )
        prompts = window.scores.counts["prompts"]
        self.sharing.rows += rows.responses
        self.sharing.prompts += prompts
        if prompts == rows.responses > 1 and not self._noticed:
            self._noticed = True
            _log.warning(
                "no prompt is shared by the %d sequences of a mini-batch on this rank, which takes "
                "longer than verl alone; trainer.balance_batch=True deals sequences of a group to "
                "several ranks",
                rows.responses,
            )
        return window

    def _arguments(self, rows: Rows) -> dict:
        options = self.sharing_options
        return {
            "temperature": rows.temperature,
            "entropy": rows.with_entropies,
            "context": self._own_forward,
            **options.score,
            "microbatch_tokens": options.microbatch_tokens or rows.microbatch_tokens,
        }

    @property
    def _model(self) -> SharedPrefix:
        if self._shared is None:
            with self._own_forward():
                own = self.sharing_options.shared_prefix(self._own_module, self._runtime)
                self._shared = own
        return self._shared

    def _own_forward(self) -> contextlib.AbstractContextManager:
        """Returns the context of passes: the forward of the model's class."""
        return own_forward(self._own_module)

    def _autocast(self) -> contextlib.AbstractContextManager:
        """Returns the context that verl runs the model in."""
        dtype, kind = self._autocast_dtype, self._runtime.device.type
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype=dtype)

    def _compare_if_new(self, rows: Rows, data) -> None:
        """Compares verl's values of a small batch with the shared ones, the first time. All ranks
        do so together: verl's forward holds collectives."""
        padding = bool(setting(data, "use_remove_padding", True))
        key = (self.module.training, rows.temperature, rows.with_entropies, padding)
        if key in self._compared:
            return

        def own(ids, mask, keep):
            small = small_batch(data, ids, mask)
            _, found = self.forward_step(small, None, True)
            return values_of(found["model_output"], mask, keep)

        def ours(ids, mask, keep):
            found = self._model.score(ids, mask, keep=keep, **self._arguments(rows))
            return found.log_probabilities, found.entropies

        with torch.no_grad():
            probe.compare(self.module, self._model, own, ours)
        self._compared.add(key)
