"""What is put in place of the methods of OpenRLHF's actor."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field

import torch

from ..hf import SharedPrefix, sharding
from ..install import install
from ..runtime import Runtime
from ..trainers import probe, short_prompts
from ..trainers.masked_rows import Rows
from ..trainers.options import Options
from ..trainers.own_forward import own_forward
from ..trainers.sharing import Sharing
from .refusals import SharedOutput, check_call, check_model

_log = logging.getLogger(__name__)


def replacements(actor_class: type, options: Options) -> dict:
    """Returns the methods that replace the class's own, by name."""
    own_init, own_call = vars(actor_class)["__init__"], vars(actor_class)["forward"]

    @functools.wraps(own_init)
    def __init__(self, *args, **named):
        # Before the model is loaded: only memory allocated by dormouse can sleep.
        runtime = options.runtime or install().runtime
        own_init(self, *args, **named)
        self.sharing = Sharing()
        self._dormouse = SharedActor(self.sharing, runtime, options)

    @functools.wraps(own_call)
    def forward(
        self,
        sequences,
        action_mask=None,
        attention_mask=None,
        return_output=False,
        allgather_logits=False,
        return_logprobs=False,
        ring_attn_group=None,
        packed_seq_lens=None,
        return_entropy=False,
        **mm_inputs,
    ):
        call = {
            "attention_mask": attention_mask,
            "return_output": return_output,
            "allgather_logits": allgather_logits,
            "return_logprobs": return_logprobs,
            "ring_attn_group": ring_attn_group,
            "return_entropy": return_entropy,
        }
        own = functools.partial(own_call, self)
        if action_mask is None:
            _note_own_forward()
            return own(sequences, packed_seq_lens=packed_seq_lens, **call, **mm_inputs)
        check_call(self, call | {"mm_inputs": mm_inputs})
        rows = Rows.of(sequences, action_mask, attention_mask)
        if short_prompts.on_any_rank(self.model, rows.has_short_prompt, sequences.device):
            short_prompts.note("OpenRLHF")
            return own(sequences, action_mask, packed_seq_lens=packed_seq_lens, **call)
        found = self._dormouse.scores(self, own, rows, action_mask, with_entropies=return_entropy)
        log_probabilities, entropies = found
        return (log_probabilities, SharedOutput(entropies)) if return_output else log_probabilities

    return {"__init__": __init__, "forward": forward}


@functools.cache
def _note_own_forward() -> None:
    _log.warning("a call of the actor without action_mask runs as in OpenRLHF")


@dataclass
class SharedActor:
    """Computes the log-probabilities of one actor."""

    sharing: Sharing
    runtime: Runtime
    options: Options
    _of: torch.nn.Module | None = None
    _shared: SharedPrefix | None = None
    _compared: set[tuple] = field(default_factory=set)

    def scores(self, actor, own, rows: Rows, action_mask, *, with_entropies: bool):
        """Returns log-probabilities, ``[rows, columns of action_mask]``, and entropies, ``[rows,
        columns - 1]``, or None. ``own``: the class's own forward."""
        # Looked up in each call: OpenRLHF puts DeepSpeed's engine in the model's place.
        self._use(actor.model)
        self._compare_if_new(actor, own, with_entropies)
        found = self._score(actor, rows, action_mask, with_entropies)
        log_probabilities, entropies, prompts = found
        self.sharing.rows += rows.responses
        self.sharing.prompts += prompts
        return log_probabilities, entropies

    def _score(self, actor, rows: Rows, action_mask: torch.Tensor, with_entropies: bool):
        plain = sharding.unwrapped(actor.model)
        found = self._shared.score_packed(
            rows.ids,
            rows.cu_seqlens,
            prompt_lengths=rows.prompt_lengths,
            temperature=actor.temperature,
            entropy=with_entropies,
            context=lambda: own_forward(plain),
            **self.options.score,
        )
        # The values of tokens between the turns of a response are computed, and are not actions.
        values = rows.padded(found.log_probabilities)[:, -action_mask.shape[1] :]
        entropies = None if found.entropies is None else rows.padded(found.entropies)
        return values * action_mask.float(), entropies, found.counts["prompts"]

    def _use(self, model: torch.nn.Module) -> None:
        if self._of is model:
            return
        plain = sharding.unwrapped(model)
        check_model(plain)
        with own_forward(plain):
            self._shared = self.options.shared_prefix(model, self.runtime)
        self._of = model
        self._compared.clear()

    def _compare_if_new(self, actor, own, with_entropies: bool) -> None:
        """Compares the class's values of a small batch with the shared ones, the first time. Ranks
        do so together: the forward of ZeRO's stage 3 holds collectives."""
        key = (actor.training, actor.temperature, with_entropies)
        if key in self._compared:
            return

        def theirs(ids, mask, keep):
            asked = {"return_output": with_entropies, "return_entropy": with_entropies}
            found = own(ids, mask[:, -keep:], attention_mask=mask, **asked)
            if not with_entropies:
                return found, None
            return found[0], found[1].entropy[:, -keep:]

        def ours(ids, mask, keep):
            action_mask = mask[:, -keep:]
            rows = Rows.of(ids, action_mask, mask)
            values, entropies, _ = self._score(actor, rows, action_mask, with_entropies)
            return values, None if entropies is None else entropies[:, -keep:]

        with torch.no_grad():
            probe.compare(sharding.unwrapped(actor.model), self._shared, theirs, ours)
        self._compared.add(key)
