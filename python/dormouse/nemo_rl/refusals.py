"""What NeMo-RL's calls must be for prompts to be shared; everything else is refused by name."""

from __future__ import annotations

import inspect
from types import ModuleType

from ..trainers.refusals import UnsupportedTrainerError, refuse

FUNCTION = "forward_with_post_processing_fn"
# Of the function in NeMo-RL 0.6 and 0.7.
PARAMETERS = (
    "model",
    "post_processing_fn",
    "processed_mb",
    "is_reward_model",
    "allow_flash_attn_args",
    "global_valid_seqs",
    "global_valid_toks",
    "sampling_params",
    "sequence_dim",
)
# What it is called with, for losses and for log-probabilities.
CLASSES = ("LossPostProcessor", "LogprobsPostProcessor")


def check_module(module: ModuleType) -> None:
    """Checks that the module has the function that is replaced, and what it is called with."""
    own = getattr(module, FUNCTION, None)
    found = () if own is None else tuple(inspect.signature(own).parameters)
    if found != PARAMETERS or not all(hasattr(module, name) for name in CLASSES):
        raise UnsupportedTrainerError(
            f"{module.__name__} has no {FUNCTION}({', '.join(PARAMETERS)}), or not "
            f"{' and '.join(CLASSES)}; accepted: nemo_rl.models.automodel.train of NeMo-RL 0.6 and "
            "0.7"
        )


def check_call(post, inputs, sampling) -> None:
    """Checks a call that is to be shared. ``post``: its post-processor; ``inputs``: its processed
    inputs; ``sampling``: its sampling parameters, or None."""
    top_k = getattr(sampling, "top_k", None)
    top_p = getattr(sampling, "top_p", None)
    refuse(
        (
            post.cp_size > 1,
            f"cp_size is {post.cp_size}: sequences are split over ranks",
            "policy.dtensor_cfg.context_parallel_size=1",
        ),
        (
            post.enable_seq_packing,
            "enable_seq_packing joins the rows of a micro-batch",
            "policy.sequence_packing.enabled=false; policy.dynamic_batching as it is",
        ),
        (
            inputs.is_multimodal,
            "the micro-batch has images: positions depend on them",
            "text",
        ),
        (
            (top_k is not None and top_k > 0) or (top_p is not None and top_p != 1.0),
            f"top_k is {top_k} and top_p is {top_p}: log-probabilities of filtered tokens",
            "policy.generation.top_k=null and top_p=1.0",
        ),
    )
