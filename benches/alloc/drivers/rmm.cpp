/* RMM's pool over host memory, with a CUDA runtime that only counts: streams have no work, so an
 * event is complete as soon as it is recorded, and a call costs next to nothing. That is the best
 * case for RMM, which records an event at each free. */
#include <cuda_runtime_api.h>

#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <new>
#include <optional>
#include <rmm/mr/pool_memory_resource.hpp>

#include "workload.h"

/* Calls of the runtime, by what they are in the driver. */
static struct {
    size_t records, waits, synchronizations, others;
} calls;

static cudaError_t count(size_t &calls_of_it)
{
    calls_of_it++;
    return cudaSuccess;
}

/* The code of the pool is in RMM's headers, so these are what it calls. */
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t)
{
    return count(calls.records);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned)
{
    return count(calls.waits);
}

cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    return count(calls.synchronizations);
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return count(calls.synchronizations);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    static uintptr_t last;
    *event = (cudaEvent_t)++last;
    return count(calls.others);
}

cudaError_t cudaEventDestroy(cudaEvent_t)
{
    return count(calls.others);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    *id = (unsigned long long)(uintptr_t)stream;
    return cudaSuccess;
}

cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t)
{
    return "cudaSuccess";
}

const char *cudaGetErrorString(cudaError_t)
{
    return "no error";
}

/* Device memory as the other contenders' driver gives it: addresses that are numbers, at a cost. */
struct Upstream {
    struct State {
        size_t bytes, peak_bytes;
        uintptr_t next;
    };
    /* Two allocations never touch, so the pool cannot merge what a real device keeps apart. */
    static constexpr size_t ADDRESS_STEP = 2 << 20;
    static inline State state = {0, 0, 32ul << 40};

    static void pay()
    {
        static const char *const cost = getenv("STANDIN_CUDA_COST_NS");
        static const uint64_t cost_ns = cost == nullptr ? 0 : number(cost);
        calls.others++;
        for (uint64_t begin = now_ns(); cost_ns != 0 && now_ns() - begin < cost_ns;) {
        }
    }

    void *allocate_sync(size_t bytes, size_t = 256)
    {
        static const char *const total = getenv("STANDIN_CUDA_TOTAL_BYTES");
        static const size_t total_bytes = total == nullptr ? SIZE_MAX : number(total);
        pay();
        if (bytes > total_bytes - state.bytes) {
            throw std::bad_alloc();
        }
        void *block = (void *)state.next;
        state.next += (bytes + ADDRESS_STEP) / ADDRESS_STEP * ADDRESS_STEP;
        state.bytes += bytes;
        state.peak_bytes = state.bytes > state.peak_bytes ? state.bytes : state.peak_bytes;
        return block;
    }
    void deallocate_sync(void *, size_t bytes, size_t = 256) noexcept
    {
        pay();
        state.bytes -= bytes;
    }
    void *allocate(cuda::stream_ref, size_t bytes, size_t = 256) { return allocate_sync(bytes); }
    void deallocate(cuda::stream_ref, void *block, size_t bytes, size_t = 256) noexcept
    {
        deallocate_sync(block, bytes);
    }
    bool operator==(const Upstream &) const { return true; }
    friend constexpr void get_property(const Upstream &, cuda::mr::device_accessible) noexcept {}
};

static std::optional<rmm::mr::pool_memory_resource> pool;

/* What RMM aligns to by itself. */
enum { RMM_ALIGN_BYTES = 256 };

/* Streams are only compared. 1 and 2 are names of the default one. */
static cuda::stream_ref stream_of(unsigned stream)
{
    return cuda::stream_ref{(cudaStream_t)(uintptr_t)(stream == 0 ? 0 : stream + 0x1000)};
}

void Contender::start(unsigned)
{
    pool.emplace(Upstream{}, 0);
}

void Contender::start_thread()
{
}

void *Contender::allocate(size_t bytes, unsigned stream)
{
    try {
        return pool->allocate(stream_of(stream), bytes, RMM_ALIGN_BYTES);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void Contender::release(void *block, size_t bytes, unsigned stream)
{
    pool->deallocate(stream_of(stream), block, bytes, RMM_ALIGN_BYTES);
}

void Contender::use(unsigned)
{
}

void Contender::launch(unsigned)
{
}

void Contender::enter_scope(unsigned)
{
}

void Contender::end_scopes()
{
}

void Contender::mark()
{
    calls = {};
}

void Contender::report()
{
    size_t total = calls.records + calls.waits + calls.synchronizations + calls.others;
    printf(", \"peak_device_bytes\": %zu, \"calls_total\": %zu, \"calls\": {"
           "\"cuEventRecord\": %zu, \"cuStreamWaitEvent\": %zu, \"cuStreamSynchronize\": %zu}",
           Upstream::state.peak_bytes, total, calls.records, calls.waits, calls.synchronizations);
}
