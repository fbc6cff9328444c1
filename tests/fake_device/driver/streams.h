// Streams, each with a thread that does one operation after the other, and events.
#pragma once
#include <cuda.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>

#include "races.h"

namespace fake {

// Something that a stream does in its turn: returns a code of CUDA, and one that is not 0 lasts.
struct Operation {
  std::function<int()> run;
  std::vector<Access> accesses = {};
  // Waits and records go on after an error, so that nothing hangs on them.
  bool is_marker = false;
};

struct Graph;

}  // namespace fake

struct CUstream_st {
  int number, device;
  unsigned flags;
  int priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<fake::Operation> queue;
  uint64_t entered = 0, done = 0;
  bool stops = false;
  fake::Clock clock;  // what is over when the next operation begins; with `order` held
  std::shared_ptr<fake::Graph> capture;  // where operations go instead; with `order` held
};

namespace fake {

// One recording of an event: whoever waits, waits for the recording that was there when the wait
// began, whatever the event is recorded on later.
struct Recording {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  double at_ms = 0;
  Clock clock;                     // with `order` held
  std::shared_ptr<Graph> capture;  // the graph whose making it is part of
};

}  // namespace fake

struct CUevent_st {
  std::shared_ptr<fake::Recording> last;  // null before the first; with `order` held
  int device;
};

namespace fake {

CUstream make_stream(int device, unsigned flags, int priority);
// The stream that a handle means, with the default stream of the current device for its names; null
// for one that was destroyed, or never was.
CUstream resolve(CUstream stream);
int destroy(CUstream stream);

// Gives a stream something to do. In a capture it is kept for the graph.
int enqueue(CUstream stream, Operation operation);

// Calls a function of the host in the stream's turn; it has seen all that went before.
int call_host(CUstream stream, std::function<void()> function);

int synchronize(CUstream stream);
int synchronize_device(int device);
int query(CUstream stream);

CUevent make_event(int device);
bool is_event(CUevent event);
int destroy(CUevent event);
int record(CUevent event, CUstream stream);
int wait_for(CUevent event, CUstream stream);
int synchronize(CUevent event);
int query(CUevent event);
int elapsed(float *ms, CUevent from, CUevent to);

// What every stream does is done when this returns; the threads end. For the end of the process.
void stop_all_streams();

}  // namespace fake
