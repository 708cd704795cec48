"""Which blocks are live: what makes well-formed lines a trace that can be replayed."""

from __future__ import annotations


class Refused(Exception):
    """An event that cannot follow those before it."""

    def __init__(self, seen: str, accepted: str):
        super().__init__(f"{seen}; accepted: {accepted}")
        self.seen = seen
        self.accepted = accepted


class Ledger:
    """Live blocks by pointer. Events are ``format.Event``; failures are not for it."""

    def __init__(self):
        self.live = {}

    def take(self, is_allocation: bool, event) -> None:
        """Takes one event, or raises :class:`Refused` and stays as it was."""
        if is_allocation:
            before = self.live.setdefault(event.pointer, event)
            if before is not event:
                seen = f"an allocation at {event.pointer:#x}, where {before.size} bytes are live"
                raise Refused(seen, "pointers that are not live")
            return
        block = self.live.get(event.pointer)
        if block is None:
            raise Refused(f"a free of {event.pointer:#x}, which is not live", "live pointers")
        for name in ("size", "scope"):
            wanted, seen = getattr(block, name), getattr(event, name)
            if wanted != seen:
                said = f"{name.capitalize()} {seen} of a free of {event.pointer:#x}"
                raise Refused(said, f"{wanted}, as it was allocated")
        del self.live[event.pointer]
