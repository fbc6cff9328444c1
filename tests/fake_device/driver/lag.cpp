#include "lag.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "options.h"

namespace fake {
namespace {

using Lock = std::lock_guard<std::mutex>;

std::mutex &mutex = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;
std::map<std::string, long> &kind_lags = *new std::map<std::string, long>;
std::set<std::string> &held_kinds = *new std::set<std::string>;
std::set<int> &held_streams = *new std::set<int>;
std::map<int, std::mt19937> &dice = *new std::map<int, std::mt19937>;  // one for each stream
long seed = 1;

bool is_held(const char *kind, int stream) {
  return held_kinds.count(kind) || held_streams.count(stream);
}

}  // namespace

Options &options() {
  static Options &all = *[] {
    auto *made = new Options;
    if (const char *count = getenv("SSDTRAIN_FAKE_DEVICES")) made->device_count = atoi(count);
    return made;
  }();
  return all;
}

void set_lag(const std::string &kind, long us_max) {
  Lock lock(mutex);
  kind_lags[kind] = us_max;
}
void set_lag_seed(long number) {
  Lock lock(mutex);
  seed = number;
  dice.clear();
}

void hold(const std::string &kind) {
  Lock lock(mutex);
  held_kinds.insert(kind);
}
void hold_stream(int stream) {
  Lock lock(mutex);
  held_streams.insert(stream);
}
void release(const std::string &kind) {
  Lock lock(mutex);
  held_kinds.erase(kind);
  changed.notify_all();
}
void release_stream(int stream) {
  Lock lock(mutex);
  held_streams.erase(stream);
  changed.notify_all();
}
void release_all() {
  Lock lock(mutex);
  held_kinds.clear();
  held_streams.clear();
  changed.notify_all();
}

void wait_for_turn(const char *kind, int stream) {
  long lag_us = 0;
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !is_held(kind, stream); });
    const long longest = kind_lags[kind];
    if (longest <= 0) return;
    const auto [one, is_new] = dice.try_emplace(stream);
    if (is_new) one->second.seed(unsigned(seed * 7919 + stream));
    lag_us = std::uniform_int_distribution<long>(0, longest)(one->second);
  }
  usleep(useconds_t(lag_us));
}

std::string held_words() {
  Lock lock(mutex);
  std::string words;
  for (const auto &kind : held_kinds) words += (words.empty() ? "" : ", ") + kind;
  for (int stream : held_streams)
    words += (words.empty() ? "" : ", ") + std::string("stream ") + std::to_string(stream);
  return words;
}

}  // namespace fake
