"""The doors through which dormouse gets to torch's GPU memory; :func:`dormouse.install` picks one.

- :mod:`.whole` (A): dormouse is torch's allocator. Any tensor sleeps in place, one by one.
- :mod:`.pool` (B): a torch memory pool of ours beside torch's allocator. A pool sleeps as a whole.
- :mod:`.by_copy` (C): memory stays torch's; what autograd saves is copied out and back.
- :mod:`.stats`: torch's memory statistics, which torch itself refuses to give under door A.
"""
