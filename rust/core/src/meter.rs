//! How many bytes moved and how long the device was busy with them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the disk into memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// What moved in one direction since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of requests that ended well.
    pub bytes: u64,
    /// Requests that ended well.
    pub count: u64,
    /// Requests that failed.
    pub failed_count: u64,
    /// Nanoseconds in which at least one request was in flight.
    pub busy_ns: u64,
}

#[derive(Debug, Default)]
struct Lane {
    traffic: Traffic,
    active: u64,
    since: Option<Instant>,
}

/// Counts the traffic of one device.
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

    /// A request that began has ended: with how many bytes, or `None` if it failed.
    pub fn end(&self, direction: Direction, bytes: Option<u64>) {
        let mut lane = self.lane(direction);
        lane.active -= 1;
        if lane.active == 0
            && let Some(since) = lane.since.take()
        {
            lane.traffic.busy_ns += since.elapsed().as_nanos() as u64;
        }
        match bytes {
            Some(bytes) => {
                lane.traffic.bytes += bytes;
                lane.traffic.count += 1;
            }
            None => lane.traffic.failed_count += 1,
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

    fn lane(&self, direction: Direction) -> MutexGuard<'_, Lane> {
        let lane = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
