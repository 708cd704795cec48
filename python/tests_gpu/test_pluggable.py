"""torch with an allocator of the caller's: every tensor comes from it, with its stream."""

from __future__ import annotations

import subprocess

from conftest import run_script, standin_only

ALLOCATOR = r"""
#include <dlfcn.h>
#include <stddef.h>

static struct { size_t mallocs, frees; void *stream, *freed_on; } calls;

static void *driver(const char *name)
{
    return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
}

void *counting_malloc(ptrdiff_t size, int device, void *stream)
{
    unsigned long long address = 0;
    int (*alloc)(unsigned long long *, size_t) =
        (int (*)(unsigned long long *, size_t))driver("cuMemAlloc_v2");
    calls.mallocs++;
    calls.stream = stream;
    return device == 0 && alloc(&address, (size_t)size) == 0 ? (void *)address : NULL;
}

void counting_free(void *pointer, size_t size, int device, void *stream)
{
    int (*release)(unsigned long long) = (int (*)(unsigned long long))driver("cuMemFree_v2");
    calls.frees += size != 0 && device == 0 && release((unsigned long long)pointer) == 0;
    calls.freed_on = stream;
}

size_t mallocs(void) { return calls.mallocs; }
size_t frees(void) { return calls.frees; }
void *last_stream(void) { return calls.stream; }
void *freed_on(void) { return calls.freed_on; }
"""

SCRIPT = """
import ctypes, torch
library = ctypes.CDLL(LIBRARY)
library.last_stream.restype = library.freed_on.restype = ctypes.c_void_p
torch.cuda.memory.change_current_allocator(
    torch.cuda.memory.CUDAPluggableAllocator(LIBRARY, "counting_malloc", "counting_free")
)
free_before = torch.cuda.mem_get_info()[0]
data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
first = data.cuda()
assert (library.mallocs(), library.last_stream()) == (1, None)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    second = first.clone()
assert (library.mallocs(), library.last_stream()) == (2, side.cuda_stream)
assert torch.cuda.mem_get_info()[0] == free_before - (2 << 20)
side.synchronize()
assert torch.equal(second.cpu(), data)
del second
assert (library.frees(), library.freed_on()) == (1, side.cuda_stream)
del first
assert library.frees() == 2
assert torch.cuda.mem_get_info()[0] == free_before
"""


@standin_only("the driver's memory is counted to the byte")
def test_tensors_come_from_the_allocator_with_their_stream(tmp_path):
    library = tmp_path / "libcounting.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=ALLOCATOR, text=True, check=True)
    run_script(f"LIBRARY = {str(library)!r}\n{SCRIPT}")
