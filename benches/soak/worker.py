"""The demo's worker with commands for the library's figures and the file tier's budget."""

from __future__ import annotations

from dormouse.demo import worker


class SoakWorker(worker.Worker):
    """Commands in addition to the demo's."""

    def do_limit_file(self, nbytes: int) -> dict:
        """Limits the file tier; other sleeping bytes go to host memory."""
        self._runtime.set_budget("nvme", nbytes)
        return {}

    def do_figures(self) -> dict:
        """What the library holds now, and held at most since this was asked last."""
        stats = self._runtime.stats()
        self._runtime.reset_peaks()
        extents, pinned = stats["tiers"]["nvme"], stats["tiers"]["host"]
        return {
            "regions": sum(role["count"] for role in stats["roles"].values()),
            "extent_bytes": extents["current_bytes"],
            "pinned_bytes": pinned["current_bytes"],
            "extent_bytes_peak": extents["peak_bytes"],
            "pinned_bytes_peak": pinned["peak_bytes"],
        }


if __name__ == "__main__":
    worker.main(SoakWorker)
