"""What a step did: as text with what to change, as plain data, and as scalars for a logger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from .check import Checked

COUNTS = (
    "prefix_tokens",
    "recomputed_tokens",
    "microbatch_tokens",
    "microbatches",
    "dummy_microbatches",
)

# A wait that is shorter is not worth a change.
WORTH_NS = 1_000_000
# A wait up to this factor above its bound is the links'; a longer one is for want of memory ahead.
LINKS_SET_IT = 1.25
# Notes listed; the others are counted.
NOTES_MAX = 4

_LOWERS_PEAK = {
    "A": "the prompt saves faster than copies leave; a budget (alloc_budget_bytes) makes it wait",
    "B": "a smaller microbatch_tokens lowers it",
    "C": "a smaller window_layers lowers it",
}


@dataclass
class StepReport:
    """Results of one step. ``print(report)`` explains them; not to be parsed."""

    loss: float
    """The weighted sum of all losses."""
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Number of tokens and microbatches run."""
    prefixes: list[dict] = field(default_factory=list)
    """The report of each prefix, in the order of their backwards: bytes per tier, stall and its
    bound in ns, why it declined to sleep."""
    exchanged_prefixes: int = 0
    """Number of prefixes that this rank or another ran in an exchange. ``RanksReport.exchange``
    reports of them, and no other figure here counts them."""
    notes: list[str] = field(default_factory=list)
    """One sentence per layer that stayed awake, with the reason."""
    checked: Checked | None = None
    """The last check of the model: when, why and how closely the step equals the dense one."""

    @property
    def prefix(self) -> dict:
        """The report of the last prefix: of a group, the prompt's. Empty without a shared one."""
        return self.prefixes[-1] if self.prefixes else {}

    def to_dict(self) -> dict:
        """Returns all of it as numbers, strings, lists and dicts, which ``json.dumps`` takes."""
        return json.loads(json.dumps(asdict(self), default=str))

    def scalars(self, prefix: str = "dormouse/") -> dict[str, float]:
        """Returns the figures to plot, by name, as ``wandb.log`` takes them; one by one they are
        the arguments of TensorBoard's ``add_scalar``. ``prefix`` begins each name.

        Of several prefixes, bytes that slept, bytes copied and times are sums, peaks the largest.
        """
        figures = {"loss": self.loss, **self.counts}
        for name in ("dormant_bytes", "boundary_bytes", "asleep_bytes_peak", "stray_wakes"):
            figures[name] = self._sum(name)
        for name in ("written_bytes", "read_bytes"):
            figures[f"file_{name}"] = self._sum(name)
        for name in ("stall", "stall_bound"):
            figures[f"{name}_s"] = self._sum(f"{name}_ns") / 1e9
        for phase, peak_bytes in self._peaks().items():
            figures[f"peak_{phase}_bytes"] = peak_bytes
        return {prefix + name: float(value) for name, value in figures.items()}

    def __str__(self) -> str:
        lines = [self._ran(), *self._exchanged(), *self._memory(), *self._waited()]
        lines += self._stayed_awake()
        advice = list(self._advice())
        if advice:
            lines += ["what to change:", *(f"- {each}" for each in advice)]
        return "\n".join(lines)

    def _sum(self, name: str) -> int:
        return sum(each[name] for each in self.prefixes)

    def _peaks(self) -> dict[str, int]:
        """Returns the most bytes in use in each phase; empty without a prefix."""
        peaks = [each["phase_peak_bytes"] for each in self.prefixes]
        return {phase: max(each[phase] for each in peaks) for phase in "ABC"} if peaks else {}

    def _peak_phase(self) -> str | None:
        """Returns the phase with the highest peak; None if none was measured."""
        peaks = self._peaks()
        return max(peaks, key=peaks.get) if any(peaks.values()) else None

    def _ran(self) -> str:
        counts = self.counts
        tokens = counts["prefix_tokens"] + counts["recomputed_tokens"]
        shared = "no prefix of its own" if self.exchanged_prefixes else "no prefix"
        if self.prefixes:
            shared = _prefixes(len(self.prefixes), "shared ")
        return (
            f"loss {self.loss:.6g}; {tokens} tokens of {shared}, "
            f"{counts['microbatch_tokens']} of responses in {counts['microbatches']} microbatches"
        )

    def _exchanged(self) -> Iterator[str]:
        if self.exchanged_prefixes:
            count = _prefixes(self.exchanged_prefixes)
            yield f"exchanged: {count}, computed by this rank or received from another"

    def _memory(self) -> Iterator[str]:
        phase = self._peak_phase()
        if phase is not None:
            peaks = self._peaks()
            each = ", ".join(f"{name} {in_units(peak)}" for name, peak in peaks.items())
            yield f"device memory: {in_units(peaks[phase])} at most, in phase {phase} ({each})"
        if self.prefixes:
            host, file = (
                sum(each["tier_bytes_peak"][tier] for each in self.prefixes)
                for tier in ("host", "nvme")
            )
            yield (
                f"asleep: {in_units(self._sum('asleep_bytes_peak'))} of "
                f"{in_units(self._sum('dormant_bytes'))} that may sleep; at most "
                f"{in_units(host)} in host memory, {in_units(file)} in the file"
            )

    def _waited(self) -> Iterator[str]:
        if self.prefixes:
            stall, bound = self._sum("stall_ns"), self._sum("stall_bound_ns")
            yield f"waited: {_seconds(stall)}; at least {_seconds(bound)} at the best rates seen"

    def _stayed_awake(self) -> Iterator[str]:
        yield from (f"awake: {note}" for note in self.notes[:NOTES_MAX])
        if len(self.notes) > NOTES_MAX:
            yield f"awake: {len(self.notes) - NOTES_MAX} more layers; report.notes has them"
        for reasons in dict.fromkeys(each["declined"] for each in self.prefixes):
            if reasons:
                yield f"awake: {reasons}"

    def _advice(self) -> Iterator[str]:
        if not self.prefixes:
            if not self.exchanged_prefixes:
                yield (
                    "no prefix was shared, so the step cost what a dense one does: group by prompt"
                )
            return
        phase = self._peak_phase()
        if phase is not None:
            yield f"phase {phase} sets the peak: {_LOWERS_PEAK[phase]}"
        stall = self._sum("stall_ns")
        if stall >= WORTH_NS:
            yield self._advice_on_waits(stall)
        strays = self._sum("stray_wakes")
        if strays:
            first = next(each["first_stray"] for each in self.prefixes if each["stray_wakes"])
            yield f"{strays} accesses woke sleeping memory; remove them; the first: {first}"
        left = self._sum("left_asleep_bytes")
        if left:
            yield f"{in_units(left)} could not be woken: free other memory before the next step"

    def _advice_on_waits(self, stall_ns: int) -> str:
        """Returns what shortens the waits."""
        bound = self._sum("stall_bound_ns")
        if stall_ns > LINKS_SET_IT * bound:
            return (
                f"the step waited {_seconds(stall_ns)}, {_seconds(stall_ns - bound)} more than "
                "copies need: a larger window_layers or budget wakes layers earlier"
            )
        if self._sum("read_bytes"):
            rate = max(each["read_bytes_per_s"] for each in self.prefixes)
            return (
                f"the step waited {_seconds(stall_ns)} for the file, which is read at "
                f"{in_units(rate)}/s: a larger host_budget_bytes, or a faster disk for nvme_dir"
            )
        return (
            f"the step waited {_seconds(stall_ns)} for copies from host memory: "
            "DORMOUSE_OFFLOAD_RESIDENCY=fit keeps awake what the budget has room for"
        )


def _prefixes(count: int, kind: str = "") -> str:
    return f"{count} {kind}prefix{'es' if count > 1 else ''}"


def in_units(size_bytes: float) -> str:
    """Returns a size in the largest unit of which it has one, to four digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes:.0f} B"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3g} s" if ns >= 10**9 else f"{ns / 1e6:.3g} ms"
