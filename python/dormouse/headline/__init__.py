"""The headline: one update of a model of Llama-3-8B's shape, dense and through dormouse, on a GPU.

``python -m dormouse.headline grid`` measures times and peaks over the published grid,
``frontier`` the longest prompt that trains, ``small`` whether a small model's gradients are right
on this device, and ``arithmetic`` prints what to expect. Each prints a line of JSON per figure as
soon as it has it. docs/evidence/gpu.md has the bars and what was measured.
"""
