//! The parts of one tensor on their way: done when all are, failed when one is.

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
