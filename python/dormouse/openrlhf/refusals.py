"""What OpenRLHF's actor and its calls must be for prompts to be shared; everything else is refused
by name."""

from __future__ import annotations

import importlib.metadata
import inspect
import re

import torch

from ..trainers.refusals import UnsupportedTrainerError, refuse

# Of OpenRLHF 0.11's Actor.forward, after self.
FORWARD = (
    "sequences",
    "action_mask",
    "attention_mask",
    "return_output",
    "allgather_logits",
    "return_logprobs",
    "ring_attn_group",
    "packed_seq_lens",
    "return_entropy",
    "mm_inputs",
)

TEMPERED_FROM = (0, 11, 1)


def check_class(actor_class: type) -> None:
    """Checks that the class has the methods that are replaced."""
    own = vars(actor_class).get("forward")
    found = () if own is None else tuple(inspect.signature(own).parameters)[1:]
    if found != FORWARD or "__init__" not in vars(actor_class):
        raise UnsupportedTrainerError(
            f"{actor_class.__name__} has no __init__ or no forward({', '.join(FORWARD)}) of its "
            "own; accepted: Actor of OpenRLHF 0.11"
        )


def divides_by_temperature() -> bool:
    """Whether entropies are of logits over the temperature: from OpenRLHF 0.11.1 on."""
    try:
        version = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        # A class with its interface: the comparison before its first step tells.
        return True
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return numbers >= TEMPERED_FROM


def check_call(actor, call: dict) -> None:
    """Checks a call that has an ``action_mask``. ``call``: its arguments by name."""
    refuse(
        (
            call["mm_inputs"] or getattr(actor, "is_vlm", False),
            "the model reads images: its positions depend on them",
            "a language model without images",
        ),
        (
            call["ring_attn_group"] is not None,
            "ring_attn_group splits sequences over ranks",
            "ds.ring_attn_size 1",
        ),
        (
            call["allgather_logits"] or call["return_logprobs"],
            "allgather_logits or return_logprobs asks for values of prompts' tokens",
            "log-probabilities of action_mask",
        ),
        (
            call["return_entropy"] and actor.temperature != 1.0 and not divides_by_temperature(),
            f"entropies at temperature {actor.temperature}, which OpenRLHF 0.11.0 computes "
            "without it",
            "OpenRLHF 0.11.1, temperature 1.0, or no actor.entropy_coef",
        ),
        (
            call["return_entropy"] and not call["return_output"],
            "return_entropy without return_output",
            "both",
        ),
        (
            call["attention_mask"] is None,
            "a call without attention_mask",
            "attention_mask [rows, columns]",
        ),
    )


def check_model(model: torch.nn.Module) -> None:
    """Checks a model without its wrappers."""
    for module in model.modules():
        for part in (type(module), module.forward):
            if getattr(part, "__module__", "").startswith("liger_kernel"):
                raise UnsupportedTrainerError(
                    "ds.use_liger_kernel replaces the layers' functions; accepted: without it"
                )


class SharedOutput:
    """What a call returns as ``output``: the entropies alone."""

    def __init__(self, entropy: torch.Tensor | None):
        self.entropy = entropy
        """``[rows, columns - 1]``; None if not asked for."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedTrainerError(
            f"output.{name} is read, and a shared call has no such output; accepted: entropy. "
            "aux_loss of routers needs actor.aux_loss_coef 0"
        )

    def __getitem__(self, name: str):
        return getattr(self, name)
