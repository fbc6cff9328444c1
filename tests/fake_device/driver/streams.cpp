#include "streams.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>
#include <unordered_set>

#include "calls.h"
#include "capture.h"
#include "contexts.h"
#include "lag.h"
#include "options.h"

namespace fake {
namespace {

// With `order` held. A stream that was destroyed is kept: its thread may still be at work.
std::vector<CUstream> &all_streams = *new std::vector<CUstream>;
std::vector<std::thread> &threads = *new std::vector<std::thread>;
std::set<CUstream> &usable_streams = *new std::set<CUstream>;
std::map<int, CUstream> &default_streams = *new std::map<int, CUstream>;
std::unordered_set<CUevent> &usable_events = *new std::unordered_set<CUevent>;

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void work(CUstream stream) {
  std::unique_lock lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return stream->stops || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    if (operation.is_marker || !lasting_error())
      if (const int code = operation.run()) set_lasting_error(code, "an operation failed");
    operation = {};  // what it held goes before anybody sees that it is over
    lock.lock();
    stream->done++;
    stream->changed.notify_all();
  }
}

// With `order` held.
CUstream new_stream(int device, unsigned flags, int priority, const std::string &name) {
  auto *stream = new CUstream_st{};
  stream->number = int(all_streams.size());
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  all_streams.push_back(stream);
  usable_streams.insert(stream);
  name_stream(stream->number, name + " of device " + std::to_string(device));
  if (threads.empty()) atexit(stop_all_streams);
  threads.emplace_back(work, stream);
  return stream;
}

// The host waits, for a while: what never comes is told, and ends the process.
template <class Condition>
void host_waits(std::unique_lock<std::mutex> &lock, std::condition_variable &changed,
                Condition is_over) {
  if (is_over()) return;
  note_wait();
  if (changed.wait_for(lock, std::chrono::seconds(options().patience_s), is_over)) return;
  const std::string held = held_words();
  fprintf(stderr, "fake device: %s waited for %ld s, and the device did not get there (held by the "
          "test: %s)\n", current_symbol(), options().patience_s,
          held.empty() ? "nothing" : held.c_str());
  abort();
}

// With `order` held.
void push(CUstream stream, Operation operation) {
  {
    Lock lock(stream->mutex);
    join(stream->clock, host_clock);
    if (stream->clock.size() <= size_t(stream->number)) stream->clock.resize(stream->number + 1);
    const uint64_t number = ++stream->clock[stream->number];
    for (Access &access : operation.accesses) {
      access.stream = stream->number;
      access.number = number;
    }
    // With its own number in the clock, what one operation touches does not race with itself.
    enter_operation(stream->clock, operation.accesses);
    stream->queue.push_back(std::move(operation));
    stream->entered++;
  }
  // A thread that is woken while its lock is held sleeps again until it is free.
  stream->changed.notify_all();
}

// Waits for what the stream has been given so far. `order` is taken.
void wait_until_done(CUstream stream) {
  Clock clock;
  uint64_t target;
  {
    Lock lock(order);
    Lock inner(stream->mutex);
    clock = stream->clock;
    target = stream->entered;
  }
  {
    std::unique_lock lock(stream->mutex);
    host_waits(lock, stream->changed, [&] { return stream->done >= target; });
  }
  Lock lock(order);
  host_sees(clock);
}

}  // namespace

CUstream make_stream(int device, unsigned flags, int priority) {
  Lock lock(order);
  return new_stream(device, flags, priority, "stream " + std::to_string(all_streams.size()));
}

// The default stream is taken for one that waits for no other: a program that relies on its
// implicit order with streams that were not created as non-blocking shows a race.
CUstream resolve(CUstream stream) {
  Lock lock(order);
  if (stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD)
    return usable_streams.count(stream) ? stream : nullptr;
  const int device = current_device();
  CUstream &found = default_streams[device];
  if (!found) found = new_stream(device, 0, 0, "the default stream");
  return found;
}

int destroy(CUstream stream) {
  Lock lock(order);
  return usable_streams.erase(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

int enqueue(CUstream stream, Operation operation) {
  Lock lock(order);
  if (stream->capture) stream->capture->operations.push_back(std::move(operation));
  else push(stream, std::move(operation));
  return CUDA_SUCCESS;
}

int call_host(CUstream stream, std::function<void()> function) {
  Lock lock(order);
  join(stream->clock, host_clock);
  const auto run = [function = std::move(function), before = stream->clock] {
    {
      Lock inner(order);
      host_sees(before);
    }
    function();
    return 0;
  };
  if (stream->capture) stream->capture->operations.push_back({run});
  else push(stream, {run});
  return CUDA_SUCCESS;
}

int synchronize(CUstream stream) {
  if (capture_of(stream)) return break_captures();
  wait_until_done(stream);
  return lasting_error();
}

int synchronize_device(int device) {
  if (is_any_capturing()) return break_captures();
  std::vector<CUstream> streams;
  {
    Lock lock(order);
    streams = all_streams;
  }
  for (CUstream stream : streams)
    if (stream->device == device) wait_until_done(stream);
  return lasting_error();
}

int query(CUstream stream) {
  if (capture_of(stream)) return break_captures();
  {
    Lock lock(order);
    Lock inner(stream->mutex);
    if (stream->done < stream->entered) return CUDA_ERROR_NOT_READY;
    host_sees(stream->clock);
  }
  return lasting_error();
}

CUevent make_event(int device) {
  auto *event = new CUevent_st;
  event->device = device;
  Lock lock(order);
  usable_events.insert(event);
  return event;
}

bool is_event(CUevent event) {
  Lock lock(order);
  return usable_events.count(event);
}

int destroy(CUevent event) {
  {
    Lock lock(order);
    if (!usable_events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
  }
  delete event;
  return CUDA_SUCCESS;
}

int record(CUevent event, CUstream stream) {
  if (event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
  Lock lock(order);
  const auto recording = event->last = std::make_shared<Recording>();
  recording->capture = stream->capture;
  recording->is_done = stream->capture != nullptr;  // it runs in a graph, if at all
  if (stream->capture) return CUDA_SUCCESS;
  join(stream->clock, host_clock);
  recording->clock = stream->clock;
  const auto run = [recording] {
    Lock inner(recording->mutex);
    recording->is_done = true;
    recording->at_ms = now_ms();
    recording->changed.notify_all();
    return 0;
  };
  push(stream, {run, {}, true});
  return CUDA_SUCCESS;
}

int wait_for(CUevent event, CUstream stream) {
  Lock lock(order);
  const auto recording = event->last;
  if (!recording) return CUDA_SUCCESS;
  if (is_under_way(recording->capture)) {
    join_capture(stream, recording->capture);
    return CUDA_SUCCESS;
  }
  if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  join(stream->clock, recording->clock);
  const auto run = [recording] {
    std::unique_lock inner(recording->mutex);
    recording->changed.wait(inner, [&] { return recording->is_done; });
    return 0;
  };
  push(stream, {run, {}, true});
  return CUDA_SUCCESS;
}

int synchronize(CUevent event) {
  std::shared_ptr<Recording> recording;
  {
    Lock lock(order);
    recording = event->last;
    if (!recording) return lasting_error();
    if (is_under_way(recording->capture)) return CUDA_ERROR_CAPTURED_EVENT;
  }
  {
    std::unique_lock inner(recording->mutex);
    host_waits(inner, recording->changed, [&] { return recording->is_done; });
  }
  {
    Lock lock(order);
    host_sees(recording->clock);
  }
  return lasting_error();
}

int query(CUevent event) {
  {
    Lock lock(order);
    const auto recording = event->last;
    if (!recording) return lasting_error();
    if (is_under_way(recording->capture)) return CUDA_ERROR_CAPTURED_EVENT;
    Lock inner(recording->mutex);
    if (!recording->is_done) return CUDA_ERROR_NOT_READY;
    host_sees(recording->clock);
  }
  return lasting_error();
}

int elapsed(float *ms, CUevent from, CUevent to) {
  double times[2];
  Lock lock(order);
  for (int i = 0; i < 2; i++) {
    const auto recording = (i ? to : from)->last;
    if (!recording) return CUDA_ERROR_INVALID_HANDLE;
    Lock inner(recording->mutex);
    if (!recording->is_done) return CUDA_ERROR_NOT_READY;
    times[i] = recording->at_ms;
  }
  *ms = float(times[1] - times[0]);
  return CUDA_SUCCESS;
}

void stop_all_streams() {
  if (is_forked_child()) return;
  release_all();
  {
    Lock lock(order);
    for (CUstream stream : all_streams) {
      Lock inner(stream->mutex);
      stream->stops = true;
      stream->changed.notify_all();
    }
  }
  for (std::thread &thread : threads) thread.join();
}

}  // namespace fake
