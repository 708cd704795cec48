"""Threads, and the end of a process."""

from __future__ import annotations

import subprocess
import threading

import pytest
import torch
from conftest import random_bytes, run_script, standin_only

NOT_INITIALISED, UNLOADING = "3", "4"


def test_each_thread_gets_the_context():
    source, seen, errors = random_bytes(1 << 20), [], []

    def work():
        try:
            seen.append(source.cuda().cpu())
        except Exception as error:  # carried to the thread that judges
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(seen) == 4
    assert all(torch.equal(each, source) for each in seen)


# torch's autograd thread holds the context of whoever called backward a little longer than the call
# lasts. If it lets go after the interpreter began to end, the process aborts, on any GPU
# (pytorch#190489). So the script ends when the context is gone.
LEAVES_WORK_BEHIND = """
import contextvars, threading, time, weakref, torch
side = torch.cuda.Stream()
pinned = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
event = torch.cuda.Event()
with torch.cuda.stream(side):
    torch.cuda._sleep(200_000_000)
    device = pinned.to("cuda", non_blocking=True)
    device.record_stream(torch.cuda.default_stream())
    event.record()
threading.Thread(target=lambda: torch.ones(5, device="cuda")).start()

class Witness: pass
witness = Witness()
held = weakref.ref(witness)
variable = contextvars.ContextVar("witness")
token = variable.set(witness)
leaf = torch.ones(1000, device="cuda", requires_grad=True)
(leaf * leaf).backward(torch.ones(1000, device="cuda"))
variable.reset(token)
del witness, token
while held() is not None:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(0)", "del device, pinned, event"])
def test_a_process_ends_quietly_with_work_under_way(ending):
    run_script(LEAVES_WORK_BEHIND + ending)


def test_a_process_that_only_asked_ends_quietly():
    run_script("import torch; assert torch.cuda.is_available()")


@standin_only("the runtime's calls are looked up in the whole process")
def test_a_forked_child_is_refused():
    said = run_script(
        """
import ctypes, os, torch, warnings
# Python 3.12 warns of every fork with threads.
warnings.simplefilter("ignore", DeprecationWarning)
torch.cuda.init()
runtime = ctypes.CDLL(None)
child = os.fork()
if child == 0:
    os._exit(runtime.cudaFree(None))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), runtime.cudaFree(None))
"""
    )
    assert said.split() == [NOT_INITIALISED, "0"]


LATE_CALLER = r"""
#include <stdio.h>
#include <stdlib.h>

int cudaFree(void *);

static void call(void)
{
    printf("%d", cudaFree(NULL));
}

__attribute__((constructor)) static void wait_for_the_end(void)
{
    atexit(call);
}
"""


@standin_only("the runtime's calls are looked up in the whole process")
def test_after_the_end_began_the_runtime_refuses(tmp_path):
    library = tmp_path / "liblate.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=LATE_CALLER, text=True, check=True)
    said = run_script(
        f"""
import ctypes
ctypes.CDLL({str(library)!r})  # its handler is the older one, and runs after the runtime's
assert ctypes.CDLL(None).cudaFree(None) == 0
"""
    )
    assert said == UNLOADING
