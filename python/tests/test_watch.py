"""Changes of containers are seen, however they are made."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import pytest
import torch
from models import tiny

from dormouse.hf import watch
from dormouse.hf.fingerprint import Fingerprint
from dormouse.hf.sources import Source
from dormouse.hf.watch import Watch

ROUNDS = 300
# CPython specialises an instruction after some runs.
RUNS = 100


@pytest.fixture(params=["numbered", "not numbered"])
def numbering(request, monkeypatch):
    """With and without numbers of changes."""
    if request.param == "not numbered":
        numbers = itertools.count()
        monkeypatch.setattr(watch, "dict_version", lambda container: next(numbers))
    return request.param


class Holder:
    def __init__(self):
        self.value = None


NUMBER = None


def store_global():
    global NUMBER
    NUMBER = object()


def store_attribute(holder):
    holder.value = object()


CHANGES = {
    "set": lambda d: d.__setitem__("a", object()),
    "equal": lambda d: d.__setitem__("a", 1.0),
    "add": lambda d: d.__setitem__("new", None),
    "delete": lambda d: d.__delitem__("a"),
    "update": lambda d: d.update(a=2),
    "or": lambda d: d.__ior__({"a": 2}),
    "setdefault": lambda d: d.setdefault("new"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_dict_is_seen(kind, change, numbering):
    container = kind(a=1, b=object())
    own = Watch([Source("other", {"c": 1}), Source("own", container)])
    CHANGES[change](container)
    assert 1 in own.suspects()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_fills_an_empty_dict_is_seen(kind, numbering):
    container = kind()
    own = Watch([Source("own", container)])
    assert own.suspects() == []
    container["a"] = None
    assert own.suspects() == [0]


def test_changes_by_specialised_code_are_seen():
    holder = Holder()
    own = Watch([Source("holder", vars(holder)), Source("globals", globals(), ("NUMBER",))])
    for _ in range(RUNS):
        store_attribute(holder)
        assert own.suspects() == [0]
        own.settle()
        store_global()
        assert own.suspects() == [1]
        own.settle()
        assert own.suspects() == []


def test_a_closure_and_a_list_are_seen():
    value, entries = 1, [1, 2]

    def read():
        return value

    own = Watch([Source("cells", read.__closure__), Source("list", entries)])
    assert own.suspects() == []
    value = 2
    assert 0 in own.suspects()
    own.settle()
    entries.append(3)
    assert 1 in own.suspects()
    own.settle()
    entries.reverse()
    assert 1 in own.suspects()


@pytest.mark.parametrize("seed", range(4))
def test_against_a_comparison_of_all_entries(seed, numbering):
    drawn = random.Random(seed)
    containers = [{}, {}, {"a": 1}, OrderedDict(b=2), [], [1, 2], {"c": []}, {"d": None}]
    values = [None, True, 1, 1.0, "text", object(), torch.zeros(1)]
    own = Watch([Source(str(i), each) for i, each in enumerate(containers)])

    def entries(container):
        return list(container.items()) if isinstance(container, dict) else list(container)

    def is_same(now, before):
        return len(now) == len(before) and all(
            a is b if not isinstance(a, tuple) else a[0] == b[0] and a[1] is b[1]
            for a, b in zip(now, before, strict=True)
        )

    before, touched = [entries(each) for each in containers], set()
    for _ in range(ROUNDS):
        for _ in range(drawn.randrange(3)):
            index = drawn.randrange(len(containers))
            touched.add(index)
            container = containers[index]
            if isinstance(container, list):
                container[drawn.randrange(3) :] = drawn.choices(values, k=drawn.randrange(3))
            elif drawn.random() < 0.4 and container:
                container.pop(drawn.choice(list(container)))
            else:
                container[drawn.choice("abcd")] = drawn.choice(values)
        suspects = set(own.suspects())
        changed = {i for i, each in enumerate(containers) if not is_same(entries(each), before[i])}
        assert changed <= suspects
        if numbering == "numbered":
            # Lists are compared entry by entry, all if one has changed.
            lists = {i for i, each in enumerate(containers) if isinstance(each, list)}
            assert suspects <= touched | lists
        if drawn.random() < 0.5:
            own.settle()
            before, touched = [entries(each) for each in containers], set()


def test_an_equal_value_is_adopted_and_a_later_change_seen(numbering):
    model = tiny(num_hidden_layers=1)
    model.settings = {"weights": [1.0]}
    fingerprint = Fingerprint(model)
    model.settings = {"weights": [1.0]}
    assert fingerprint.matches() and fingerprint.matches()
    model.settings["weights"][0] = 2.0
    assert not fingerprint.matches()


def test_a_dict_of_hooks_that_was_replaced_is_read():
    model = tiny(num_hidden_layers=1)
    fingerprint = Fingerprint(model)
    model.model.norm._forward_hooks = OrderedDict()
    assert fingerprint.matches()
    model.model.norm.register_forward_hook(lambda module, args, out: out)
    assert not fingerprint.matches()


def test_hooks_of_parameters_are_seen():
    model = tiny(num_hidden_layers=1)
    weight = model.model.norm.weight
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        fingerprint = Fingerprint(model)
        handle = register(lambda *_: None)
        assert not fingerprint.matches()
        handle.remove()
        assert fingerprint.matches()
