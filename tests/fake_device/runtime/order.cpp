// The runtime's functions about streams, events and graphs.
#include "runtime.h"

using fake::note;

extern "C" {

// --- streams

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  RUNTIME_ENTER();
  return note(cuStreamCreate(stream, 0));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuStreamCreate(stream, flags));
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  RUNTIME_ENTER();
  return note(cuStreamCreateWithPriority(stream, flags, priority));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuStreamDestroy(stream));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuStreamQuery(stream));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuStreamSynchronize(stream));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  RUNTIME_ENTER();
  return note(cuStreamGetPriority(stream, priority));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  RUNTIME_ENTER();
  return note(cuLaunchHostFunc(stream, function, data));
}

// --- captures and graphs

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  RUNTIME_ENTER();
  return note(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status));
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  RUNTIME_ENTER();
  return note(cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id,
                                     graph, nodes, (const CUgraphEdgeData **)edges, count));
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  RUNTIME_ENTER();
  return note(cuStreamBeginCapture(stream, CUstreamCaptureMode(mode)));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  RUNTIME_ENTER();
  return note(cuStreamEndCapture(stream, graph));
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  RUNTIME_ENTER();
  return note(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *program, cudaGraph_t graph,
                                 unsigned long long flags) {
  RUNTIME_ENTER();
  return note(cuGraphInstantiateWithFlags(program, graph, flags));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *program, cudaGraph_t graph,
                                          unsigned long long flags) {
  RUNTIME_ENTER();
  return note(cuGraphInstantiateWithFlags(program, graph, flags));
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  RUNTIME_ENTER();
  return note(cuGraphGetNodes(graph, nodes, count));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t program, cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuGraphLaunch(program, stream));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  RUNTIME_ENTER();
  return note(cuGraphDestroy(graph));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t program) {
  RUNTIME_ENTER();
  return note(cuGraphExecDestroy(program));
}

// --- events

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  RUNTIME_ENTER();
  return note(cuEventCreate(event, 0));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuEventCreate(event, flags));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  RUNTIME_ENTER();
  return note(cuEventDestroy(event));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuEventRecord(event, stream));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuEventRecordWithFlags(event, stream, flags));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  RUNTIME_ENTER();
  return note(cuEventQuery(event));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RUNTIME_ENTER();
  return note(cuEventSynchronize(event));
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  RUNTIME_ENTER();
  return note(cuEventElapsedTime(ms, from, to));
}
}
