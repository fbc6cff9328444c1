//! What an engine is, and what it is given.

use std::sync::Arc;

use crate::disk::statistics::Meter;
use crate::queue::SubmitQueue;

/// What serves a submission queue.
pub trait IoEngine: Send + Sync {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Ends after what has begun has ended; what waits is answered with `Closed`. Idempotent.
    fn close(&mut self);

    /// Stops a simulated disk before its next piece; other engines cannot be paused.
    fn pause(&self) {}

    /// Lets a paused simulated disk move; other engines have nothing to resume.
    fn resume(&self) {}
}

/// What every engine needs.
#[derive(Clone)]
pub struct Setup {
    /// Where requests come from.
    pub queue: Arc<SubmitQueue>,
    /// Where traffic is counted.
    pub meter: Arc<Meter>,
    /// Multiple of every address, offset and length.
    pub alignment: usize,
    /// Pieces in flight.
    pub depth: u32,
    /// Bytes per piece.
    pub piece_len: usize,
}
