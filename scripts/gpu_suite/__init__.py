"""The parts of ``scripts/gpu-suite``. Standard library alone: torch is what the parts need.

A *part* is a command with a time limit. It prints lines of JSON: ``{"row": ...}`` for each figure,
``{"detail": ...}`` for what stands behind them, ``{"cannot_run": why}``; ``gpu-check`` prints one
object at its end. Whatever was printed before a part was ended counts.
"""
