"""dormouse: compute a shared prompt prefix once, and let everything else sleep.

A thin package over ``libdormouse.so``; no compiled parts of its own.

- :func:`install`: opens the best door to torch's memory, a GPU's or the process' own.
- :class:`Runtime`: one device with its tiers; :class:`Tag`: memory that sleeps by name.
- :class:`Group`: a prompt and its responses.
- :class:`dormouse.hf.SharedPrefix`: the training step for Hugging Face models.
"""

from .errors import (
    ArgumentError,
    DeviceError,
    DormouseError,
    InternalError,
    MemoryTierError,
    StateError,
    StorageError,
)
from .group import Group
from .install import Installed, install, memory_stats
from .runtime import Node, Plan, Runtime, Tag

__all__ = [
    "ArgumentError",
    "DeviceError",
    "DormouseError",
    "Group",
    "Installed",
    "InternalError",
    "MemoryTierError",
    "Node",
    "Plan",
    "Runtime",
    "StateError",
    "StorageError",
    "Tag",
    "install",
    "memory_stats",
]
