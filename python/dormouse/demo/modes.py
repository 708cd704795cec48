"""The three variants of a step that the demo compares, and their requirements."""

from __future__ import annotations

DENSE, AWAKE, ASLEEP = MODES = ("dense", "awake", "asleep")

# Several times the saved activations of the longest recorded prompt; never grown.
NVME_FILE_BYTES = 4 << 30
