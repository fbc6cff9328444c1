// How late things happen: each operation waits for as long as the test makes it, at random below a
// limit, or until the test lets go.
#pragma once
#include <string>

namespace fake {

// The kinds are "kernels", "copies to the device", "copies to the host", "copies on the device" and
// "disk" (system calls of the host on pinned memory).
namespace kind {
inline constexpr const char *kernels = "kernels";
inline constexpr const char *to_device = "copies to the device";
inline constexpr const char *to_host = "copies to the host";
inline constexpr const char *on_device = "copies on the device";
inline constexpr const char *disk = "disk";
}  // namespace kind

constexpr int no_stream = -1;  // of what the host does

// Longest lag of a kind, in microseconds.
void set_lag(const std::string &kind, long us_max);
void set_lag_seed(long seed);

void hold(const std::string &kind);
void hold_stream(int stream);
void release(const std::string &kind);
void release_stream(int stream);
void release_all();

// Returns when an operation of this kind may go on.
void wait_for_turn(const char *kind, int stream);

// What stands still, in words; "" if nothing does.
std::string held_words();

}  // namespace fake
