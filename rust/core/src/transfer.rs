//! The parts of one tensor on their way: done when all are, failed when one is.
//!
//! A transfer that is dropped before it has begun is cancelled. One that has begun goes on until
//! its last piece has ended, and holds its memory until then: it is *abandoned*, and the store
//! remembers it ([`Abandoned`]), so that its memory is counted and can be waited for.

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
    /// How many bytes of a caller's memory it holds until it has ended.
    lent_bytes: usize,
    abandoned: Arc<Abandoned>,
}

/// One request per device.
#[derive(Debug, Default)]
struct Parts(Vec<(Request, Ticket)>);

impl Transfer {
    /// A transfer without parts, which holds `lent_bytes` of a caller's memory once it has some.
    pub fn new(direction: Direction, lent_bytes: usize, abandoned: &Arc<Abandoned>) -> Self {
        Self { direction, parts: Parts::default(), lent_bytes, abandoned: Arc::clone(abandoned) }
    }

    /// Adds a part.
    pub fn push(&mut self, part: (Request, Ticket)) {
        self.parts.0.push(part);
    }

    /// Whether every part has its answer; never blocks.
    pub fn is_done(&self) -> bool {
        self.parts.is_done()
    }

    /// The answer, if every part has one: the first failure, if any.
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

    /// Cancels: `true` if no part had begun, so that the memory is free now. Of parts that had,
    /// pieces that were not sent yet never are, and the answer tells when the last has ended.
    pub fn cancel(&self) -> bool {
        let cancelled_count = self.parts.0.iter().filter(|(request, _)| request.cancel()).count();
        let is_cancelled = cancelled_count == self.parts.0.len();
        if is_cancelled && self.direction == Direction::Write {
            self.abandoned.cancelled_count.fetch_add(1, Ordering::Relaxed);
        }
        is_cancelled
    }

    /// Whether this process was forked from the one whose workers answer.
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

/// The transfers of a store that began and that nobody wants any more.
///
/// No worker comes here, only who abandons, counts or waits; and none holds the lock for longer
/// than a look at each transfer.
#[derive(Debug, Default)]
pub struct Abandoned {
    /// Those that have not ended, each with how many bytes of a caller's memory it holds.
    transfers: Mutex<Vec<(Arc<Parts>, usize)>>,
    /// The sum of those bytes when somebody looked last; hooks ask often, mostly for nothing.
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

    /// Bytes of callers' memory that are held until the last piece has ended, when somebody looked
    /// last: no fewer than now.
    pub fn lent_bytes(&self) -> usize {
        self.lent_bytes.load(Ordering::Relaxed)
    }

    /// Looks which of them have ended.
    pub fn look(&self) {
        self.under_way(None);
    }

    /// Waits at most `limit` for one to end: `false` if there is none, `None` if the time is over.
    pub fn wait_for_one(&self, limit: Duration) -> Option<bool> {
        let first = self.under_way(None);
        first.map_or(Some(false), |parts| parts.wait_for(limit).map(|_answer| true))
    }

    /// Takes one in, forgets those that have ended, and returns the oldest of the others.
    fn under_way(&self, another: Option<(Arc<Parts>, usize)>) -> Option<Arc<Parts>> {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        transfers.extend(another);
        transfers.retain(|(parts, _)| !parts.is_done());
        let sum = transfers.iter().map(|(_, lent_bytes)| lent_bytes).sum();
        self.lent_bytes.store(sum, Ordering::Relaxed);
        transfers.first().map(|(parts, _)| Arc::clone(parts))
    }
}
