"""Rows of the batch that verl gives an engine, and which of them a micro-batch has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..hf.window import Window
from ..trainers.refusals import UnsupportedTrainerError, refuse

# The column by which micro-batches know their rows.
COLUMN = "dormouse_rows"


@dataclass(frozen=True)
class Rows:
    """Token ids of all rows, one after another."""

    ids: torch.Tensor
    cu_seqlens: torch.Tensor
    prompt_lengths: torch.Tensor
    temperature: float
    with_entropies: bool
    microbatch_tokens: int

    @classmethod
    def of(cls, data, dtype: torch.dtype) -> Rows:
        """Returns the rows of a batch. ``dtype``: of the logits.

        Raises :class:`UnsupportedTrainerError`.
        """
        check_batch(data)
        ids = data["input_ids"]
        prompts, bounds = _prompt_lengths(data), ids.offsets().cpu()
        longest = int((bounds.diff() - prompts).max())
        if setting(data, "use_dynamic_bsz", True):
            microbatch_tokens = int(data["max_token_len_per_gpu"])
        else:
            microbatch_tokens = int(data["micro_batch_size_per_gpu"]) * longest
        return cls(
            ids=ids.values(),
            cu_seqlens=bounds,
            prompt_lengths=prompts,
            temperature=_temperature(data["temperature"], dtype),
            with_entropies=bool(setting(data, "calculate_entropy", False)),
            microbatch_tokens=max(1, microbatch_tokens),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def responses(self) -> int:
        """The number of rows that have a response."""
        return int((self.cu_seqlens.diff() > self.prompt_lengths).sum())


class OpenWindow:
    """A window of which micro-batches are left."""

    def __init__(self, rows: Rows, window: Window):
        self._bounds, self._window, self._left = rows.cu_seqlens, window, len(rows)

    def part(self, micro_batch) -> dict[str, torch.Tensor]:
        """Returns a micro-batch's values as verl has them: that of a token is at the place of the
        token before. Nested, ``[rows, tokens]``."""
        rows = micro_batch[COLUMN].tolist()
        self._left -= len(rows)
        # The last place of a row has the value of its first token: 0, that of a prompt.
        places = [
            torch.arange(int(self._bounds[row]), int(self._bounds[row + 1])).roll(-1)
            for row in rows
        ]
        device = self._window.scores.log_probabilities.device
        scores = self._window.part(torch.cat(places).to(device), is_last=self._left == 0)
        values = {"log_probs": scores.log_probabilities, "entropy": scores.entropies}
        offsets = micro_batch["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(each, offsets)
            for name, each in values.items()
            if each is not None
        }


def check_batch(data) -> None:
    """Checks that losses of a batch need nothing but log-probabilities and entropies of responses.

    Raises :class:`UnsupportedTrainerError`.
    """
    refuse(
        *(
            (setting(data, name, False), f"{name} is set", f"{name}=False")
            for name in (
                "use_fused_kernels",
                "calculate_sum_pi_squared",
                "distillation_use_topk",
                "distillation_only",
            )
        ),
        (
            "multi_modal_inputs" in data and any(map(bool, data["multi_modal_inputs"])),
            "the batch has multi_modal_inputs",
            "text",
        ),
        (
            "prompts" not in data or "responses" not in data,
            "the batch has no prompts and responses",
            "batches of a reinforcement-learning trainer",
        ),
    )
    ids, positions = data["input_ids"], data["position_ids"]
    bounds = ids.offsets()
    first = torch.repeat_interleave(bounds[:-1], bounds.diff())
    expected = torch.arange(len(first), device=first.device) - first
    if positions.dim() != 2 or not torch.equal(positions.values(), expected.to(positions.dtype)):
        raise UnsupportedTrainerError(
            "position_ids do not count each row's tokens from 0; accepted: those of text"
        )


def setting(data, name: str, default):
    """Returns what the batch says about itself."""
    return data[name] if name in data else default


def _prompt_lengths(data) -> torch.Tensor:
    prompts = data["prompts"]
    if prompts.is_nested:
        return prompts.offsets().diff().cpu()
    return data["attention_mask"][:, : prompts.shape[1]].sum(1).cpu()


def _temperature(given, dtype: torch.dtype) -> float:
    """Returns the temperature as verl rounds it: to FP32, then to the logits' dtype."""
    values = torch.as_tensor(given, dtype=torch.float32, device="cpu").flatten()
    if not torch.equal(values, values[:1].expand_as(values)):
        raise UnsupportedTrainerError(
            f"temperatures of rows are {float(values.min()):.6g} to {float(values.max()):.6g}; "
            "accepted: one of all rows"
        )
    return float(values[0].to(dtype))
