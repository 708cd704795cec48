"""Directories of the demo inside a checkout."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
TRACE_DIR = CHECKOUT / "examples" / "rollouts"
PROMPT_DIR = TRACE_DIR / "prompts"
DEMO_DIR = CHECKOUT / "target" / "demo"
CACHE_DIR = DEMO_DIR / "cache"
REPORT_PATH = DEMO_DIR / "report.json"
