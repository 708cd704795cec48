"""Backward on some rows of a forward: what dropped rows saved is freed, products become smaller.

- :mod:`.rows`: the kept rows, and where rows are in a tensor.
- :mod:`.marks`: what a forward notes of its tensors' rows.
- :mod:`.rules`, :mod:`.attention`: how rows pass through the backward of each operation.
- :mod:`.saved`: what nodes saved, and its replacement.
- :mod:`.graph`: the backward itself.
- :mod:`.model`: of a dense run.
"""
