"""``python -m gpu_suite.modes``: each GPU mode of ``dormouse.install``, in a process of its own.

Every check is of bytes that copies moved and of the driver's own figure of memory: no kernel
of torch's has a say in it.
"""

from __future__ import annotations

import subprocess
import sys

from . import checks
from .result import DONE, NOT_HELD, tail
from .rows import LOWER, row
from .say import say

MIB = 1 << 20
COUNT, EACH_BYTES = 8, 64 * MIB
# After one cycle: the driver keeps memory for streams and registered host memory from then on.
GIVEN_BACK_MIN = checks.GIVEN_BACK_MIN


def main(modes: list[str]) -> int:
    """Runs all modes, or in this process the one named."""
    modes = [each for each in modes if each in CHECKS]
    if modes:
        CHECKS[modes[0]]()
        return DONE
    status = DONE
    for mode in CHECKS:
        command = [sys.executable, "-m", "gpu_suite.modes", mode]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            how = tail(done.stderr).splitlines()[-1] if done.stderr.strip() else "no word"
            say("row", row(f"mode {mode}: works", "held", 0, bar=1, how=how))
            print(tail(done.stderr), file=sys.stderr)
            status = NOT_HELD
    return status


def allocator() -> None:
    """Mode allocator: tensors asleep in place by tag."""
    import dormouse
    import torch

    installed = dormouse.install(mode="allocator")
    sent = _random(COUNT)
    tensors = [each.cuda() for each in sent]
    addresses = [tensor.data_ptr() for tensor in tensors]
    tag = installed.runtime.tag("suite")
    for tensor in tensors:
        tag.add(tensor)
    tag.sleep("host")
    tag.wake()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = _used()
    # A sleep gives pages back by itself: nothing is emptied or trimmed before the reading.
    declined = tag.sleep("host")
    torch.cuda.synchronize()
    fell = before - _used()
    tag.wake()
    back = [tensor.cpu() for tensor in tensors]
    moved = sum(a != tensor.data_ptr() for a, tensor in zip(addresses, tensors, strict=True))
    why = declined or "by tag, at unchanged addresses"
    _tell("allocator", sent, back, fell, why)
    say(
        "row",
        row("mode allocator: addresses that moved", "tensors", moved, bar=0, better=LOWER, how=why),
    )
    held = torch.cuda.memory_allocated()
    say("row", row("mode allocator: torch's own figure of it", "GB", held / 1e9,
                   bar=COUNT * EACH_BYTES / 1e9, how="torch.cuda.memory_allocated()"))  # fmt: skip


def pool() -> None:
    """Mode pool: a pool asleep as a whole, next to torch's own allocator."""
    import dormouse
    import torch

    installed = dormouse.install(mode="pool")
    sent = _random(COUNT)
    own = installed.pool("suite")
    with own.use():
        tensors = [each.cuda() for each in sent]
    own.sleep("host")
    own.wake()
    installed.runtime.trim()
    before = _used()
    declined = own.sleep("host")
    torch.cuda.synchronize()
    fell = before - _used()
    own.wake()
    _tell("pool", sent, [tensor.cpu() for tensor in tensors], fell, declined or "the whole pool")


def copy() -> None:
    """Mode copy: saved tensors leave the GPU and come back bit for bit."""
    import dormouse
    import torch

    installed = dormouse.install(mode="copy")
    sent = _random(COUNT)
    with installed.saved_tensor_offload().hooks():
        # A product saves its other factor; what it computes is not looked at.
        kept = []
        for each in sent:
            leaf = each.view(torch.float32).cuda().requires_grad_()
            kept.append((leaf * leaf.detach().clone()).grad_fn)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    tiers = installed.runtime.stats()["tiers"]
    left = sum(gauge["current_bytes"] for name, gauge in tiers.items() if name != "device")
    back = [node._saved_other.cpu().view(torch.uint8) for node in kept]
    _tell("copy", sent, back, None, "saved tensors, by copy", left)


CHECKS = {"allocator": allocator, "pool": pool, "copy": copy}


def _tell(mode: str, sent, back, fell: int | None, how: str, left: int | None = None) -> None:
    """``fell``: bytes of the GPU that were given back. ``left``: bytes in the tiers."""
    import torch

    wrong = sum(not torch.equal(a, b) for a, b in zip(sent, back, strict=True))
    # Bytes that never left are equal.
    if left is not None and left < COUNT * EACH_BYTES:
        wrong, how = None, f"no figure: {left} of {COUNT * EACH_BYTES} bytes left the GPU"
    say("row", row(f"mode {mode}: tensors with other bytes", "tensors", wrong, bar=0, better=LOWER,
                   how=how))  # fmt: skip
    if fell is not None:
        least = GIVEN_BACK_MIN * COUNT * EACH_BYTES / 1e9
        say("row", row(f"mode {mode}: given back while asleep", "GB", fell / 1e9, bar=least,
                       how="driver's own figure"))  # fmt: skip


def _random(count: int):
    import torch

    generator = torch.Generator().manual_seed(1)

    def one():
        # Below 64 in each byte: as FP32 these are all finite.
        shape = (EACH_BYTES,)
        return torch.randint(0, 64, shape, dtype=torch.uint8, generator=generator)

    return [one() for _ in range(count)]


def _used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
