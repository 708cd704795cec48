"""Token ids as the library reads them: int32 or int64 in one piece of the CPU's memory."""

from __future__ import annotations

import torch


def id_tensor(ids) -> torch.Tensor:
    """Returns token ids as an int64 tensor on the CPU. Raises TypeError for other numbers."""
    tensor = torch.as_tensor(ids, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dim() != 1:
        shape = f"{tensor.dtype} of {tensor.dim()} dimensions"
        raise TypeError(f"token ids are {shape}; accepted: integers in one dimension")
    return tensor.to("cpu", torch.int64)


def ids_of(ids) -> tuple[int, int, int, object]:
    """Returns the address, bytes per id, number of ids and the owner of the memory; copies only if
    needed."""
    described = getattr(ids, "__array_interface__", None)
    if described is not None and not isinstance(ids, torch.Tensor):
        (count,) = described["shape"] if len(described["shape"]) == 1 else (None,)
        width = {"<i4": 4, "<i8": 8}.get(described["typestr"])
        if count and width and described["strides"] is None:
            return described["data"][0], width, count, ids
    in_place = (torch.int32, torch.int64)
    if not (
        isinstance(ids, torch.Tensor)
        and ids.dtype in in_place
        and ids.dim() == 1
        and ids.device.type == "cpu"
        and ids.is_contiguous()
    ):
        ids = id_tensor(ids).contiguous()
    return ids.data_ptr(), ids.element_size(), len(ids), ids
