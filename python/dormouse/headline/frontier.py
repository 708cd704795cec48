"""The longest prompt that trains: dense and shared, with and without activation checkpointing.

The response length is fixed. A trial is a whole step that completes or runs out of memory. A
microbatch is one response, so that its memory does not depend on the prompt. The search bisects
between a length that trains and one that does not. A length of ours that runs out of memory is tried
once more: the step after a refusal leaves no holes in pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..demo.process import WorkerError
from . import arithmetic
from .expected import WINDOW_LAYERS
from .time_budget import TimeBudget
from .pair import Pair
from .rows import emit, row
from .shapes import Geometry

OVER_DENSE_MIN = 2.5
OVER_DENSE_PUBLISHED = 1.657
OF_TIERS_MIN = 0.95
# Two microbatches, so that gradients of the prompt accumulate.
RESPONSES = 2
# Relative resolution of the limit.
STEP_SHARE = 1 / 64


class Stopped(Exception):
    """The search ends early: no time is left, or the side refuses. The message has the reason."""


def search(fits: Callable[[int], bool], guess: int, step: int) -> tuple[int, int | None]:
    """Returns the longest length that fits and the shortest that does not, multiples of ``step``.

    ``fits`` may raise :class:`Stopped`, which ends the search with the values known by then. The
    second is None if no length was too long.
    """
    low, high = 0, None
    at = max(step, guess // step * step)
    stride = max(step, at // 8 // step * step)
    try:
        while high is None or high - low > step:
            if fits(at):
                low = at
            else:
                high = at
            if high is None:
                at += stride
                stride *= 2
            else:
                at = max(low + step, (low + high) // 2 // step * step)
    except Stopped:
        pass
    return low, high


@dataclass
class Frontier:
    """Searches on one device. ``tiers``: bytes of the host and file tiers together."""

    pair: Pair
    geometry: Geometry
    budget: TimeBudget
    tiers: int

    def run(self) -> bool:
        """Runs all searches in turn. Returns whether every one completed."""
        response = 2 * self.geometry.k
        room, guess = self._calibrate(response)
        found, limits = {}, set()
        for name, side, checkpointed, start in (
            ("ours", "ours", False, guess),
            ("dense", "dense", False, self._dense_guess(room, response)),
            ("ours checkpointed", "ours", True, guess),
            ("dense checkpointed", "dense", True, 8 * self._dense_guess(room, response)),
        ):
            longest, end, is_limit = self._longest(side, checkpointed, response, start)
            found[name] = longest + response if longest else None
            limits |= {name} if is_limit else set()
            how = end or "no time to find what does not"
            emit("row", row(f"{name}: longest prompt + response", "tokens", found[name], how=how))
            self._tell(found, limits, guess, response)
        return len(limits) == len(found)

    def _tell(self, found: dict, limits: set[str], could: int, response: int) -> None:
        """``limits``: names of the searches that ended by out of memory."""
        ours, dense = found.get("ours"), found.get("dense")
        of_tiers = f"of {could + response} tokens, from bytes a token measured on a short prompt"
        rows = [
            row(
                "capacity over what the tiers can hold",
                "ratio",
                ours / (could + response) if ours and could > 0 else None,
                bar=OF_TIERS_MIN,
                how=of_tiers if could > 0 else "no figure: by those bytes they hold no prompt",
            ),
            # A length at which a search merely ended is no limit: of dense it is too short.
            row(
                "capacity over dense",
                "×",
                ours / dense if ours and dense and limits >= {"ours", "dense"} else None,
                bar=OVER_DENSE_MIN,
                how=_why_no_limit(found, limits) or "neither checkpointed",
                published=OVER_DENSE_PUBLISHED,
                dense_checkpointed=_over(found.get("dense checkpointed"), dense),
            ),
        ]
        for each in rows:
            emit("row", each)

    def _calibrate(self, response: int) -> tuple[int, int]:
        """Returns free bytes with parameters and gradients resident, and the arithmetic limit."""
        prompt = 4 * self.geometry.k
        self.pair.query("ours", "take", prompt=prompt, response=response, responses=RESPONSES)
        room = self.pair.query("ours", "room")["free_bytes"]
        self.pair.query("ours", "run", microbatch_tokens=response)
        reply = self.pair.query("ours", "run", microbatch_tokens=response, peaks=True)
        if "phases" not in reply:
            raise WorkerError(f"a prompt of {prompt} tokens: {reply['out_of_memory']}")
        prefix = reply["prefix"]
        # Accumulators are FP32 and tensors BF16: two more times the boundary's bytes.
        dormant, boundary = prefix["dormant_bytes"] / prompt, 3 * prefix["boundary_bytes"] / prompt
        microbatch = max(0.0, reply["phases"]["B"]["driver_median"] - boundary * prompt)
        share = WINDOW_LAYERS / self.geometry.layers
        could = arithmetic.capacity_tokens(room, self.tiers, microbatch, dormant, boundary, share)
        known = {"room": room, "tiers": self.tiers, "microbatch": microbatch, "could": could}
        emit("detail", known | {"dormant_per_token": dormant, "boundary_per_token": boundary})
        return room, could

    def _dense_guess(self, room: int, response: int) -> int:
        g = self.geometry
        saved = arithmetic.saved_bytes_per_token(g) * g.layers
        return int((room - arithmetic.logits_bytes(g, response)) / saved) - response

    def _longest(
        self, side: str, checkpointed: bool, response: int, guess: int
    ) -> tuple[int, str | None, bool]:
        """Returns the longest prompt that trains, the reason that a longer one does not, if known,
        and whether the search ended by it and it is out of memory."""
        self._alone(side)
        end: str | None = None
        without_memory = set()

        def fits(prompt: int) -> bool:
            nonlocal end
            if not self._has_time(side, prompt, response):
                raise Stopped
            try:
                reply = self._trial(side, checkpointed, prompt, response)
                again = side == "ours" and "seconds" not in reply
                if again and self._has_time(side, prompt, response):
                    # The pinned pool fills its cap in the step after one that it refused.
                    reply = self._trial(side, checkpointed, prompt, response)
            except WorkerError as error:
                end = str(error)
                if not self.pair.died(side):
                    # Errors other than out of memory are no information about lengths.
                    raise Stopped from error
                self.pair.end(side)
                return False
            if "seconds" in reply:
                flops = self._flops(side, prompt, response)
                self.budget.learn(side, "eager", flops, reply["seconds"])
                return True
            end = f"a prompt of {prompt}: {reply['out_of_memory']}"
            without_memory.add(prompt)
            emit("detail", {"side": side, "prompt": prompt, "report": reply["report"]})
            return False

        step = max(1, int(guess * STEP_SHARE))
        longest, shortest = search(fits, max(guess, step), step)
        self.pair.end(side)
        is_limit = shortest in without_memory and shortest - longest <= step
        return longest, end, is_limit

    def _trial(self, side: str, checkpointed: bool, prompt: int, response: int) -> dict:
        self.pair.query(side, "checkpoint", on=checkpointed)
        self.pair.query(side, "take", prompt=prompt, response=response, responses=RESPONSES)
        responses = 1 if side == "dense" else RESPONSES
        reply = self.pair.query(side, "run", responses=responses, microbatch_tokens=response)
        self.pair.query(side, "rest")
        return reply

    def _alone(self, side: str) -> None:
        for other in ("dense", "ours"):
            if other != side:
                self.pair.end(other)

    def _flops(self, side: str, prompt: int, response: int) -> float:
        responses = 1 if side == "dense" else RESPONSES
        work = arithmetic.work(self.geometry, prompt, response, responses)
        return (work.dense if side == "dense" else work.ours).total

    def _has_time(self, side: str, prompt: int, response: int) -> bool:
        # Near the limit steps are slower than predicted from the last one.
        return self.budget.left() >= 2 * self._expect(side, prompt, response)

    def _expect(self, side: str, prompt: int, response: int) -> float:
        return self.budget.expect(side, "eager", self._flops(side, prompt, response))


def _why_no_limit(found: dict, limits: set[str]) -> str | None:
    for name in ("ours", "dense"):
        if name not in found:
            return f"no figure: {name} is not searched yet"
        if name not in limits:
            return f"no figure: the search of {name} did not end by out of memory"
        if found[name] is None:
            return f"no figure: of {name} no prompt trains"
    return None


def _over(other: float | None, dense: float | None) -> float | None:
    return other / dense if other and dense else None
