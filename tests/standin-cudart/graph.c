/* Graphs: what was captured, launched again. */
#include "runtime.h"

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    return IN_CONTEXT(cuGraphGetNodes, graph, nodes, count);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *instance, cudaGraph_t graph,
                                          unsigned long long flags)
{
    return IN_CONTEXT(cuGraphInstantiateWithFlags, instance, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream)
{
    return IN_CONTEXT(cuGraphLaunch, instance, stream);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    return IN_CONTEXT(cuGraphDestroy, graph);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance)
{
    return IN_CONTEXT(cuGraphExecDestroy, instance);
}
