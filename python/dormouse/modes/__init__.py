"""The modes in which dormouse manages torch's GPU memory; :func:`dormouse.install` selects one.

- :mod:`.allocator`: dormouse is torch's CUDA allocator. Any tensor sleeps in place.
- :mod:`.pool`: a torch memory pool next to torch's own allocator. A pool sleeps as a whole.
- :mod:`.copying`: torch keeps its memory; tensors saved by autograd are copied out and back.
- :mod:`.exports`: how torch's out-of-memory error is thrown, by torch version.
- :mod:`.history`, :mod:`.snapshot`: torch's memory history, snapshots and out-of-memory observers.
- :mod:`.stats`: torch's memory statistics, which torch does not provide in mode ``"allocator"``.
"""
