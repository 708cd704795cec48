"""``dormouse.params``: automatic values of a live runtime, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from conftest import NVME_DIR

SCRIPT = """
import json, sys, dormouse
options = json.loads(sys.argv[1])
before = dormouse.params()
with dormouse.Runtime(**options) as runtime:
    print(json.dumps([before, dormouse.params(), runtime.info()]))
"""


def seen(**options) -> list[dict]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(options)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_a_set_value_wins_and_the_others_have_reasons():
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    before, params, info = seen(nvme_dir=str(NVME_DIR), window_layers=5, host_budget_bytes=1 << 20)
    window, host = params["DORMOUSE_OFFLOAD_WINDOW_LAYERS"], params["DORMOUSE_HOST_BUDGET_BYTES"]
    assert (window["value"], window["source"], window["reason"]) == ("5", "options", "")
    assert (host["value"], host["source"]) == (str(1 << 20), "options")
    file = params["DORMOUSE_NVME_FILE_BYTES"]
    assert (file["source"], int(file["value"])) == ("automatic", info["nvme_file_bytes"])
    assert "the disk of" in file["reason"] or "ulimit" in file["reason"]
    depth = params["DORMOUSE_NVME_QUEUE_DEPTH"]
    assert "at a latency of" in depth["reason"] and 4 <= int(depth["value"]) <= 32
    assert params["DORMOUSE_OFFLOAD_IO_THREADS"]["source"] == "automatic"
    assert before["DORMOUSE_OFFLOAD_WINDOW_LAYERS"]["value"] == "3"
    assert before.keys() == params.keys()


def test_the_limit_of_the_host_tier_is_that_of_the_runtime():
    _, params, info = seen()
    host = params["DORMOUSE_HOST_BUDGET_BYTES"]
    assert int(host["value"]) == info["host_budget_bytes"]
    assert host["reason"].endswith("of memory that is available")


def test_a_host_tier_of_0_bytes_is_closed(monkeypatch):
    monkeypatch.setenv("DORMOUSE_HOST_BUDGET_BYTES", str(1 << 30))
    assert seen()[2]["host_budget_bytes"] == 1 << 30
    info = seen(host_budget_bytes=0)[2]
    assert info["host_budget_bytes"] == 0 and "host" not in info["tiers"], info
