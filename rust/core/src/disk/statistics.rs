//! How many bytes moved and how long the device was busy with them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::direction::Direction;
use crate::error::{Error, ErrorKind, Result};

/// What moved in one direction since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of requests that ended well.
    pub bytes: u64,
    /// Requests that ended well.
    pub count: u64,
    /// Requests that failed.
    pub failed_count: u64,
    /// Reads or writes asked of the kernel: fewer than requests where small ones were joined.
    pub operation_count: u64,
    /// Nanoseconds in which at least one request was in flight.
    pub busy_ns: u64,
}

impl Traffic {
    /// The sum of two.
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

#[derive(Debug, Default)]
struct Lane {
    traffic: Traffic,
    active: u64,
    since: Option<Instant>,
    /// Bytes and busy time of late: both are halved now and then, so that the past fades.
    recent_bytes: u64,
    recent_ns: u64,
    failed_in_a_row: u32,
    /// Why the last request failed.
    failure: Option<Error>,
    /// So many writes more pass a device by that had no space.
    pass_by_count: u32,
}

/// A rate is that of about so many bytes of late.
const RECENT_BYTES: u64 = 256 << 20;
/// Less than this says nothing about a rate.
const RATE_BYTES_MIN: u64 = 16 << 20;
/// After so many failed requests without one that ended well, a device is not trusted.
const FAILED_IN_A_ROW_MAX: u32 = 5;
/// After it had no space, a device is tried again once so many writes went elsewhere.
const PASS_BY_COUNT: u32 = 64;

/// Counts the traffic of one device, and judges it by that.
#[derive(Debug, Default)]
pub struct Meter {
    read: Mutex<Lane>,
    write: Mutex<Lane>,
}

impl Meter {
    /// A request begins.
    pub fn begin(&self, direction: Direction) {
        let mut lane = self.lane(direction);
        lane.active += 1;
        if lane.active == 1 {
            lane.since = Some(Instant::now());
        }
    }

    /// The kernel is asked for one read or write.
    pub fn operation(&self, direction: Direction) {
        self.lane(direction).traffic.operation_count += 1;
    }

    /// A request of `bytes` that began has ended.
    pub fn end(&self, direction: Direction, bytes: u64, answer: &Result<()>) {
        let mut lane = self.lane(direction);
        lane.active -= 1;
        if lane.active == 0
            && let Some(since) = lane.since.take()
        {
            let busy_ns = since.elapsed().as_nanos() as u64;
            lane.traffic.busy_ns += busy_ns;
            lane.recent_ns += busy_ns;
            if lane.recent_bytes > RECENT_BYTES {
                lane.recent_bytes /= 2;
                lane.recent_ns /= 2;
            }
        }
        match answer {
            Ok(()) => {
                lane.traffic.bytes += bytes;
                lane.traffic.count += 1;
                lane.recent_bytes += bytes;
                lane.failed_in_a_row = 0;
                lane.pass_by_count = 0;
            }
            Err(error) => {
                lane.traffic.failed_count += 1;
                match error.kind() {
                    // Somebody's wish, not the device's fault.
                    ErrorKind::Cancelled | ErrorKind::Closed => {}
                    ErrorKind::NoSpace => lane.pass_by_count = PASS_BY_COUNT,
                    _ => {
                        // What ended the trust stays the reason, whatever else was in flight.
                        if lane.failed_in_a_row < FAILED_IN_A_ROW_MAX {
                            lane.failure = Some(error.clone());
                        }
                        lane.failed_in_a_row = lane.failed_in_a_row.saturating_add(1);
                    }
                }
            }
        }
    }

    /// The traffic so far; requests in flight count their time, not their bytes.
    pub fn traffic(&self, direction: Direction) -> Traffic {
        let lane = self.lane(direction);
        let mut traffic = lane.traffic;
        if let Some(since) = lane.since {
            traffic.busy_ns += since.elapsed().as_nanos() as u64;
        }
        traffic
    }

    /// Nanoseconds a byte took of late, both ways; `None` before enough has moved.
    pub fn ns_per_byte(&self) -> Option<f64> {
        let of = |direction| {
            let lane = self.lane(direction);
            let under_way_ns = lane.since.map_or(0, |since| since.elapsed().as_nanos() as u64);
            (lane.recent_bytes >= RATE_BYTES_MIN)
                .then(|| (lane.recent_ns + under_way_ns) as f64 / lane.recent_bytes as f64)
        };
        // What is written is read once: a device slow at either is slow.
        Some(of(Direction::Write)? + of(Direction::Read).unwrap_or(0.0))
    }

    /// Why the device is not to be written to any more, if so.
    pub fn distrust(&self) -> Option<Error> {
        let lane = self.lane(Direction::Write);
        if lane.failed_in_a_row < FAILED_IN_A_ROW_MAX {
            return None;
        }
        lane.failure.clone()
    }

    /// Whether the next write shall pass the device by, because it had no space.
    pub fn passes_by(&self) -> bool {
        let mut lane = self.lane(Direction::Write);
        let passes = lane.pass_by_count > 0;
        lane.pass_by_count = lane.pass_by_count.saturating_sub(1);
        passes
    }

    fn lane(&self, direction: Direction) -> MutexGuard<'_, Lane> {
        let lane = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Direction, FAILED_IN_A_ROW_MAX, Meter};
    use crate::error::{Error, ErrorKind};

    #[test]
    fn what_ended_the_trust_stays_the_reason() {
        let meter = Meter::default();
        let fail = |number: u32| {
            meter.begin(Direction::Write);
            let error = Error::new(ErrorKind::Io, format!("failure {number}"));
            meter.end(Direction::Write, 1, &Err(error));
        };
        (1..FAILED_IN_A_ROW_MAX).for_each(fail);
        assert!(meter.distrust().is_none());
        // Others were in flight when the trust ended; they fail later, each with its own words.
        (FAILED_IN_A_ROW_MAX..10).for_each(fail);
        let reason = meter.distrust().expect("it is not trusted any more");
        assert_eq!(reason.to_string(), format!("failure {FAILED_IN_A_ROW_MAX}"));
    }
}
