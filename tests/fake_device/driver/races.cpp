#include "races.h"

#include <algorithm>
#include <set>
#include <utility>

#include "memory.h"
#include "shield.h"

namespace fake {

// Never destroyed: streams run until the process ends.
std::mutex &order = *new std::mutex;
Clock &host_clock = *new Clock;

namespace {

constexpr size_t races_max = 1000;

struct HostCall {
  const char *who;
  Span bytes;
  bool writes;
};

std::vector<HostCall> &host_calls = *new std::vector<HostCall>;
std::vector<std::string> &races = *new std::vector<std::string>;
std::vector<std::string> &stream_names = *new std::vector<std::string>;

bool clash(const Span &a, bool a_writes, const Span &b, bool b_writes) {
  return (a_writes || b_writes) && a.overlaps(b);
}

const char *verb(bool writes) { return writes ? " writes" : " reads"; }

// One side of a race.
struct Side {
  const char *who;
  std::string where;
  Span bytes;
  bool writes;
};

Side side_of(const Access &access) {
  return {access.who, stream_names.at(access.stream), access.bytes, access.writes};
}

void report(const Side &one, const Side &other) {
  if (races.size() >= races_max) return;
  const Span both{std::max(one.bytes.begin, other.bytes.begin),
                  std::min(one.bytes.end, other.bytes.end)};
  races.push_back(std::string(one.who) + verb(one.writes) + " bytes that " + other.who +
                  verb(other.writes) + ", and nothing orders them (" +
                  std::to_string(both.end - both.begin) + " bytes from " + place_of(both.begin) +
                  "; " + one.where + ", " + other.where + ")");
}

// Whether nobody can race with `old` any more without racing with `access` too.
bool hides(const Clock &known, const Access &access, const Access &old) {
  return (access.writes || !old.writes) && access.bytes.covers(old.bytes) && is_over(known, old);
}

}  // namespace

void join(Clock &into, const Clock &from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

bool is_over(const Clock &clock, const Access &access) {
  return size_t(access.stream) < clock.size() && clock[access.stream] >= access.number;
}

void enter_operation(const Clock &known, const std::vector<Access> &accesses) {
  std::set<std::pair<int, uint64_t>> seen;  // an operation is told once, however many its rows
  std::vector<Region *> touched;
  for (const Access &access : accesses) {
    Region *region = find_region(access.bytes.begin);
    if (!region) continue;  // memory that only the host knows, whose bytes are taken at once
    for (const HostCall &call : host_calls)
      if (clash(call.bytes, call.writes, access.bytes, access.writes))
        report(side_of(access), {call.who, "the host", call.bytes, call.writes});
    for (const Access &other : region->accesses)
      if (clash(access.bytes, access.writes, other.bytes, other.writes) &&
          !is_over(known, other) && seen.insert({other.stream, other.number}).second)
        report(side_of(access), side_of(other));
    std::erase_if(region->accesses, [&](const Access &old) {
      const bool is_own = old.stream == access.stream && old.number == access.number;
      return is_over(host_clock, old) || (!is_own && hides(known, access, old));
    });
    region->accesses.push_back(access);
    if (std::find(touched.begin(), touched.end(), region) == touched.end())
      touched.push_back(region);
  }
  for (Region *region : touched) set_shield(*region);
}

void enter_host_access(const char *who, Span bytes, bool writes) {
  Region *region = find_region(bytes.begin);
  if (!region) return;
  for (Access &other : region->accesses) {
    if (!clash(bytes, writes, other.bytes, other.writes) || is_over(host_clock, other)) continue;
    if (!other.is_told) report({who, "the host", bytes, writes}, side_of(other));
    other.is_told = true;
  }
  set_shield(*region);
}

void host_sees(const Clock &clock) {
  join(host_clock, clock);
  for (auto &[end, region] : regions) {
    if (region.place != Place::pinned || region.accesses.empty()) continue;
    if (std::erase_if(region.accesses, [](const Access &one) { return is_over(host_clock, one); }))
      set_shield(region);
  }
}

bool begin_host_call(const char *who, Span bytes, bool writes) {
  const Region *region = find_region(bytes.begin);
  if (!region || region->place != Place::pinned) return false;
  enter_host_access(who, bytes, writes);
  host_calls.push_back({who, bytes, writes});
  return true;
}

void end_host_call(uintptr_t begin) {
  const auto found = std::find_if(host_calls.begin(), host_calls.end(),
                                  [&](const HostCall &one) { return one.bytes.begin == begin; });
  if (found != host_calls.end()) host_calls.erase(found);
}

void name_stream(int number, const std::string &name) {
  if (stream_names.size() <= size_t(number)) stream_names.resize(number + 1);
  stream_names[number] = name;
}

std::vector<std::string> take_races() {
  Lock lock(order);
  return std::exchange(races, {});
}

}  // namespace fake
