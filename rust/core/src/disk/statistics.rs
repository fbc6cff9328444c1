//! The traffic of a device: bytes moved, busy time, and its recent rate.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::direction::Direction;

/// The requests of one direction since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of requests that succeeded.
    pub bytes: u64,
    /// Requests that succeeded.
    pub count: u64,
    /// Requests that failed.
    pub failed_count: u64,
    /// Reads or writes sent to the kernel: fewer than requests if small requests were joined.
    pub operation_count: u64,
    /// Nanoseconds in which at least one request was in flight.
    pub busy_ns: u64,
}

impl Traffic {
    /// The sum of this and `other`.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            count: self.count + other.count,
            failed_count: self.failed_count + other.failed_count,
            operation_count: self.operation_count + other.operation_count,
            busy_ns: self.busy_ns + other.busy_ns,
        }
    }
}

/// A rate covers at most this many recent bytes. They are a few training steps of a small model, so
/// the estimate follows a disk that slows down, and no single step turns it.
const RECENT_BYTES_MAX: u64 = 256 << 20;
/// Fewer bytes than this, in a shorter time than [`RATE_BUSY_MIN`], say nothing about a rate: a
/// drive takes a first burst into its own memory, at many times the rate it can keep up.
const RATE_BYTES_MIN: u64 = 64 << 20;
/// A disk that needs this long for fewer bytes is slow, and its rate is known all the same.
const RATE_BUSY_MIN: Duration = Duration::from_millis(500);

/// The counts of one direction.
#[derive(Debug, Default)]
struct Counts {
    traffic: Traffic,
    in_flight_count: u64,
    /// Time up to which busy time is counted; set while a request is in flight.
    counted_until: Option<Instant>,
    recent: Recent,
}

/// Recent bytes and busy time of a disk or of another link. Both are halved whenever the bytes pass
/// a limit, so the past fades.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recent {
    bytes: u64,
    busy_ns: u64,
}

impl Recent {
    /// Counts bytes that moved, and nanoseconds in which bytes moved.
    pub fn add(&mut self, bytes: u64, busy_ns: u64) {
        self.bytes += bytes;
        self.busy_ns += busy_ns;
        if self.bytes > RECENT_BYTES_MAX {
            self.bytes /= 2;
            self.busy_ns /= 2;
        }
    }

    /// Nanoseconds for each byte; `None` if too little moved to tell.
    pub fn ns_per_byte(self) -> Option<f64> {
        let is_enough =
            self.bytes >= RATE_BYTES_MIN || u128::from(self.busy_ns) >= RATE_BUSY_MIN.as_nanos();
        (is_enough && self.bytes > 0 && self.busy_ns > 0)
            .then(|| self.busy_ns as f64 / self.bytes as f64)
    }
}

impl Counts {
    /// Counts the time since the last look as busy if a request was in flight.
    fn look(&mut self, now: Instant) {
        if let Some(last) = self.counted_until {
            let busy_ns = now.saturating_duration_since(last).as_nanos() as u64;
            self.traffic.busy_ns += busy_ns;
            self.recent.add(0, busy_ns);
            self.counted_until = Some(now);
        }
    }

    fn begin(&mut self, now: Instant) {
        self.look(now);
        self.in_flight_count += 1;
        self.counted_until = Some(now);
    }

    fn end(&mut self, now: Instant, bytes: u64, is_ok: bool) {
        self.look(now);
        self.in_flight_count -= 1;
        if self.in_flight_count == 0 {
            self.counted_until = None;
        }
        if is_ok {
            self.traffic.bytes += bytes;
            self.traffic.count += 1;
            self.recent.add(bytes, 0);
        } else {
            self.traffic.failed_count += 1;
        }
    }
}

/// Counts the traffic of one device.
#[derive(Debug, Default)]
pub struct Statistics {
    read: Mutex<Counts>,
    write: Mutex<Counts>,
}

impl Statistics {
    /// Counts a request that begins.
    pub fn begin(&self, direction: Direction) {
        self.counts(direction).begin(Instant::now());
    }

    /// Counts a read or write that is sent to the kernel.
    pub fn operation(&self, direction: Direction) {
        self.counts(direction).traffic.operation_count += 1;
    }

    /// Counts a request of `bytes` that has ended.
    pub fn end(&self, direction: Direction, bytes: u64, is_ok: bool) {
        self.counts(direction).end(Instant::now(), bytes, is_ok);
    }

    /// The traffic so far; requests in flight count their time, not their bytes.
    pub fn traffic(&self, direction: Direction) -> Traffic {
        self.counted_until_now(direction).traffic
    }

    /// Recent nanoseconds of busy time for a byte; `None` before enough has moved to tell.
    pub fn ns_per_byte(&self, direction: Direction) -> Option<f64> {
        self.counted_until_now(direction).recent.ns_per_byte()
    }

    fn counted_until_now(&self, direction: Direction) -> MutexGuard<'_, Counts> {
        let mut counts = self.counts(direction);
        counts.look(Instant::now());
        counts
    }

    fn counts(&self, direction: Direction) -> MutexGuard<'_, Counts> {
        let counts = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, RATE_BUSY_MIN, RATE_BYTES_MIN, RECENT_BYTES_MAX};
    use std::time::{Duration, Instant};

    const MIB: u64 = 1 << 20;

    /// Moves `bytes` in `time`, beginning at `now`; returns the end.
    fn move_bytes(counts: &mut Counts, now: Instant, bytes: u64, time: Duration) -> Instant {
        counts.begin(now);
        counts.end(now + time, bytes, true);
        now + time
    }

    #[test]
    fn a_short_burst_says_nothing_about_a_rate() {
        let (mut counts, now) = (Counts::default(), Instant::now());
        let almost = Duration::from_millis(499);
        let now = move_bytes(&mut counts, now, RATE_BYTES_MIN - 1, almost);
        assert_eq!(counts.recent.ns_per_byte(), None);
        let mut long = Counts { recent: counts.recent, ..Counts::default() };
        move_bytes(&mut long, now, 0, Duration::from_millis(1));
        assert!(long.recent.ns_per_byte().is_some(), "a slow disk is told by the time it takes");
        move_bytes(&mut counts, now, 1, Duration::ZERO);
        assert!(counts.recent.ns_per_byte().is_some(), "so many bytes are no burst");
    }

    #[test]
    fn a_disk_that_moved_nothing_has_no_rate() {
        let (mut counts, now) = (Counts::default(), Instant::now());
        counts.begin(now);
        counts.end(now + 2 * RATE_BUSY_MIN, 1 << 30, false);
        assert_eq!(counts.recent.ns_per_byte(), None);
    }

    #[test]
    fn idle_time_is_not_busy_and_overlapping_requests_count_once() {
        let (mut counts, now) = (Counts::default(), Instant::now());
        let at = |ms| now + Duration::from_millis(ms);
        counts.begin(at(0));
        counts.begin(at(10));
        counts.end(at(20), 64 * MIB, true);
        counts.end(at(30), 64 * MIB, true);
        let end = move_bytes(&mut counts, at(1000), 128 * MIB, Duration::from_millis(30));
        counts.look(end + Duration::from_secs(1));
        assert_eq!(counts.traffic.busy_ns, 60_000_000);
        let ns_per_byte = counts.recent.ns_per_byte().unwrap();
        assert!((ns_per_byte - 60e6 / (256 * MIB) as f64).abs() < 1e-9, "{ns_per_byte}");
    }

    #[test]
    fn a_rate_follows_a_disk_that_slows_down() {
        let (mut counts, mut now) = (Counts::default(), Instant::now());
        for _ in 0..100 {
            now = move_bytes(&mut counts, now, 16 * MIB, Duration::from_millis(4));
        }
        let fast = counts.recent.ns_per_byte().unwrap();
        for _ in 0..4 * RECENT_BYTES_MAX / (16 * MIB) {
            now = move_bytes(&mut counts, now, 16 * MIB, Duration::from_millis(40));
        }
        let slow = counts.recent.ns_per_byte().unwrap();
        assert!(slow > 9.0 * fast, "{slow} after {fast}");
    }
}
