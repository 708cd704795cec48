"""dormouse: compute a shared prompt prefix once, and let everything else sleep.

A thin package over ``libdormouse.so``. ``python -m dormouse run SCRIPT`` starts a script in which CPU
tensors can sleep.

- :func:`install`: selects how dormouse manages torch's memory in this process.
- :func:`fail_together`: an error or a death of one rank is an error of all, at once.
- :func:`offload`: any training step with its saved activations asleep between forward and backward.
- :class:`Runtime`: the memory tiers of a device; :class:`Tag`: a named set of blocks that sleep.
- :class:`Group`: a prompt and its responses; :class:`Tree`: conversations that share beginnings.
- :class:`Forest`: the prefix trees of token sequences; :class:`Plan`: what to run in which order,
  for a model of a :class:`ModelShape`; :func:`query`: planning for ranks (:mod:`.schedule`).
- :func:`params`: the settings in effect, each with its source.
- :func:`log_to_logging`: the library's log events in Python's ``logging``.
- :class:`dormouse.hf.SharedPrefix`: the training step for Hugging Face models.
"""

from .activations.report import OffloadReport
from .errors import (
    ArgumentError,
    DeviceError,
    DormouseError,
    InternalError,
    MemoryTierError,
    StateError,
    StorageError,
)
from .failures import RankFailedError, fail_together
from .group import Group
from .install import Installed, install, memory_stats
from .log import log_to_logging
from .offload import Offload, offload
from .params import params
from .runtime import Prefix, Runtime, StayedAwake, Tag
from .rank_plan import RankPlan
from .schedule import Forest, ModelShape, Plan, query
from .tree import Conversation, Tree

# That of the workspace in Cargo.toml.
__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Conversation",
    "DeviceError",
    "DormouseError",
    "Forest",
    "Group",
    "Installed",
    "InternalError",
    "MemoryTierError",
    "ModelShape",
    "Offload",
    "OffloadReport",
    "Prefix",
    "Plan",
    "RankPlan",
    "RankFailedError",
    "Runtime",
    "StateError",
    "StayedAwake",
    "StorageError",
    "Tag",
    "Tree",
    "query",
    "fail_together",
    "install",
    "log_to_logging",
    "memory_stats",
    "offload",
    "params",
]
