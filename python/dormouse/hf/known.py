"""The states of a model that have been checked: as it is now, and as it was before.

A trainer moves between few states: training and evaluation mode, an adapter switched off for a
reference pass. Each is checked once. A state is found again by its fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .check import Checked
from .fingerprint import Fingerprint
from .head import Head
from .probe import Probe
from .support import Way

# States that are kept. Finding one takes as long as this many fingerprints.
STATES_MAX = 4


@dataclass(frozen=True)
class Known:
    """A state of the model and what was found out about it."""

    fingerprint: Fingerprint
    way: Way | None = None
    """Of the view that passed the checks."""
    checks: dict[object, Checked] = field(default_factory=dict)
    """By what else the check depends on."""
    probes: dict[tuple, Probe] = field(default_factory=dict)
    heads: dict[torch.dtype | None, Head | None] = field(default_factory=dict)
    """By autocast; None for one that does not run apart."""


class KnownModels:
    """States of one model, the current one first."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._states: list[Known] = []

    def current(self) -> Known | None:
        """Returns the state that the model is in; None if it is in no known one."""
        for place, state in enumerate(self._states):
            if state.fingerprint.matches():
                self._states.insert(0, self._states.pop(place))
                return state
        return None

    def difference(self) -> str:
        """Names what has changed since the last state."""
        if not self._states:
            return "the first step"
        return self._states[0].fingerprint.difference()

    def put(self, fingerprint: Fingerprint, known: Known | None, way: Way | None) -> Known:
        """Makes a state the current one; ``known``: what is already known of it, of which another
        view forgets all. Forgets states with other parameters, whose memory they would hold."""
        others = [
            state
            for state in self._states
            if state is not known and state.fingerprint.has_parameters_of(self._model)
        ]
        if known is None or known.way is not way:
            state = Known(fingerprint, way)
        else:
            state = replace(known, fingerprint=fingerprint)
        self._states = [state, *others[: STATES_MAX - 1]]
        return state
