/* Streams, events and what asks whether a stream is being captured. */
#include "runtime.h"

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    return IN_CONTEXT(cuStreamCreateWithPriority, stream, flags, priority);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return IN_CONTEXT(cuStreamDestroy_v2, stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return IN_CONTEXT(cuStreamQuery, stream);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return IN_CONTEXT(cuStreamSynchronize, stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    return IN_CONTEXT(cuStreamGetPriority, stream, priority);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    return IN_CONTEXT(cuStreamWaitEvent, stream, event, flags);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    return IN_CONTEXT(cuLaunchHostFunc, stream, function, data);
}

/* The numbers of cudaStreamCaptureStatus are those of CUstreamCaptureStatus. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    return IN_CONTEXT(cuStreamIsCapturing, stream, (CUstreamCaptureStatus *)status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *dependency_count)
{
    /* The driver's call without edge data: its graphs have no edges to tell of. */
    if (edges != NULL) {
        *edges = NULL;
    }
    return IN_CONTEXT(cuStreamGetCaptureInfo_v2, stream, (CUstreamCaptureStatus *)status,
                      (cuuint64_t *)id, graph, dependencies, dependency_count);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return IN_CONTEXT(cuStreamBeginCapture_v2, stream, (CUstreamCaptureMode)mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    return IN_CONTEXT(cuStreamEndCapture, stream, graph);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return IN_CONTEXT(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)mode);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    return IN_CONTEXT(cuEventCreate, event, flags);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return IN_CONTEXT(cuEventDestroy_v2, event);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    return IN_CONTEXT(cuEventRecordWithFlags, event, stream, flags);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return IN_CONTEXT(cuEventQuery, event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return IN_CONTEXT(cuEventSynchronize, event);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    return IN_CONTEXT(cuEventElapsedTime, ms, start, end);
}
