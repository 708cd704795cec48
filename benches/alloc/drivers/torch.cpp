/* PyTorch's own caching allocator, from the libraries of the wheel, on the stand-in runtime and
 * driver. PYTORCH_ALLOC_CONF says which of its two ways. */
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <c10/util/Exception.h>

#include "device.h"
#include "workload.h"

namespace allocator = c10::cuda::CUDACachingAllocator;

void Contender::start(unsigned streams)
{
    device_start(streams);
    /* Expandable segments ask who may see whose memory; torch's Python part prepares the answer. */
    c10::cuda::detail::init_p2p_access_cache(1);
    allocator::get()->init(1);
}

void Contender::start_thread()
{
    device_start_thread();
}

void *Contender::allocate(size_t bytes, unsigned stream)
{
    try {
        return allocator::raw_alloc_with_stream(bytes, (cudaStream_t)device.streams[stream]);
    } catch (const c10::OutOfMemoryError &) {
        return nullptr;
    }
}

void Contender::release(void *block, size_t, unsigned)
{
    allocator::raw_delete(block);
}

void Contender::use(unsigned stream)
{
    device_use(stream);
}

void Contender::launch(unsigned stream)
{
    device_launch(stream);
}

void Contender::enter_scope(unsigned)
{
}

void Contender::end_scopes()
{
}

void Contender::mark()
{
    device_mark();
}

void Contender::report()
{
    auto stats = allocator::getDeviceStats(0);
    printf(", \"own_reserved_bytes\": %ld", stats.reserved_bytes[0].peak);
    device_report();
}
