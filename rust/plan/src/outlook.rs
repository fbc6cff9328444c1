//! The outlook from one instant: the times of the coming kernels, and the bytes that will not fit.

use crate::machine::Machine;
use crate::trace::Trace;
use std::ops::Range;

const NONE: usize = usize::MAX;

/// One step of coming kernels, if no moves follow beyond those decided.
#[derive(Clone, Debug)]
pub struct Outlook {
    kernel_count: usize,
    /// Living bytes beyond the capacity while each kernel of two steps runs.
    live: Vec<i64>,
    /// Seconds before each kernel of two steps, expected waits included.
    before: Vec<f64>,
    /// The first kernel ahead, counted from the first step.
    pub first: usize,
    /// Seconds from now to the start of each kernel ahead, and to the end of the last.
    pub starts: Vec<f64>,
    /// Bytes that do not fit while each kernel ahead runs; negative if there is room.
    pub excess: Vec<i64>,
    /// Like `excess`, for `has_room`.
    lacking: Vec<i64>,
    /// Seconds of kernels with excess before each kernel ahead.
    short_before: Vec<f64>,
}

impl Outlook {
    /// For a trace whose unused globals stay away; `seconds` has the time of each kernel.
    pub fn new(trace: &Trace, machine: &Machine, seconds: &[f64], reserve: f64) -> Self {
        let unused: u64 = trace
            .tensors()
            .iter()
            .enumerate()
            .filter(|(tensor, entry)| entry.is_global && trace.users(*tensor as u32).is_empty())
            .map(|(_, entry)| entry.bytes)
            .sum();
        let live = trace.live_bytes();
        let most = live.iter().copied().max().unwrap_or(1).max(1) as f64;
        let live: Vec<i64> = live
            .into_iter()
            .map(|bytes| {
                let part = bytes as f64 / most;
                let kept_free = machine.device_bytes as f64 * reserve * part * part;
                (bytes - unused) as i64 + kept_free as i64 - machine.device_bytes as i64
            })
            .collect();
        let kernel_count = live.len();
        let mut before = vec![0.0];
        before.extend(seconds.iter().chain(seconds).scan(0.0, |sum, kernel_s| {
            *sum += kernel_s;
            Some(*sum)
        }));
        Self {
            kernel_count,
            live: live.repeat(2),
            before,
            first: NONE,
            starts: vec![0.0; kernel_count + 1],
            excess: vec![0; kernel_count],
            lacking: vec![0; kernel_count],
            short_before: vec![0.0; kernel_count + 1],
        }
    }

    /// Looks from the end of the kernel before `first`. `away` has the bytes of each tensor that is
    /// not in memory, and the seconds from now between which its room is free.
    pub fn look(&mut self, first: usize, away: &[(u64, f64, f64)]) {
        self.begin(first);
        let mut excess = std::mem::take(&mut self.excess);
        self.count(away, &mut excess);
        self.excess = excess;
        let mut short = 0.0;
        for (ahead, &excess) in self.excess.iter().enumerate() {
            self.short_before[ahead] = short;
            if excess > 0 {
                short += self.starts[ahead + 1] - self.starts[ahead];
            }
        }
        self.short_before[self.kernel_count] = short;
    }

    /// Computes `lacking` for `has_room`, with other times of return in `away`.
    pub fn look_for_room(&mut self, away: &[(u64, f64, f64)]) {
        let mut lacking = std::mem::take(&mut self.lacking);
        self.count(away, &mut lacking);
        self.lacking = lacking;
    }

    fn count(&self, away: &[(u64, f64, f64)], excess: &mut [i64]) {
        excess.fill(0);
        // Differences first, then their sums.
        for &(bytes, from_s, until_s) in away {
            let range = self.range(from_s, until_s);
            if !range.is_empty() {
                excess[range.start] -= bytes as i64;
                if range.end < self.kernel_count {
                    excess[range.end] += bytes as i64;
                }
            }
        }
        let from = self.first % self.kernel_count;
        let mut away_bytes = 0;
        for (here, live) in excess.iter_mut().zip(&self.live[from..]) {
            away_bytes += *here;
            *here = away_bytes + live;
        }
    }

    /// Finds the times of the kernels from `first` on.
    pub fn begin(&mut self, first: usize) {
        if self.first == first {
            return;
        }
        self.first = first;
        let from = first % self.kernel_count;
        let base = self.before[from];
        for (start, before) in self.starts.iter_mut().zip(&self.before[from..]) {
            *start = before - base;
        }
    }

    /// The kernels ahead that start at or after `from_s` and end by `until_s`.
    fn range(&self, from_s: f64, until_s: f64) -> Range<usize> {
        let starts = &self.starts[..self.kernel_count];
        let first = if from_s <= 0.0 { 0 } else { starts.partition_point(|&start| start < from_s) };
        let end = self.starts[1..].partition_point(|&end| end <= until_s);
        first..end.max(first)
    }

    /// Seconds from now to the start of a kernel.
    pub fn seconds_to(&self, kernel: usize) -> f64 {
        let ahead = kernel.saturating_sub(self.first);
        if ahead <= self.kernel_count {
            return self.starts[ahead];
        }
        self.starts[self.kernel_count] + self.starts[ahead - self.kernel_count]
    }

    /// Seconds of kernels with excess between two times from now.
    pub fn short_seconds(&self, from: f64, to: f64) -> f64 {
        if to <= from { 0.0 } else { self.short_by(to) - self.short_by(from) }
    }

    fn short_by(&self, moment: f64) -> f64 {
        let after = self.starts.partition_point(|&start| start <= moment);
        if after == 0 {
            return 0.0;
        }
        let at = after - 1;
        if at >= self.kernel_count {
            return self.short_before[self.kernel_count];
        }
        let part = if self.excess[at] > 0 { moment - self.starts[at] } else { 0.0 };
        self.short_before[at] + part
    }

    /// Seconds of kernels with excess in the whole step ahead.
    pub fn all_short_seconds(&self) -> f64 {
        self.short_before[self.kernel_count]
    }

    /// Returns true if, at some kernel ahead, the excess is larger than the bytes that go out by
    /// then.
    pub fn is_behind(&self, bytes_per_s: f64, busy_for: f64) -> bool {
        self.excess.iter().zip(&self.starts).any(|(&excess, &start)| {
            excess > 0 && excess as f64 > bytes_per_s * (start - busy_for).max(0.0)
        })
    }

    /// Returns true if there is room for some bytes from now to a time.
    pub fn has_room(&self, bytes: u64, until_s: f64) -> bool {
        self.lacking[self.range(0.0, until_s)].iter().all(|&excess| excess + bytes as i64 <= 0)
    }

    /// The part of the excess up to a kernel that a tensor of this size would cover: the mean, over
    /// its bytes, of the seconds in which a byte of it would be missing.
    pub fn covered(&self, bytes: u64, until: usize) -> f64 {
        let until = until.saturating_sub(self.first).min(self.kernel_count);
        let byte_seconds: f64 = self.excess[..until]
            .iter()
            .zip(self.starts.windows(2))
            .filter(|(excess, _)| **excess > 0)
            .map(|(&excess, start)| (excess as f64).min(bytes as f64) * (start[1] - start[0]))
            .sum();
        byte_seconds / bytes as f64
    }
}
