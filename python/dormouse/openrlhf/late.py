"""A call as soon as OpenRLHF's actor is imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

MODULE = "openrlhf.models.actor"


def when_imported(then: Callable[[ModuleType], object]) -> None:
    """Calls ``then(module)`` at the end of the first import of :data:`MODULE`."""
    sys.meta_path.insert(0, _Finder(then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, then: Callable[[ModuleType], object]):
        self._then = then

    def find_spec(self, fullname, path, target=None):
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module
        return spec
