// Graphs: while a stream captures, what it is given is kept, and done each time the graph is
// launched. A stream that waits for an event of the capture joins it. A graph is launched as one
// row of operations on the stream of the launch: races between its branches are not looked for.
#pragma once
#include "streams.h"

namespace fake {

struct Graph {
  uint64_t id;
  std::vector<CUstream> streams;      // that are captured into it, the first one began
  std::vector<Operation> operations = {};  // in the order in which they were given
  bool is_ended = false;
  bool is_broken = false;  // by something that a capture does not allow
};

int begin_capture(CUstream stream);
int end_capture(CUstream stream, CUgraph *graph);
// The graph that a stream is captured into; null if it is not.
std::shared_ptr<Graph> capture_of(CUstream stream);
bool is_any_capturing();
// Something was done that captures do not allow: all that are under way are lost.
int break_captures();

// With `order` held.
bool is_under_way(const std::shared_ptr<Graph> &graph);
void join_capture(CUstream stream, const std::shared_ptr<Graph> &graph);

int launch(const Graph &graph, CUstream stream);

}  // namespace fake

struct CUgraph_st {
  std::shared_ptr<fake::Graph> graph;
};
struct CUgraphExec_st {
  std::shared_ptr<fake::Graph> graph;
};
