"""Code in a model whose behaviour at other lengths than those of a short check is not known.

What torch, transformers and peft compute for few tokens they compute for many. Other code may not:
classes, hooks, patched forwards, functions in the place of those of a class or of a file, what
modules hold instead of an activation function, functions in transformers' tables.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import torch
from torch.nn.modules import module as torch_module

from .mixers import Route, route_of
from .sources import GLOBAL_HOOKS, code_in, files_of_functions, interfaces_of
from .support import ModelView

KNOWN_PACKAGES = frozenset({"torch", "transformers", "peft", "megatron", "dormouse"})
# Where base classes, and what classes, files and modules hold, may come from. A mock is what the
# trainer makes of it.
FUNCTION_PACKAGES = KNOWN_PACKAGES | {"accelerate", "deepspeed"} | sys.stdlib_module_names - {
    "unittest"
}
# In the names of packages of kernels that transformers loads into a file of its own.
KERNELS = "flash_attn"
# Of configurations: the keys of transformers' tables of functions.
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of modules: what every one has, its hooks among it, and what is looked at by itself.
_LOOKED_AT = frozenset({*vars(torch.nn.Module()), "forward"})
# Callables and containers that are looked at for one value; one with more is not known.
_OBJECTS_MAX = 1000


def unknown_code(view: ModelView) -> str | None:
    """Names code in the model whose behaviour at other lengths is not known, or None: it does not
    come from torch, transformers or peft, or it is attention that masks scores by itself."""
    if route_of(view) is Route.CACHE:
        return "attention outside transformers' AttentionInterface"
    functional = torch.nn.functional
    found = itertools.chain(
        _in_modules(view.model),
        _in_classes(view.model),
        _in_tables(view),
        _in_file(functional.__name__, functional),
    )
    return next(found, None)


def _in_modules(model: torch.nn.Module) -> Iterator[str]:
    for kind in GLOBAL_HOOKS:
        for hook in getattr(torch_module, kind).values():
            if not _is_known(hook, KNOWN_PACKAGES):
                yield "a hook on every module"
    for name, module in model.named_modules():
        if "forward" in module.__dict__ and not _is_compiled_own(module):
            yield f"a patched forward of {name or 'the model'!r}"
        for kind in HOOKS:
            for hook in getattr(module, kind).values():
                if not _is_known(hook, KNOWN_PACKAGES):
                    yield f"a hook on {name or 'the model'!r}"
        held = {key: each for key, each in vars(module).items() if key not in _LOOKED_AT}
        yield from _in(name or type(module).__name__, held, in_containers=True)


def _in_classes(model: torch.nn.Module) -> Iterator[str]:
    """Names classes of modules, what they hold, and what the files of transformers' models hold."""
    files = {}
    for kind in dict.fromkeys(each for module in model.modules() for each in type(module).__mro__):
        if kind is object:
            continue
        if _package(kind) not in FUNCTION_PACKAGES:
            yield f"the class {kind.__module__}.{kind.__qualname__}"
            continue
        yield from _in(f"{kind.__module__}.{kind.__qualname__}", vars(kind))
        if kind.__module__.startswith("transformers.models."):
            files[kind.__module__] = sys.modules[kind.__module__]
    for name, file in files.items():
        yield from _in_file(name, file)


def _in_tables(view: ModelView) -> Iterator[str]:
    """Names functions in transformers' tables, and what their files hold."""
    functions = []
    implementations = [getattr(view.config, name, None) for name in IMPLEMENTATIONS]
    for interface in interfaces_of(view.model):
        for implementation in implementations:
            function = interface.get(implementation)
            if function is None:
                continue
            functions.append(function)
            if not _is_known(function, KNOWN_PACKAGES):
                yield f"the function {implementation!r} of {type(interface).__name__}"
    for file in files_of_functions(functions):
        yield from _in_file(file.__name__, file)


def _in_file(name: str, file: ModuleType) -> Iterator[str]:
    # Names with two underscores are of the interpreter, or of code that torch.compile put there.
    return _in(name, {key: each for key, each in vars(file).items() if not key.startswith("__")})


def _in(place: str, entries: dict, *, in_containers: bool = False) -> Iterator[str]:
    """Yields the name of each entry of a class, a file or a module whose code is not known."""
    for name, value in list(entries.items()):
        if isinstance(value, (dict, list, tuple)) and not in_containers:
            continue
        if not _is_known(value, FUNCTION_PACKAGES):
            yield f"code of the trainer's own in {place}.{name}"


def _is_known(value, packages: frozenset[str]) -> bool:
    """Returns whether the code that a call of ``value`` runs is known: its own comes from
    ``packages``, and what it wraps from ``FUNCTION_PACKAGES``. What runs none is known."""
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        each = todo.pop()
        held = code_in(each)
        if isinstance(each, (dict, list, tuple)):
            held = list(each.values() if isinstance(each, dict) else each)
        if id(each) in seen or (held is None and not callable(each)):
            continue
        if len(seen) == _OBJECTS_MAX:
            return False
        seen[id(each)] = each
        if held is not None:
            todo += held
            continue
        if not _packages_of(each) <= packages:
            return False
        packages = FUNCTION_PACKAGES
        todo += _wrapped(each)
    return True


def _packages_of(code) -> set[str]:
    """Returns where a callable comes from. A wrapper may have the name of what it wraps, and a
    decorated function that of the trainer's, in the file of the decorator."""
    found = {_package(code)}
    if isinstance(code, FunctionType):
        found.add(code.__globals__.get("__name__", code.__module__ or "").partition(".")[0])
    elif not isinstance(code, (type, BuiltinFunctionType)):
        found.add(_package(type(code)))
    return {"torch" if KERNELS in each else each for each in found}


def _wrapped(code) -> Iterator:
    """Yields what a callable was made from."""
    yield getattr(code, "__wrapped__", None)
    for cell in getattr(code, "__closure__", None) or ():
        # One that is not assigned yet has no contents.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _package(code) -> str:
    return (getattr(code, "__module__", None) or type(code).__module__).partition(".")[0]


def _is_compiled_own(module: torch.nn.Module) -> bool:
    """Returns whether torch.compile set the forward of ``module``, from that of its class or from
    the module that it wraps."""
    compiled = getattr(module.__dict__["forward"], "_torchdynamo_orig_callable", None)
    own = getattr(compiled, "__self__", None), getattr(compiled, "__func__", None)
    wrapped = module._modules.get("_orig_mod")
    if own == (wrapped, type(wrapped).__call__):
        return True
    return own == (module, type(module).forward)
