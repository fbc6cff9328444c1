// The driver's functions about streams, events and graphs.
#include "calls.h"
#include "capture.h"
#include "contexts.h"
#include "streams.h"

using namespace fake;

#define FAKE_RESOLVE(stream) \
  stream = resolve(stream);  \
  FAKE_NEED(stream, CUDA_ERROR_INVALID_HANDLE)

namespace {

CUstreamCaptureStatus status_of(const Graph *graph) {
  if (!graph) return CU_STREAM_CAPTURE_STATUS_NONE;
  return graph->is_broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

}  // namespace

extern "C" {

// --- streams

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *stream = make_stream(current_device(), flags, priority);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *stream = make_stream(current_device(), flags, 0);
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  FAKE_ENTER();
  return CUresult(destroy(stream));
}
CUresult cuStreamSynchronize(CUstream stream) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(synchronize(stream));
}
CUresult cuStreamQuery(CUstream stream) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(query(stream));
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  FAKE_NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(wait_for(event, stream));
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *context = primary_context(stream->device);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetDevice(CUstream stream, CUdevice *device) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *device = stream->device;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *flags = stream->flags;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetPriority(CUstream stream, int *priority) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *priority = stream->priority;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *id = (unsigned long long)stream->number;
  return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(call_host(stream, [=] { function(data); }));
}

// --- captures and graphs

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  *status = status_of(capture_of(stream).get());
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                CUgraph *out, const CUgraphNode **nodes,
                                const CUgraphEdgeData **edges, size_t *count) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  // State and number; who wants to build on the graph itself gets none.
  if (out) *out = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  const auto graph = capture_of(stream);
  *status = status_of(graph.get());
  if (id && graph) *id = graph->id;
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(begin_capture(stream));
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(end_capture(stream, graph));
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *) {
  FAKE_ENTER();
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *program, CUgraph graph, unsigned long long) {
  FAKE_ENTER();
  FAKE_NEED(graph, CUDA_ERROR_INVALID_VALUE);
  *program = new CUgraphExec_st{graph->graph};
  return CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  FAKE_ENTER();
  FAKE_NEED(!nodes, CUresult(refuse("cuGraphGetNodes with a place for the nodes")));
  *count = graph->graph->operations.size();
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec program, CUstream stream) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  return CUresult(launch(*program->graph, stream));
}
CUresult cuGraphDestroy(CUgraph graph) {
  FAKE_ENTER();
  delete graph;
  return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec program) {
  FAKE_ENTER();
  delete program;
  return CUDA_SUCCESS;
}

// --- events

CUresult cuEventCreate(CUevent *event, unsigned) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *event = make_event(current_device());
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
  FAKE_ENTER();
  return CUresult(destroy(event));
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  FAKE_NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(record(event, stream));
}
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  FAKE_ENTER();
  FAKE_RESOLVE(stream);
  FAKE_NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(record(event, stream));
}
CUresult cuEventQuery(CUevent event) {
  FAKE_ENTER();
  FAKE_NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(query(event));
}
CUresult cuEventSynchronize(CUevent event) {
  FAKE_ENTER();
  FAKE_NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(synchronize(event));
}
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
  FAKE_ENTER();
  FAKE_NEED(is_event(from) && is_event(to), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(elapsed(ms, from, to));
}
// The name of before CUDA 12.8, which drivers keep; the header knows the newer one only.
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
  FAKE_ENTER();
  FAKE_NEED(is_event(from) && is_event(to), CUDA_ERROR_INVALID_HANDLE);
  return CUresult(elapsed(ms, from, to));
}
}
