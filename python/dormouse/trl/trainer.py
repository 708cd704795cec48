"""What is put before a trainer class of TRL: one method."""

from __future__ import annotations

import torch

from ..failures import fail_together
from ..hf import sharding
from ..trainers import UnsupportedTrainerError
from ..trainers.options import Options
from ..trainers.runtimes import runtime_of
from .refusals import check_trainer
from .scores import Batch, SharedRows, Sharing


class SharedScores:
    """Replaces the method that computes log-probabilities and entropies of padded batches.

    Under ``no_grad`` (old and reference log-probabilities, evaluation) equal prompts of the batch
    run once. With gradients those of the accumulation window do: TRL has generated its microbatches
    before the first of them runs.
    """

    sharing_options: Options

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        check_trainer(self)
        # TRL runs it in FP32 and outside autocast, and RLOO has no such setting.
        wide_head = getattr(self.args, "cast_lm_head_to_fp32", False)
        runtime = self.sharing_options.runtime or runtime_of(self.accelerator.device)
        self._shared_rows = SharedRows(self.sharing_options, runtime, wide_head)
        self._shared_rows.check_model(self.model, self.accelerator.device)
        # That of TRL's head, whatever becomes of the trainer's.
        self._temperature_of_head = self.args.temperature
        # Microbatches of the accumulation window that have run.
        self._seen_of_window = 0

    @property
    def sharing(self) -> Sharing:
        """Counts since the construction."""
        return self._shared_rows.sharing

    def train(self, *args, **named):
        # A run that was interrupted between microbatches may have left a window open, and the
        # trainer drops the gradients of its microbatches too.
        self._shared_rows.forget()
        self._seen_of_window = 0
        with fail_together():
            return super().train(*args, **named)

    def training_step(self, model, *args, **named):
        found = super().training_step(model, *args, **named)
        is_last = self.accelerator.sync_gradients
        self._seen_of_window = 0 if is_last else self._seen_of_window + 1
        # A microbatch's loss may leave out the model. Clipping comes next.
        self._shared_rows.end_microbatch(model, is_last=is_last)
        return found

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **images,
    ):
        given = [name for name, value in images.items() if value is not None]
        if given or compute_aux_loss:
            raise UnsupportedTrainerError(
                f"{', '.join(given) or 'compute_aux_loss'} given; accepted: text, without the "
                "routers' auxiliary loss"
            )
        if self.temperature != self._temperature_of_head:
            raise UnsupportedTrainerError(
                f"trainer.temperature is {self.temperature}, and TRL's head divides by the "
                f"{self._temperature_of_head} that it was made with; accepted: one temperature, in "
                "the trainer's arguments"
            )
        compute = super()._get_per_token_logps_and_entropies
        options = {"keep": logits_to_keep, "entropy": compute_entropy}

        def own(ids, mask, keep, wrapped=sharding.unwrapped(model)):
            found = compute(wrapped, ids, mask, keep, batch_size, compute_entropy)
            return found[:2]

        batch = (input_ids, attention_mask)
        with self.accelerator.autocast():
            scores = self._scores_of(model, batch, own, temperature=self.temperature, **options)
        if scores is None:
            # Without a graph there is nothing for DistributedDataParallel to do.
            wrapped = model if torch.is_grad_enabled() else sharding.unwrapped(model)
            return *own(*batch, logits_to_keep, wrapped), None
        return scores.log_probabilities, scores.entropies, None

    def _scores_of(self, model, batch: Batch, own, **options):
        if not torch.is_grad_enabled():
            return self._shared_rows.without_graph(model, batch, own, **options)
        is_last = self.accelerator.sync_gradients
        scores = self._shared_rows.next_part(batch, is_last=is_last)
        if scores is not None:
            return scores
        left = 1 if is_last else self.current_gradient_accumulation_steps - self._seen_of_window
        return self._shared_rows.start(model, self._upcoming(batch, left), own, **options)

    def _upcoming(self, batch: Batch, count: int) -> list[Batch]:
        """Returns the microbatch and those that TRL has ready to follow it, at most ``count``."""
        first = self._step % self.args.steps_per_generation
        ready = (self._buffered_inputs or [])[first : first + max(1, count)]
        batches = [
            (
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            )
            for inputs in ready
        ]
        is_first = batches and all(map(torch.equal, batches[0], batch))
        return batches if is_first else [batch]
