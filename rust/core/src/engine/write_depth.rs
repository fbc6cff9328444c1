//! The limit of writes in flight: as many pieces as the disk takes in a short time.
//!
//! Pieces in flight cannot be cancelled, and a read waits behind them. On a disk that takes 100
//! MB/s, sixteen pieces of 4 MiB are two thirds of a second in which backward would stand still. A
//! fast disk needs all of them, so the limit follows the time that pieces take. It is halved after
//! a piece that took too long, and grows by one after each fast piece while it was reached.

use std::time::{Duration, Instant};

/// A disk stays busy with one piece on its way and another waiting there.
const LEAST: usize = 2;

/// The limit, and the number of pieces that count towards it.
pub struct WriteDepth {
    most: usize,
    limit: usize,
    in_flight: usize,
    /// A piece that takes longer than this waited behind too many others.
    patience: Duration,
    /// Time of the last cut. Pieces that were sent before it say nothing about the new limit.
    cut_at: Option<Instant>,
}

impl WriteDepth {
    /// Begins with `most` pieces, the depth of the queue.
    pub fn new(most: usize, patience: Duration) -> Self {
        Self { most, limit: most, in_flight: 0, patience, cut_at: None }
    }

    /// Returns true if another piece may be sent. If not, a piece is in flight, and its end is to
    /// come.
    pub fn may_send(&self) -> bool {
        self.in_flight < self.limit
    }

    /// Counts a piece that is sent.
    pub fn sent(&mut self) {
        self.in_flight += 1;
    }

    /// Counts a piece that was sent at `sent_at` and has ended at `now`, and adjusts the limit.
    pub fn ended(&mut self, sent_at: Instant, now: Instant) {
        let was_full = self.in_flight >= self.limit;
        self.in_flight -= 1;
        let took = now.duration_since(sent_at);
        if took > self.patience {
            if self.cut_at.is_none_or(|cut_at| sent_at > cut_at) {
                self.limit = (self.limit / 2).max(LEAST.min(self.most));
                self.cut_at = Some(now);
            }
        } else if was_full && took < self.patience / 2 {
            self.limit = (self.limit + 1).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::WriteDepth;

    const PATIENCE: Duration = Duration::from_millis(100);

    /// A disk that serves pieces one after the other, each in `piece`. The pieces are sent as soon
    /// as the limit allows; returns the time in flight of the last of `count` pieces.
    fn last_took(depth: &mut WriteDepth, start: Instant, piece: Duration, count: u32) -> Duration {
        let mut sent = std::collections::VecDeque::new();
        let (mut now, mut took, mut left) = (start, Duration::ZERO, count);
        while left > 0 || !sent.is_empty() {
            while left > 0 && depth.may_send() {
                depth.sent();
                sent.push_back(now);
                left -= 1;
            }
            now += piece;
            let sent_at = sent.pop_front().expect("the limit lets at least one piece be sent");
            took = now - sent_at;
            depth.ended(sent_at, now);
        }
        took
    }

    #[test]
    fn a_fast_disk_keeps_the_whole_depth() {
        let mut depth = WriteDepth::new(16, PATIENCE);
        last_took(&mut depth, Instant::now(), Duration::from_millis(2), 200);
        assert_eq!(depth.limit, 16);
    }

    #[test]
    fn a_slow_disk_is_given_what_it_takes_in_the_time_of_patience() {
        let mut depth = WriteDepth::new(16, PATIENCE);
        let took = last_took(&mut depth, Instant::now(), Duration::from_millis(32), 200);
        assert!(took <= PATIENCE, "{took:?} with {} pieces", depth.limit);
        assert!(depth.limit >= 2, "a disk is never left idle");
    }

    #[test]
    fn one_slow_moment_halves_the_limit_once_and_it_comes_back() {
        let mut depth = WriteDepth::new(16, PATIENCE);
        let start = Instant::now();
        (0..16).for_each(|_| depth.sent());
        (0..16).for_each(|_| depth.ended(start, start + 2 * PATIENCE));
        assert_eq!(depth.limit, 8);
        last_took(&mut depth, start + 3 * PATIENCE, Duration::from_millis(2), 200);
        assert_eq!(depth.limit, 16);
    }

    #[test]
    fn a_queue_of_one_piece_stays_one() {
        let mut depth = WriteDepth::new(1, Duration::ZERO);
        last_took(&mut depth, Instant::now(), Duration::from_millis(1), 5);
        assert_eq!(depth.limit, 1);
    }
}
