"""What slept of a forward's saved activations, and what kept the rest awake."""

from __future__ import annotations

from dataclasses import dataclass, field

IN_PLACE, BY_COPY = "in place", "by copy"


@dataclass
class OffloadReport:
    """Figures of the latest forward with a graph, in bytes and nanoseconds."""

    way: str
    """``"in place"`` or ``"by copy"``."""
    forwards: int = 0
    """Number of forwards with a graph so far."""
    layer_calls: int = 0
    saved_bytes: int = 0
    """Storages that the layers and what runs between them saved; parameters are not counted."""
    window_bytes: int = 0
    """The part of ``saved_bytes`` that the last layers saved, which stays awake: backward needs it
    first."""
    asleep_bytes: int = 0
    """The most bytes that slept at a time."""
    file_bytes: int = 0
    """The most bytes that slept in the file tier; 0 by copy, whose tier is not recorded."""
    wait_ns: int = 0
    """Time in which forward and backward waited for copies."""
    stray_wakes: int = 0
    """Accesses to sleeping memory that woke it (host device)."""
    prefix: dict = field(default_factory=dict)
    """In place: the runtime's report, with rates, the bound of the waits and reasons."""

    @property
    def asleep_share(self) -> float:
        """``asleep_bytes`` of the saved bytes outside the last layers; 0.0 if there are none."""
        outside = self.saved_bytes - self.window_bytes
        return self.asleep_bytes / outside if outside else 0.0


def why_awake(report: OffloadReport, window_layers: int) -> str:
    """Returns why nothing slept in a forward, although a tier is open, and what helps."""
    if report.layer_calls == 0:
        return "no layer ran in a call of the model; call the model itself, or pass layers=[...]"
    if report.saved_bytes == 0:
        return (
            f"{report.layer_calls} layers ran, and nothing that they saved came to dormouse: they "
            "saved nothing, or it went to hooks entered inside, such as those of save_on_cpu or of "
            "a checkpoint around the model; enter hooks outside, and checkpoint single layers"
        )
    if report.saved_bytes == report.window_bytes:
        return (
            f"{report.layer_calls} layers ran and saved {report.saved_bytes} bytes, and the last "
            f"{window_layers} stay awake; use more layers, or Runtime(window_layers=1)"
        )
    reasons = report.prefix.get("declined") or "storages are below the smallest size that sleeps"
    return (
        f"{report.saved_bytes - report.window_bytes} saved bytes stay awake: {reasons}; use larger "
        "batches, or a larger tier"
    )
