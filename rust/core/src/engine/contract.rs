//! What an engine is, and what it is given.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Tuning;
use crate::disk::health::Health;
use crate::disk::statistics::Statistics;
use crate::error::Result;
use crate::queue::{Job, SubmitQueue};

/// More entries than this a ring need not have, and the kernel would refuse eight times as many.
const DEPTH_MAX: u32 = 4096;
/// A single system call moves less than 2 GiB.
const PIECE_BYTES_MAX: usize = 1 << 30;
/// Sixteen pieces of 4 MiB take so long on a disk of 0.6 GiB/s; a faster one is given all of them.
const WRITE_PATIENCE: Duration = Duration::from_millis(100);

/// What serves a submission queue.
pub trait IoEngine: Send + Sync {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Ends after what has begun has ended; what waits is answered with `Closed`. Idempotent.
    fn close(&mut self);
}

/// What every engine needs.
#[derive(Clone)]
pub struct Setup {
    /// Where requests come from.
    pub queue: Arc<SubmitQueue>,
    /// Where traffic is counted.
    pub statistics: Arc<Statistics>,
    /// Who judges by its answers whether the device may be written to.
    pub health: Arc<Health>,
    /// Multiple of every address, offset and length.
    pub alignment: usize,
    /// Pieces in flight.
    pub depth: u32,
    /// Bytes per piece.
    pub piece_len: usize,
    /// How long a piece of a write should be in flight at most.
    pub write_patience: Duration,
}

impl Setup {
    /// A queue for `queue_capacity` requests each way, and engines that work as `tuning` says.
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

    /// Ends a job that began: counts it, judges by it, and answers.
    pub fn end(&self, job: Job, answer: Result<()>) {
        let direction = job.direction();
        self.statistics.end(direction, job.memory.len() as u64, answer.is_ok());
        self.health.note(direction, &answer);
        job.finish(answer);
    }
}
