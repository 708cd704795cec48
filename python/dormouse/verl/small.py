"""A small padded batch in verl's layout, for the comparison of both ways."""

from __future__ import annotations

import torch

# What a batch says of the way in which verl computes its values.
SETTINGS = ("use_remove_padding", "pad_mode", "pad_token_id", "temperature", "calculate_entropy")


def small_batch(data, ids: torch.Tensor, mask: torch.Tensor):
    """Returns the rows of a padded batch, in verl's layout and with the settings of ``data``."""
    from verl.utils import tensordict_utils

    tokens = [row[has != 0] for row, has in zip(ids, mask, strict=True)]
    positions = [torch.arange(len(row), device=row.device) for row in tokens]
    settings = {name: data[name] for name in SETTINGS if name in data}
    if isinstance(settings["temperature"], torch.Tensor):
        # One of all rows: another was refused.
        settings["temperature"] = float(settings["temperature"].flatten()[0])
    return tensordict_utils.get_tensordict(
        tensor_dict={
            "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
        },
        non_tensor_dict=settings,
    )


def values_of(
    output: dict[str, torch.Tensor], mask: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns verl's log-probabilities and entropies of responses, ``[rows, keep]``."""

    def padded(values: torch.Tensor) -> torch.Tensor:
        out = values.values().new_zeros(len(mask), keep)
        for row, (own, has) in enumerate(zip(values.unbind(), mask, strict=True)):
            count = int(has[-keep:].sum())
            out[row, :count] = own[len(own) - count - 1 : len(own) - 1]
        return out

    entropies = output.get("entropy")
    return padded(output["log_probs"]), None if entropies is None else padded(entropies)
