"""Drafts in transformers' ``generate``.

transformers verifies what a candidate generator drafts (its assisted generation): greedy tokens are
those of ``model.generate``, and sampled ones have its distribution. :func:`generate` takes the
candidates of one call from a history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator

from ..errors import ArgumentError
from .drafters import CONTEXT_TOKENS, WINDOW_TOKENS_MAX, equal_tokens
from .histories import History

# Options of ``generate`` that decode in another way, and the values at which they do not.
_OTHER_WAYS = {
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "custom_generate": (None,),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "offloaded"),
    "inputs_embeds": (None,),
    # Their logits processors keep the tokens that they were called with, also of rejected drafts.
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    # They are asked after a whole draft. Those of ``stop_strings`` are asked within it.
    "stopping_criteria": (None, []),
}


class HistoryCandidates(CandidateGenerator):
    """Candidates of one sequence from a history, for loops that take transformers' candidate
    generators. Not thread-safe.

    ``prompt``: token ids of the prompt, ``[prompt_tokens]``. ``length_max``: most tokens of the
    sequence, prompt included. ``stops``: ids of end tokens. ``criteria``: what also ends a sequence,
    of its ids alone. Candidates end before such an end, because the model's own next token is it.
    """

    requires_model_outputs = False

    def __init__(
        self,
        history: History,
        prompt: torch.Tensor,
        length_max: int,
        stops: torch.Tensor | None = None,
        criteria: Sequence[StoppingCriteria] = (),
    ):
        self._drafter = history.drafter(prompt.cpu())
        self._length_max = length_max
        self._stops = set() if stops is None else set(stops.flatten().tolist())
        self._criteria = criteria
        self._draft: list[int] = []
        self._begin = 0

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Returns ``input_ids`` ``[1, tokens]`` with the draft behind it, and no logits."""
        self._begin = input_ids.shape[1]
        # The model adds one token of its own.
        room = max(0, self._length_max - self._begin - 1)
        self._draft = self._drafter.draft(input_ids[0, -CONTEXT_TOKENS:].cpu(), room)
        end = next((i for i, token in enumerate(self._draft) if token in self._stops), None)
        draft = torch.tensor([self._draft[:end]], dtype=input_ids.dtype, device=input_ids.device)
        candidates = torch.cat([input_ids, draft], dim=1)
        for length in range(self._begin + 1, candidates.shape[1] + 1):
            if any(bool(each(candidates[:, :length], None)) for each in self._criteria):
                return candidates[:, : length - 1], None
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor | None, num_matches: int
    ) -> None:
        """Counts the drafted tokens that came. ``input_ids``: ``[1, tokens]``, the sequence after
        the verification."""
        own = input_ids[0, self._begin :].tolist()
        self._drafter.feedback(equal_tokens(self._draft, own))


def generate(
    model: GenerationMixin,
    input_ids: torch.Tensor,
    history: History,
    *,
    record_epoch: int | None = None,
    **options: Any,
):
    """Generates as ``model.generate(input_ids, **options)`` does, greedily or by sampling, with
    drafts from the responses that the history has to this prompt. Returns what ``generate`` does.

    ``input_ids``: the prompt, ``[1, prompt_tokens]``. ``record_epoch``: records the response in
    that epoch, without a reward; trainers record it with its reward: :meth:`History.record`.
    ``options``: those of ``generate``. Logits processors must depend on their arguments alone: they
    also see drafts that are rejected.

    A forward of several tokens rounds otherwise than one of a single token. Where two tokens are
    nearly as likely, greedy decoding in FP32 or BF16 may choose the other one, as in transformers'
    own assisted generation.

    The model is not modified. Threads may share it as far as they may share ``model.generate``.

    Raises :class:`dormouse.ArgumentError` for another shape, for ids outside the history's
    vocabulary, and for options, passed or of the model's generation config, that decode in another
    way: assistant models, beams, several sequences, static caches, guidance, watermarks, stopping
    criteria of the caller's; for an encoder-decoder model, and for one without transformers'
    ``generate``. transformers refuses a model that cannot go back in its cache with ``ValueError``.
    """
    if not isinstance(model, GenerationMixin):
        raise ArgumentError(
            f"model is a {type(model).__name__}; accepted: a model of transformers that generates, "
            "of an adapter its get_base_model()"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"model is the encoder-decoder {type(model).__name__}; accepted: a decoder alone"
        )
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ArgumentError(
            f"input_ids are {list(input_ids.shape)}; accepted: [1, prompt_tokens], one sequence"
        )
    _check(options, model.generation_config)
    assisted = _with_candidates(model, history)
    # What selects assisted generation; the candidates are the history's.
    options["prompt_lookup_num_tokens"] = WINDOW_TOKENS_MAX
    found = assisted.generate(input_ids, **options)
    if record_epoch is not None:
        rows = found if isinstance(found, torch.Tensor) else found.sequences
        prompt, response = rows[0].cpu().tensor_split([input_ids.shape[1]])
        history.record(prompt, response, epoch=record_epoch)
    return found


def _with_candidates(model: GenerationMixin, history: History) -> GenerationMixin:
    """Returns the model under another class: all its attributes are the same ones. For one call."""
    kind = type(model)
    of_strings: list[StopStringCriteria] = []

    def stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria = kind._get_stopping_criteria(self, *args, **kwargs)
        of_strings.extend(each for each in criteria if isinstance(each, StopStringCriteria))
        return criteria

    def candidates(self, generation_config: GenerationConfig, input_ids: torch.Tensor, **_: Any):
        stops = getattr(generation_config, "_eos_token_tensor", None)
        length_max = generation_config.max_length
        return HistoryCandidates(history, input_ids[0], length_max, stops, of_strings)

    body = {
        "_get_stopping_criteria": stopping_criteria,
        "_get_candidate_generator": candidates,
        "__module__": kind.__module__,
    }
    assisted = object.__new__(type(kind.__name__, (kind,), body))
    object.__setattr__(assisted, "__dict__", model.__dict__)
    return assisted


def _check(options: dict[str, Any], of_model: GenerationConfig) -> None:
    passed = options.get("generation_config")
    for name, accepted in _OTHER_WAYS.items():
        # transformers takes from the model's config what a passed one leaves at None.
        configured = (getattr(config, name, None) for config in (passed, of_model))
        value = next((each for each in configured if each is not None), None)
        value = options.get(name, value)
        if not any(value is each or value == each for each in accepted):
            shown = ", ".join(map(repr, accepted))
            raise ArgumentError(
                f"{name} is {value!r}, which drafts do not go with; accepted: {shown}"
            )
    cache = options.get("past_key_values")
    if isinstance(cache, StaticCache):
        raise ArgumentError(
            "past_key_values is a StaticCache; accepted: a cache that can be cropped"
        )
