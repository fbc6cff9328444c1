//! The parts of one tensor on their way: done when all are, failed when one is.
//!
//! A flight that is given up after it has begun goes on until its last piece has ended, and holds
//! its memory until then. The store remembers it ([`GivenUp`]): the memory is counted, and can be
//! waited for.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::queue::Request;
use crate::ticket::Ticket;

/// The requests that move one tensor, one per device. Dropping it gives up what has not ended.
#[derive(Debug, Default)]
pub struct Flight(Vec<(Request, Ticket)>);

impl Flight {
    /// Adds a part.
    pub fn push(&mut self, (request, ticket): (Request, Ticket)) {
        self.0.push((request, ticket));
    }

    /// Whether every part has its answer; never blocks.
    pub fn is_done(&self) -> bool {
        self.0.iter().all(|(_, ticket)| ticket.is_done())
    }

    /// The answer, if every part has one: the first failure, if any.
    pub fn answer(&self) -> Option<Result<()>> {
        self.0.iter().try_fold(Ok(()), |sum: Result<()>, (_, ticket)| {
            ticket.answer().map(|answer| sum.and(answer))
        })
    }

    /// Waits at most `limit` for the answer; `None` if it did not come.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<()>> {
        let end = Instant::now() + limit;
        self.0.iter().try_fold(Ok(()), |sum: Result<()>, (_, ticket)| {
            let left = end.saturating_duration_since(Instant::now());
            ticket.wait_for(left).map(|answer| sum.and(answer))
        })
    }

    /// Waits until the answer is there.
    pub fn wait(&self) -> Result<()> {
        let mut sum = Ok(());
        for (_, ticket) in &self.0 {
            sum = sum.and(ticket.wait());
        }
        sum
    }

    /// Gives it up: `true` if no part had begun, so that the memory is free now. Of parts that had,
    /// pieces that were not sent yet never are, and the answer tells when the last has ended.
    pub fn cancel(&self) -> bool {
        let cancelled = self.0.iter().filter(|(request, _)| request.cancel()).count();
        cancelled == self.0.len()
    }

    /// Whether this process was forked from the one whose workers answer.
    pub fn is_foreign(&self) -> bool {
        self.0.iter().any(|(_, ticket)| ticket.is_foreign())
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.is_done() && !self.is_foreign() {
            self.cancel();
        }
    }
}

/// The flights of a store that nobody wants any more.
///
/// No worker comes here, only who gives up, counts or waits; and none holds the lock for longer
/// than a look at each flight.
#[derive(Debug, Default)]
pub struct GivenUp {
    /// Those that have not ended, with the bytes of memory that each holds of a caller.
    flights: Mutex<Vec<(Arc<Flight>, usize)>>,
    /// The sum of those bytes when somebody looked last; hooks ask often, mostly for nothing.
    lent_bytes: AtomicUsize,
    never_begun_count: AtomicU64,
}

impl GivenUp {
    /// Counts a write that was cancelled before it began.
    pub fn note_never_begun(&self) {
        self.never_begun_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes that were cancelled before they began.
    pub fn never_begun_count(&self) -> u64 {
        self.never_begun_count.load(Ordering::Relaxed)
    }

    /// Remembers a flight until it has ended; it holds `lent_bytes` of memory that is not ours.
    pub fn watch(&self, flight: Flight, lent_bytes: usize) {
        self.under_way(Some((Arc::new(flight), lent_bytes)));
    }

    /// Bytes of callers' memory that are held until the last piece has ended.
    pub fn lent_bytes(&self) -> usize {
        if self.lent_bytes.load(Ordering::Relaxed) > 0 {
            self.under_way(None);
        }
        self.lent_bytes.load(Ordering::Relaxed)
    }

    /// Waits at most `limit` for one to end: `false` if there is none, `None` if the time is over.
    pub fn wait_for_one(&self, limit: Duration) -> Option<bool> {
        let first = self.under_way(None);
        first.map_or(Some(false), |flight| flight.wait_for(limit).map(|_answer| true))
    }

    /// Takes one in, forgets those that have ended, and returns the oldest of the others.
    fn under_way(&self, another: Option<(Arc<Flight>, usize)>) -> Option<Arc<Flight>> {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        flights.extend(another);
        flights.retain(|(flight, _)| !flight.is_done());
        let sum = flights.iter().map(|(_, lent_bytes)| lent_bytes).sum();
        self.lent_bytes.store(sum, Ordering::Relaxed);
        flights.first().map(|(flight, _)| Arc::clone(flight))
    }
}
