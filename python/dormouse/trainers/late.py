"""A call as soon as a module of a trainer is imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Calls ``then(module)`` now, or at the end of the first import of module ``name``.

    Nothing is imported by it, so that CUDA's devices are not looked at before Ray has assigned
    them. An import that fails, or whose ``then`` raises, is repeated by the next import.
    """
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], object]):
        self._name, self._then = name, then

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
                self._then(module)
            except BaseException:
                # The module is not imported: the call is still due.
                sys.meta_path.insert(0, self)
                raise

        spec.loader.exec_module = exec_module
        return spec
