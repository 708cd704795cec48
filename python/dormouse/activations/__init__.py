"""Saved activations asleep between any forward and its backward; :func:`dormouse.offload` uses it.

- :mod:`.layers`: the repeated layers of a model, and the modules around them.
- :mod:`.passes`: one forward: what its layers save, and the marks of its backward.
- :mod:`.report`: what slept, and what kept the rest awake.
"""
