"""A stand-in for what NeMo-RL's worker calls, which needs Python 3.13 and a GPU: small code of our
own with the same interface. Nothing here is NeMo-RL."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


class InputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


@dataclass
class Inputs:
    input_ids: torch.Tensor
    seq_len: int
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    vlm_kwargs: dict = field(default_factory=dict)

    @property
    def is_multimodal(self):
        return len(self.vlm_kwargs) > 0


@dataclass
class Microbatch:
    data_dict: dict
    processed_inputs: Inputs
    original_batch_size: int
    original_seq_len: int


@dataclass
class Sampling:
    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


class PolicyLoss:
    """Masks tokens and rows as NeMo-RL's do, and mixes rows."""

    input_type = InputType.LOGPROB

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
        of_rows = (ratio * data["advantages"][:, 1:] * mask).sum(1)
        loss = of_rows.sum() / global_valid_toks + (of_rows**2).sum() * 1e-2 / global_valid_seqs
        return loss, {"ratio": float((ratio.detach() * mask).sum())}


class _PostProcessor:
    def __init__(
        self,
        cfg,
        device_mesh,
        cp_mesh,
        tp_mesh,
        cp_size,
        enable_seq_packing=False,
        sampling_params=None,
    ):
        self.cfg, self.device_mesh, self.cp_mesh, self.tp_mesh = cfg, device_mesh, cp_mesh, tp_mesh
        self.cp_size, self.enable_seq_packing = cp_size, enable_seq_packing
        self.sampling_params = sampling_params


class LossPostProcessor(_PostProcessor):
    def __init__(self, loss_fn, cfg, device_mesh, cp_mesh, tp_mesh, cp_size, dp_size, **named):
        super().__init__(cfg, device_mesh, cp_mesh, tp_mesh, cp_size, **named)
        self.loss_fn, self.dp_size = loss_fn, dp_size


class LogprobsPostProcessor(_PostProcessor):
    pass


def forward_with_post_processing_fn(
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
    inputs, data = processed_mb.processed_inputs, processed_mb.data_dict
    logits = model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
    ).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / (sampling_params.temperature if sampling_params else 1.0)
    found = torch.log_softmax(logits[:, :-1], -1).gather(2, inputs.input_ids[:, 1:, None])[..., 0]
    if isinstance(post_processing_fn, LogprobsPostProcessor):
        at = torch.arange(inputs.seq_len)
        found = torch.nn.functional.pad(found, (1, 0)) * (at < data["input_lengths"][:, None])
        return found, {"logprobs": found}, processed_mb
    given = {"next_token_logprobs": found}
    if post_processing_fn.loss_fn.input_type is InputType.LOGIT:
        given = {"logits": logits}
    loss, metrics = post_processing_fn.loss_fn(
        data=data,
        global_valid_seqs=global_valid_seqs,
        global_valid_toks=global_valid_toks,
        **given,
    )
    return loss, metrics, processed_mb


def processors(loss_fn=None, *, cp_size=1, **named):
    """Returns post-processors for a loss and for log-probabilities."""
    own = {"cfg": {}, "device_mesh": None, "cp_mesh": None, "tp_mesh": None, "cp_size": cp_size}
    loss = LossPostProcessor(loss_fn or PolicyLoss(), dp_size=1, **own, **named)
    return SimpleNamespace(loss=loss, logprobs=LogprobsPostProcessor(**own, **named))


def microbatch_of(data) -> Microbatch:
    ids = data["input_ids"]
    rows, columns = ids.shape
    positions = torch.arange(columns).repeat(rows, 1)
    inputs = Inputs(ids, columns, torch.ones_like(ids, dtype=torch.bool), positions)
    return Microbatch(data, inputs, rows, columns)
