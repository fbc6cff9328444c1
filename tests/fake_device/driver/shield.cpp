#include "shield.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "options.h"

namespace fake {
namespace {

constexpr uintptr_t page_bytes = 4096;
enum Level { open_to_all = 0, read_only = 1, closed = 2 };

Span pages_of(const Span &bytes) {
  return {bytes.begin / page_bytes * page_bytes,
          (bytes.end + page_bytes - 1) / page_bytes * page_bytes};
}

int level_at(const std::vector<Shield> &shields, uintptr_t page) {
  int level = open_to_all;
  for (const Shield &one : shields)
    if (one.pages.begin <= page && page < one.pages.end) level = std::max(level, one.level);
  return level;
}

// Goes from one set of shields to another, and changes only the pages that differ.
void change_shields(Region &region, std::vector<Shield> wanted) {
  std::set<uintptr_t> edges;
  for (const auto *shields : {&region.shields, &wanted})
    for (const Shield &one : *shields) edges.insert({one.pages.begin, one.pages.end});
  for (auto edge = edges.begin(); edge != edges.end() && std::next(edge) != edges.end(); ++edge) {
    const int before = level_at(region.shields, *edge), level = level_at(wanted, *edge);
    if (before == level) continue;
    const int protection = level == closed      ? PROT_NONE
                           : level == read_only ? PROT_READ
                                                : PROT_READ | PROT_WRITE;
    if (mprotect((void *)*edge, *std::next(edge) - *edge, protection)) {
      perror("fake device: pinned memory was unmapped before the driver was told");
      abort();
    }
  }
  region.shields = std::move(wanted);
}

thread_local sigjmp_buf *way_out = nullptr;
struct sigaction action_before;

// What the host does there is a race, which is reported and goes on, or it is beside an operation
// on the same page. Then the page stays open until the next operation comes.
void open_for_host(Region &region, uintptr_t address, bool writes) {
  enter_host_access("the host", {address, address + 1}, writes);
  const Span page = pages_of({address, address + 1});
  if (level_at(region.shields, page.begin) < (writes ? read_only : closed)) return;
  std::vector<Shield> others;
  for (const Shield &one : region.shields) {
    if (one.pages.begin < page.begin)
      others.push_back({{one.pages.begin, std::min(one.pages.end, page.begin)}, one.level});
    if (one.pages.end > page.end)
      others.push_back({{std::max(one.pages.begin, page.end), one.pages.end}, one.level});
  }
  change_shields(region, std::move(others));
}

void on_fault(int, siginfo_t *info, void *context) {
  if (way_out) siglongjmp(*way_out, 1);
  const auto address = uintptr_t(info->si_addr);
  // The second bit of the processor's error code is set if it was going to write.
  const bool writes = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2;
  {
    Lock lock(order);
    Region *region = find_region(address);
    if (region && region->place == Place::pinned) return open_for_host(*region, address, writes);
    const char *verb = writes ? "writes to" : "reads";
    if (region)
      fprintf(stderr, "fake device: the host %s memory of a device, %s, which only copies and "
              "kernels can reach\n", verb, place_of(address).c_str());
    else if (was_freed(address))
      fprintf(stderr, "fake device: the host %s memory of a device that was freed\n", verb);
  }
  // The access is made again when this returns, and meets whoever was there before us.
  sigaction(SIGSEGV, &action_before, nullptr);
}

}  // namespace

void set_shield(Region &region) {
  if (region.place != Place::pinned || region.alias == (char *)region.bytes.begin) return;
  if (!options().is_host_watched && region.shields.empty()) return;
  std::vector<Shield> wanted;
  for (const Access &one : region.accesses)
    if (options().is_host_watched && !one.is_told && !is_over(host_clock, one))
      wanted.push_back({pages_of(one.bytes), one.writes ? closed : read_only});
  change_shields(region, std::move(wanted));
}

namespace {

// A forked child has no device that could touch the memory: there everything is open.
void before_fork() { order.lock(); }
void after_fork() { order.unlock(); }
void after_fork_in_child() {
  for (auto &[end, region] : regions) {
    region.accesses.clear();
    set_shield(region);
  }
  order.unlock();
}

}  // namespace

void catch_faults() {
  [[maybe_unused]] static const int once = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return sigaction(SIGSEGV, &action, &action_before);
  }();
}

bool run_guarded(const std::function<void()> &kernel) {
  sigjmp_buf here;
  if (sigsetjmp(here, 1)) {
    way_out = nullptr;
    return false;
  }
  way_out = &here;
  try {
    kernel();
  } catch (...) {
    way_out = nullptr;
    throw;
  }
  way_out = nullptr;
  return true;
}

}  // namespace fake
