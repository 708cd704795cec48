"""The plan of record: three commands, the most valuable first, each useful alone.

A step is a part, with details after its colon, and the seconds it has at least: what the steps
before it left goes to the next one. docs/evidence/gpu.md says what each command answers.
"""

from __future__ import annotations

from . import limits

# Each command ends within 9.5 minutes, also where its last part has to be ended.
SECONDS_MAX = 570 - limits.GRACE_SECONDS - limits.REAP_SECONDS

PLANS: dict[int, tuple[str, tuple[tuple[str, int], ...]]] = {
    1: (
        "does it work on this driver, and what do mapping calls cost",
        (
            ("place", 20),
            ("conformance", 25),
            ("streams", 10),
            ("kernels", 25),
            ("mapping", 40),
            ("sleep", 40),
            ("modes", 60),
            ("attention", 40),
            ("demo", 90),
            ("tests", 150),
            ("copies", 50),
        ),
    ),
    2: (
        "the headline, eager: a small group first, then the group of record",
        (
            ("place", 20),
            ("headline:10k/2k:2:eager,10k/2k:32:eager", 530),
        ),
    ),
    3: (
        "the headline, compiled; the longest prompt; memory errors",
        (
            ("place", 20),
            ("headline:10k/2k:32:compiled", 305),
            ("frontier", 180),
            ("memcheck", 50),
        ),
    ),
}
