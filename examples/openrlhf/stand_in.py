"""A stand-in for OpenRLHF's ``Actor``, which needs flash-attn and a GPU: a small class of our own
with the same interface. Nothing here is OpenRLHF."""

from types import SimpleNamespace

import torch


class StandInActor(torch.nn.Module):
    """Log-probabilities of the tokens of ``action_mask``, as OpenRLHF 0.11.1 has them."""

    def __init__(self, model, temperature=1.0):
        super().__init__()
        self.model, self.temperature = model, temperature

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
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": attention_mask, "position_ids": positions, "use_cache": False}
        logits = self.model(input_ids=sequences, **given).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        output = SimpleNamespace(logits=logits)
        if return_entropy:
            output.entropy = torch.distributions.Categorical(logits=logits).entropy()
        found = torch.log_softmax(logits, -1)
        found = found.gather(2, sequences[:, 1:, None])[..., 0]
        if action_mask is None:
            return output if not return_logprobs else found
        found = found[:, -action_mask.shape[1] :] * action_mask.float()
        return (found, output) if return_output else found
