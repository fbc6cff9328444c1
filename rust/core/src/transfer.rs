//! The parts of one tensor on their way. A transfer is done when all parts are, and fails if one
//! part fails.
//!
//! A transfer that is dropped before it has begun is cancelled. If it has begun, it goes on until
//! its last piece has ended, and holds its memory until then. It is *abandoned*: the store keeps it
//! in [`Abandoned`], counts its memory and can wait for it.

use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::direction::Direction;
use crate::error::Result;
use crate::queue::Request;
use crate::ticket::Ticket;

/// The requests that move one tensor.
#[derive(Debug)]
pub struct Transfer {
    direction: Direction,
    parts: Parts,
    /// Bytes of a caller's memory that it holds until it has ended.
    lent_bytes: usize,
    abandoned: Arc<Abandoned>,
}

/// One request per device.
#[derive(Debug, Default)]
struct Parts(Vec<(Request, Ticket)>);

impl Transfer {
    /// A transfer without parts. Once it has parts, it holds `lent_bytes` of a caller's memory.
    pub fn new(direction: Direction, lent_bytes: usize, abandoned: &Arc<Abandoned>) -> Self {
        Self { direction, parts: Parts::default(), lent_bytes, abandoned: Arc::clone(abandoned) }
    }

    /// Adds a part.
    pub fn push(&mut self, part: (Request, Ticket)) {
        self.parts.0.push(part);
    }

    /// Returns true if every part has its answer; never blocks.
    pub fn is_done(&self) -> bool {
        self.parts.is_done()
    }

    /// The first failure, or `Ok` if there is none; `None` while a part has no answer.
    pub fn answer(&self) -> Option<Result<()>> {
        self.parts.0.iter().try_fold(Ok(()), |sum: Result<()>, (_, ticket)| {
            ticket.answer().map(|answer| sum.and(answer))
        })
    }

    /// Waits at most `limit` for the answer; `None` if it did not come.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<()>> {
        self.parts.wait_for(limit)
    }

    /// Waits until the answer is there.
    pub fn wait(&self) -> Result<()> {
        let mut sum = Ok(());
        for (_, ticket) in &self.parts.0 {
            sum = sum.and(ticket.wait());
        }
        sum
    }

    /// Cancels. Returns true if no part had begun, so that the memory is free now. Parts that had
    /// begun send no further pieces, and the answer comes after their last piece has ended.
    pub fn cancel(&self) -> bool {
        let cancelled_count = self.parts.0.iter().filter(|(request, _)| request.cancel()).count();
        let is_cancelled = cancelled_count == self.parts.0.len();
        if is_cancelled && self.direction == Direction::Write {
            self.abandoned.cancelled_count.fetch_add(1, Ordering::Relaxed);
        }
        is_cancelled
    }

    /// Returns true if this process was forked from the process whose workers answer.
    fn is_forked(&self) -> bool {
        self.parts.0.iter().any(|(_, ticket)| ticket.is_forked())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.is_done() && !self.is_forked() && !self.cancel() {
            self.abandoned.watch(mem::take(&mut self.parts), self.lent_bytes);
        }
    }
}

impl Parts {
    fn is_done(&self) -> bool {
        self.0.iter().all(|(_, ticket)| ticket.is_done())
    }

    fn wait_for(&self, limit: Duration) -> Option<Result<()>> {
        let end = Instant::now() + limit;
        self.0.iter().try_fold(Ok(()), |sum: Result<()>, (_, ticket)| {
            let left = end.saturating_duration_since(Instant::now());
            ticket.wait_for(left).map(|answer| sum.and(answer))
        })
    }
}

/// The transfers of a store that were dropped after they had begun.
///
/// No worker takes the lock, only threads that drop, count or wait. They hold it for a look at each
/// transfer, not longer.
#[derive(Debug, Default)]
pub struct Abandoned {
    /// Transfers that have not ended, each with the bytes of a caller's memory that it holds.
    transfers: Mutex<Vec<(Arc<Parts>, usize)>>,
    /// The sum of those bytes at the last look. Hooks read it often, and it is mostly zero.
    lent_bytes: AtomicUsize,
    cancelled_count: AtomicU64,
}

impl Abandoned {
    /// Writes that were cancelled before they began.
    pub fn cancelled_count(&self) -> u64 {
        self.cancelled_count.load(Ordering::Relaxed)
    }

    fn watch(&self, parts: Parts, lent_bytes: usize) {
        self.under_way(Some((Arc::new(parts), lent_bytes)));
    }

    /// Bytes of callers' memory that abandoned transfers held at the last look. Now they hold at
    /// most as much.
    pub fn lent_bytes(&self) -> usize {
        self.lent_bytes.load(Ordering::Relaxed)
    }

    /// Forgets the transfers that have ended.
    pub fn look(&self) {
        self.under_way(None);
    }

    /// Waits at most `limit` for the oldest to end. Returns `false` if there is none, `None` if the
    /// time is over.
    pub fn wait_for_one(&self, limit: Duration) -> Option<bool> {
        let first = self.under_way(None);
        first.map_or(Some(false), |parts| parts.wait_for(limit).map(|_answer| true))
    }

    /// Adds a transfer, forgets those that have ended, and returns the oldest of the others.
    fn under_way(&self, another: Option<(Arc<Parts>, usize)>) -> Option<Arc<Parts>> {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        transfers.extend(another);
        transfers.retain(|(parts, _)| !parts.is_done());
        let sum = transfers.iter().map(|(_, lent_bytes)| lent_bytes).sum();
        self.lent_bytes.store(sum, Ordering::Relaxed);
        transfers.first().map(|(parts, _)| Arc::clone(parts))
    }
}
