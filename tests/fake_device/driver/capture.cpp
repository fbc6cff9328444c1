#include "capture.h"

#include "calls.h"

namespace fake {
namespace {

// Captures under way. With `order` held.
std::vector<std::shared_ptr<Graph>> &under_way = *new std::vector<std::shared_ptr<Graph>>;
uint64_t last_id = 0;

}  // namespace

int begin_capture(CUstream stream) {
  Lock lock(order);
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  under_way.push_back(std::make_shared<Graph>(Graph{++last_id, {}}));
  join_capture(stream, under_way.back());
  return CUDA_SUCCESS;
}

int end_capture(CUstream stream, CUgraph *graph) {
  *graph = nullptr;
  Lock lock(order);
  const auto captured = stream->capture;
  if (!captured) return CUDA_ERROR_ILLEGAL_STATE;
  if (captured->streams.front() != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  for (CUstream one : captured->streams) one->capture = nullptr;
  std::erase(under_way, captured);
  captured->is_ended = true;
  if (captured->is_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  *graph = new CUgraph_st{captured};
  return CUDA_SUCCESS;
}

std::shared_ptr<Graph> capture_of(CUstream stream) {
  Lock lock(order);
  return stream->capture;
}

bool is_any_capturing() {
  Lock lock(order);
  return !under_way.empty();
}

int break_captures() {
  Lock lock(order);
  for (const auto &graph : under_way) graph->is_broken = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

bool is_under_way(const std::shared_ptr<Graph> &graph) { return graph && !graph->is_ended; }

void join_capture(CUstream stream, const std::shared_ptr<Graph> &graph) {
  if (stream->capture == graph) return;
  stream->capture = graph;
  graph->streams.push_back(stream);
}

int launch(const Graph &graph, CUstream stream) {
  for (const Operation &operation : graph.operations) enqueue(stream, operation);
  return CUDA_SUCCESS;
}

}  // namespace fake
