"""The headline benchmark: an update of a model of Llama-3-8B's shape on a GPU, dense and shared.

``python -m dormouse.headline grid`` measures times and peaks over the published grid, ``frontier``
the longest prompt that trains, ``small`` the gradients of a small model, and ``arithmetic`` prints
expected values. Each prints a line of JSON per figure as soon as it is known. docs/evidence/gpu.md
has the bars and results.
"""
