//! The trait of an engine, and the setup that every engine gets.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Tuning;
use crate::disk::health::Health;
use crate::disk::statistics::Statistics;
use crate::error::Result;
use crate::queue::{Job, SubmitQueue};

/// Largest depth of a ring. The kernel refuses rings with eight times as many entries.
const DEPTH_MAX: u32 = 4096;
/// A single system call moves less than 2 GiB.
const PIECE_BYTES_MAX: usize = 1 << 30;
/// Sixteen pieces of 4 MiB take so long on a disk of 0.6 GiB/s; a faster disk gets all of them.
const WRITE_PATIENCE: Duration = Duration::from_millis(100);

/// Serves a submission queue.
pub trait IoEngine: Send + Sync {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Ends the work that has begun, and answers waiting requests with `Closed`. Idempotent.
    fn close(&mut self);
}

/// The setup of an engine.
#[derive(Clone)]
pub struct Setup {
    /// The queue that requests come from.
    pub queue: Arc<SubmitQueue>,
    /// The counts of the device's traffic.
    pub statistics: Arc<Statistics>,
    /// The judge of the device's writes, which decides whether it stays in use.
    pub health: Arc<Health>,
    /// Every address, offset and length is a multiple of this.
    pub alignment: usize,
    /// Pieces in flight.
    pub depth: u32,
    /// Bytes per piece.
    pub piece_len: usize,
    /// Longest time that a piece of a write should be in flight.
    pub write_patience: Duration,
}

impl Setup {
    /// A setup with a queue for `queue_capacity` requests in each direction.
    pub fn new(tuning: Tuning, alignment: usize, queue_capacity: usize) -> Result<Self> {
        let piece_len = tuning.piece_bytes.min(PIECE_BYTES_MAX).next_multiple_of(alignment);
        Ok(Self {
            queue: SubmitQueue::new(queue_capacity)?,
            statistics: Arc::default(),
            health: Arc::default(),
            alignment,
            depth: tuning.queue_depth.clamp(1, DEPTH_MAX),
            piece_len: piece_len.max(alignment),
            write_patience: WRITE_PATIENCE,
        })
    }

    /// Ends a job that began: counts it, notes the device's health, and answers.
    pub fn end(&self, job: Job, answer: Result<()>) {
        let direction = job.direction();
        self.statistics.end(direction, job.memory.len() as u64, answer.is_ok());
        self.health.note(direction, &answer);
        job.finish(answer);
    }
}
