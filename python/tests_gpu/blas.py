"""Matrix products that do nothing, as every kernel on the stand-in: the real cuBLAS does not start
there. Importing this puts them in place for GPU tensors; their results are whatever was there."""

from __future__ import annotations

import warnings

import torch

# torch 2.11 warns that its own is replaced.
warnings.filterwarnings("ignore", message="Warning only once for all operators")

_library = torch.library.Library("aten", "IMPL")


def _mm(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def _addmm(bias, a, b, *, beta=1, alpha=1):
    return _mm(a, b)


def _add_in_place(to, a, b, *, beta=1, alpha=1):
    return to


def _bmm(a, b):
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


for _name, _function in {"mm": _mm, "addmm": _addmm, "addmm_": _add_in_place, "bmm": _bmm}.items():
    _library.impl(_name, _function, "CUDA")
