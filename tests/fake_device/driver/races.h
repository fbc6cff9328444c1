// What is known to be over before what, and the pairs of accesses of which nobody knows it.
//
// A clock says how much of each stream is over: entry i is a number of operations of stream i. Each
// stream has one, each recorded event has the one of its stream, and the host has one for what its
// waits and queries have seen. A wait joins one clock into another. Two operations that touch the
// same bytes, one of them writing, are a race if neither lies within the clock under which the
// other was enqueued, whether or not they met this time.
//
// All threads of the host count as one: what one of them has seen, all have. So a mistake between
// threads of the host may go unseen, and nothing that was in order is reported.
#pragma once
#include <stdint.h>

#include <mutex>
#include <string>
#include <vector>

namespace fake {

// Guards clocks, regions of memory and accesses. Taken before the mutex of a stream or an event.
extern std::mutex &order;
using Lock = std::lock_guard<std::mutex>;

using Clock = std::vector<uint64_t>;
void join(Clock &into, const Clock &from);

struct Span {
  uintptr_t begin, end;
  bool overlaps(const Span &other) const { return begin < other.end && other.begin < end; }
  bool covers(const Span &other) const { return begin <= other.begin && other.end <= end; }
};

struct Access {
  Span bytes;
  bool writes;
  const char *who = "";
  int stream = 0;  // which operation this belongs to: the stream's number, and its count there
  uint64_t number = 0;
  bool is_told = false;  // the host ran into it, and that was reported
};

bool is_over(const Clock &clock, const Access &access);

// What the host has seen to be over. With `order` held.
extern Clock &host_clock;

// Compares the accesses of one new operation with all that may still go on, and keeps them. `known`
// is what is over when it begins. With `order` held.
void enter_operation(const Clock &known, const std::vector<Access> &accesses);

// The host touches bytes now: reports the operations on them that the host has not seen to be
// over, each once. With `order` held.
void enter_host_access(const char *who, Span bytes, bool writes);

// The host sees that all of this is over. With `order` held.
void host_sees(const Clock &clock);

// A system call of the host works on bytes from now until its end, if they are pinned: else this
// returns false. With `order` held.
bool begin_host_call(const char *who, Span bytes, bool writes);
void end_host_call(uintptr_t begin);

// How reports name a stream. With `order` held.
void name_stream(int number, const std::string &name);

// The races since the last call, in words, in the order in which they were found.
std::vector<std::string> take_races();

}  // namespace fake
