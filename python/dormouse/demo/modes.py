"""The three variants of a step that the demo compares, and their requirements."""

from __future__ import annotations

DENSE, AWAKE, ASLEEP = MODES = ("dense", "awake", "asleep")

# Enough for the longest recorded prompt's saved activations several times over; never grown.
NVME_FILE_BYTES = 4 << 30
