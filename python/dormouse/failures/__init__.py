"""If one rank fails, every rank fails at once, and says which one it was: :func:`fail_together`.

Ranks that train together wait for each other in collectives, most of them torch's own. A rank whose
loss raises never arrives, and the others would wait for the timeout of their process group.

:mod:`.first`: which failure is the cause of the others; pure. :mod:`.monitor`: the thread of rank 0
that is told of failures and tells them. :mod:`.member`: a rank's connection to it. :mod:`.groups`:
ends collectives that wait. :mod:`.scope`: the context.
"""

from .first import Failure, RankFailedError
from .scope import check, fail_together

__all__ = ["Failure", "RankFailedError", "check", "fail_together"]
