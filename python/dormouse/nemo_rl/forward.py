"""What is put in place of NeMo-RL's forward of a micro-batch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from types import ModuleType

import torch

from ..hf import SharedPrefix, sharding
from ..runtime import Runtime
from ..trainers import probe, short_prompts
from ..trainers.masked_rows import Rows
from ..trainers.options import Options
from ..trainers.own_forward import own_forward
from ..trainers.sharing import Sharing
from .refusals import check_call

_log = logging.getLogger(__name__)

Data = dict[str, torch.Tensor]
"""``input_ids`` and ``token_mask``, ``[rows, columns]``, padded on the right, and
``input_lengths``, ``[rows]``; others are the loss's own."""


class SharedForward:
    """Called like ``forward_with_post_processing_fn``; see :func:`dormouse.nemo_rl.share`."""

    def __init__(self, module: ModuleType, own: Callable, runtime: Runtime, options: Options):
        functools.update_wrapper(self, own)
        self.own = own
        self.sharing = Sharing()
        """Counts since the construction."""
        self._module, self._runtime, self._options = module, runtime, options
        self._shared: dict[torch.nn.Module, SharedPrefix] = {}
        self._compared: set[tuple] = set()

    def __call__(
        self,
        model,
        post_processing_fn,
        processed_mb,
        is_reward_model=False,
        allow_flash_attn_args=True,
        global_valid_seqs=None,
        global_valid_toks=None,
        sampling_params=None,
        sequence_dim=1,
    ):
        own = functools.partial(
            self.own,
            model,
            is_reward_model=is_reward_model,
            allow_flash_attn_args=allow_flash_attn_args,
            sampling_params=sampling_params,
            sequence_dim=sequence_dim,
        )
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        post, data = post_processing_fn, processed_mb.data_dict
        is_loss = isinstance(post, self._module.LossPostProcessor)
        if is_reward_model or "token_mask" not in data or not self._is_of_values(post):
            _note_own_forward(type(post).__name__)
            return own(post, processed_mb, **counts)
        check_call(post, processed_mb.processed_inputs, sampling_params)
        rows = _rows_of(data)
        if short_prompts.on_any_rank(model, rows.has_short_prompt, rows.ids.device):
            short_prompts.note("NeMo-RL")
            return own(post, processed_mb, **counts)
        temperature = 1.0 if sampling_params is None else sampling_params.temperature
        self._compare_if_new(model, own, post, processed_mb, temperature)
        scores = self._scores(model, rows, temperature)
        self.sharing.rows += rows.responses
        self.sharing.prompts += scores.counts["prompts"]
        values = rows.padded(scores.log_probabilities)
        if is_loss:
            result, metrics = post.loss_fn(data=data, next_token_logprobs=values, **counts)
        else:
            result = _at_own_places(values)
            metrics = {"logprobs": result}
        return result, metrics, processed_mb

    def _is_of_values(self, post) -> bool:
        """Whether a post-processor reads nothing but log-probabilities of the rows' tokens."""
        if isinstance(post, self._module.LossPostProcessor):
            return getattr(post.loss_fn.input_type, "value", None) == "logprob"
        return isinstance(post, self._module.LogprobsPostProcessor)

    def _scores(self, model, rows: Rows, temperature: float):
        plain = sharding.unwrapped(model)
        return self._prefix(model).score_packed(
            rows.ids,
            rows.cu_seqlens,
            prompt_lengths=rows.prompt_lengths,
            temperature=temperature,
            context=lambda: own_forward(plain),
            **self._options.score,
        )

    def _prefix(self, model: torch.nn.Module) -> SharedPrefix:
        if model not in self._shared:
            with own_forward(sharding.unwrapped(model)):
                self._shared[model] = self._options.shared_prefix(model, self._runtime)
        return self._shared[model]

    def _compare_if_new(self, model, own, post, processed_mb, temperature: float) -> None:
        """Compares NeMo-RL's values of a small batch with the shared ones, the first time."""
        key = (model, model.training, temperature)
        if key in self._compared:
            return
        names = ("cfg", "device_mesh", "cp_mesh", "tp_mesh", "cp_size", "sampling_params")
        logprobs = self._module.LogprobsPostProcessor(
            **{name: getattr(post, name) for name in names}
        )

        def theirs(ids, mask, keep):
            data, first = _right_padded(ids, mask, keep)
            found, _, _ = own(logprobs, _with(processed_mb, data))
            return _rolled(found, first)[:, -keep:], None

        def ours(ids, mask, keep):
            data, first = _right_padded(ids, mask, keep)
            rows = _rows_of(data)
            scores = self._scores(model, rows, temperature)
            values = _at_own_places(rows.padded(scores.log_probabilities))
            return _rolled(values, first)[:, -keep:], None

        with torch.no_grad():
            probe.compare(sharding.unwrapped(model), self._prefix(model), theirs, ours)
        self._compared.add(key)


@functools.cache
def _note_own_forward(kind: str) -> None:
    _log.warning("a call for %s, or without token_mask, runs as in NeMo-RL", kind)


def _rows_of(data: Data) -> Rows:
    ids, token_mask, lengths = (data[k] for k in ("input_ids", "token_mask", "input_lengths"))
    columns = torch.arange(ids.shape[1], device=ids.device)
    # The first token of a row has no value.
    return Rows.of(ids, token_mask[:, 1:], columns < lengths.to(ids.device)[:, None])


def _at_own_places(values: torch.Tensor) -> torch.Tensor:
    """Returns values of next tokens, ``[rows, columns - 1]``, at the tokens' own places."""
    return torch.nn.functional.pad(values, (1, 0))


def _right_padded(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> tuple[Data, list[int]]:
    """Returns rows that are padded on the left as NeMo-RL has them, and how far each was moved."""
    first = mask.argmax(1).tolist()
    is_response = mask.clone()
    is_response[:, :-keep] = 0
    back = [-each for each in first]
    data = {
        "input_ids": _rolled(ids, back),
        "input_lengths": mask.sum(1),
        "token_mask": _rolled(is_response, back),
        "sample_mask": torch.ones(len(ids), device=ids.device),
    }
    return data, first


def _rolled(values: torch.Tensor, shifts: list[int]) -> torch.Tensor:
    """Returns rows, each moved by columns of its own."""
    return torch.stack([row.roll(by) for row, by in zip(values, shifts, strict=True)])


def _with(processed_mb, data: Data):
    """Returns a micro-batch of other rows, as NeMo-RL processes those of text."""
    ids = data["input_ids"]
    rows, columns = ids.shape
    inputs = dataclasses.replace(
        processed_mb.processed_inputs,
        input_ids=ids,
        seq_len=columns,
        # Padding is on the right, where a causal model's tokens do not see it.
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(columns, device=ids.device).repeat(rows, 1),
    )
    return dataclasses.replace(
        processed_mb,
        data_dict=data,
        processed_inputs=inputs,
        original_batch_size=rows,
        original_seq_len=columns,
    )
