"""Which parts there are, cheap and telling ones first, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks, commands
from .commands import Command
from .result import Read

PLACE = "place"
DRIVER = ("gpu",)
TORCH = (*DRIVER, "torch", "torch_gpu")
MODEL = (*TORCH, "transformers", "kernels")
COMPILED = "compiled"
CPU = "cpu"
# Not needed on the CPU.
ON_GPU = {"gpu", "torch_gpu", "kernels", "computes", "memory"}


@dataclass(frozen=True)
class Part:
    """``seconds``: its limit. ``needs``: names of :mod:`.needs`. ``needs_size``: its bars say
    nothing at ``--tiny`` sizes. ``takes_device``: it runs on the CPU too, where it needs no GPU."""

    name: str
    what: str
    seconds: int
    command: Command
    needs: tuple[str, ...] = ()
    read: Read | None = None
    takes_details: bool = False
    needs_size: bool = False
    takes_device: bool = False

    def needs_of(self, details: tuple[str, ...], tiny: bool, device: str) -> tuple[str, ...]:
        """Compiled cells need a compiler; a model that says nothing needs no memory."""
        spared = {"memory"} if tiny else set()
        if self.takes_device and device == CPU:
            spared |= ON_GPU
        named = [each for each in self.needs if each not in spared]
        if details and all(each.endswith(COMPILED) for each in details):
            named += ["triton", "compiler"]
        return tuple(named)


PARTS = (
    Part(PLACE, "what this machine is, and what cannot run on it", 60, commands.place),
    Part("conformance", "the device's contract, case by case", 60,
         commands.gpu_check("conformance"), DRIVER, checks.conformance),
    Part("streams", "what the driver says of a destroyed stream", 60,
         commands.gpu_check("streams"), DRIVER, checks.streams),
    Part("kernels", "kernels against their CPU twins", 60,
         commands.gpu_check("kernels"), (*DRIVER, "computes", "kernels"), checks.kernels),
    Part("mapping", "create, map, access, unmap and release, idle and beside kernels", 120,
         commands.gpu_check("mapping", "bytes_mib=64 kernel_ms=2"), DRIVER, checks.mapping),
    Part("sleep", "gigabytes asleep and awake, every byte compared", 150,
         commands.gpu_check("sleep", "mib=256", "mib=8192"), DRIVER, checks.sleep),
    Part("modes", "GPU modes of install(): bytes, addresses, memory given back", 120,
         commands.python_part("gpu_suite.modes"), TORCH),
    Part("attention", "our attention kernels: rates, and gradients as the schedule calls them", 60,
         commands.python_part("gpu_suite.attention"), (*TORCH, "computes", "transformers")),
    Part("demo", "the demo's group: gradients against FP64, asleep equals awake", 180,
         commands.headline("small"), (*MODEL, "computes"), takes_device=True),
    Part("tests", "the tests of every mode", 240, commands.tests, MODEL),
    Part("copies", "pinned copies against plain ones, 64 KiB to 1 GiB", 150,
         commands.gpu_check("copies", "most_mib=4"), DRIVER, checks.copies, needs_size=True),
    Part("memcheck", "compute-sanitizer over gpu-check", 180, commands.memcheck,
         (*DRIVER, "kernels", "sanitizer")),
    Part("headline", "the published grid; headline:10k/2k:32:eager is one cell of it", 590,
         commands.headline("grid"), (*MODEL, "computes", "memory"), takes_details=True,
         needs_size=True, takes_device=True),
    Part("frontier", "the longest prompt that trains", 590,
         commands.headline("frontier"), (*MODEL, "computes", "memory"), needs_size=True),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}

Chosen = tuple[Part, tuple[str, ...]]


def choose(only: list[str], skip: list[str]) -> list[Chosen]:
    """Parts with their details, in their own order; all unless ``only`` names some.

    Raises :class:`ValueError` for a name that is none.
    """
    wanted: dict[str, list[str]] = {}
    for text in only:
        part, details = parsed(text)
        wanted.setdefault(part.name, []).extend(details)
    left_out = {_named(name).name for name in skip}
    return [
        (part, tuple(wanted.get(part.name, ())))
        for part in PARTS
        if part.name not in left_out and (not only or part.name in wanted)
    ]


def parsed(text: str) -> Chosen:
    """``headline:CELL,CELL`` as a part and its details. Raises :class:`ValueError`."""
    name, _, detail = text.partition(":")
    part = _named(name)
    if detail and not part.takes_details:
        raise ValueError(f"{text!r}: part {name!r} is one piece; accepted: {name}")
    return part, tuple(detail.split(",")) if detail else ()


def _named(name: str) -> Part:
    if name not in BY_NAME:
        raise ValueError(f"no part {name!r}; accepted: {', '.join(BY_NAME)}")
    return BY_NAME[name]
