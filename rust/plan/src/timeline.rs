//! The record of a simulation: the times of kernels, their waits, and the resident bytes.

use crate::channels::{CHANNEL_COUNT, Channels};
use crate::trace::CLASS_COUNT;
use std::fmt;

/// A kernel's wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// Its duration.
    pub seconds: f64,
    /// The tensor that came last; `None` if only room was missing.
    pub tensor: Option<u32>,
}

/// A kernel that can never start, because its tensors do not fit into the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The kernel.
    pub kernel: usize,
    /// The room that it still waited for.
    pub need_bytes: u64,
}

impl fmt::Display for Stuck {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "kernel {} can never start: {} bytes more than fit; the device needs more memory",
            self.kernel, self.need_bytes
        )
    }
}

impl std::error::Error for Stuck {}

/// The course of some steps.
#[derive(Clone, Debug)]
pub struct Timeline {
    starts: Vec<f64>,
    ends: Vec<f64>,
    stalls: Vec<Stall>,
    resident: Vec<(f64, u64)>,
    busy_s: Vec<f64>,
    /// Bytes that each channel had begun to carry at the end of each step.
    moved: Vec<[u64; CHANNEL_COUNT]>,
    last: LastStep,
    kernel_count: usize,
    step_count: usize,
}

/// The peaks of the last step.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastStep {
    /// Bytes in the device's memory.
    pub peak_bytes: u64,
    /// Bytes in the device's memory of each class, each at its own peak.
    pub class_peak_bytes: [u64; CLASS_COUNT],
    /// Bytes in the host's memory.
    pub host_peak_bytes: u64,
}

impl Timeline {
    pub(crate) fn new(kernel_count: usize, step_count: usize) -> Self {
        let total = kernel_count * step_count;
        Self {
            starts: Vec::with_capacity(total),
            ends: Vec::with_capacity(total),
            stalls: Vec::with_capacity(total),
            resident: Vec::new(),
            busy_s: vec![0.0; CHANNEL_COUNT],
            moved: Vec::new(),
            last: LastStep::default(),
            kernel_count,
            step_count,
        }
    }

    pub(crate) fn start(&mut self, now: f64, stall: Stall) {
        self.starts.push(now);
        self.stalls.push(stall);
    }

    pub(crate) fn end(&mut self, now: f64, channels: &Channels) {
        self.ends.push(now);
        if self.ends.len().is_multiple_of(self.kernel_count) {
            self.moved.push(channels.moved_bytes());
        }
    }

    pub(crate) fn resident(
        &mut self,
        now: f64,
        bytes: u64,
        by_class: [u64; CLASS_COUNT],
        host_bytes: u64,
    ) {
        if self.resident.last().is_none_or(|&(_, last)| last != bytes) {
            self.resident.push((now, bytes));
        }
        if self.ends.len() >= self.kernel_count * (self.step_count - 1) {
            self.last.peak_bytes = self.last.peak_bytes.max(bytes);
            self.last.host_peak_bytes = self.last.host_peak_bytes.max(host_bytes);
            for (peak, here) in self.last.class_peak_bytes.iter_mut().zip(by_class) {
                *peak = (*peak).max(here);
            }
        }
    }

    pub(crate) fn close(&mut self, channels: &Channels) {
        for (on, busy) in self.busy_s.iter_mut().enumerate() {
            *busy = channels.busy_seconds(on);
        }
    }

    /// When each kernel of every step started.
    pub fn starts(&self) -> &[f64] {
        &self.starts
    }

    /// When each kernel of every step ended.
    pub fn ends(&self) -> &[f64] {
        &self.ends
    }

    /// The wait of each kernel of every step.
    pub fn stalls(&self) -> &[Stall] {
        &self.stalls
    }

    /// Times, each with the bytes in the device's memory from then on.
    pub fn resident_bytes(&self) -> &[(f64, u64)] {
        &self.resident
    }

    /// Seconds for which each channel carried transfers: out to the drives, out to the host, back
    /// from the drives, back from the host.
    pub fn busy_seconds(&self) -> &[f64] {
        &self.busy_s
    }

    /// Bytes that each channel began to carry in the last step, in the same order.
    pub fn last_moved_bytes(&self) -> [u64; CHANNEL_COUNT] {
        let mut last = self.moved.last().copied().unwrap_or_default();
        if let Some(before) = self.moved.len().checked_sub(2) {
            for (bytes, earlier) in last.iter_mut().zip(self.moved[before]) {
                *bytes -= earlier;
            }
        }
        last
    }

    /// The peaks of the last step.
    pub fn last_step(&self) -> &LastStep {
        &self.last
    }

    /// Seconds of each step, from the end of the step before it.
    pub fn step_seconds(&self) -> Vec<f64> {
        let mut before = 0.0;
        self.ends
            .chunks(self.kernel_count)
            .filter_map(|step| step.last())
            .map(|&end| {
                let seconds = end - before;
                before = end;
                seconds
            })
            .collect()
    }

    /// The longest step, except the first, which warms up.
    pub fn steady_seconds(&self) -> f64 {
        self.step_seconds().into_iter().skip(1).fold(0.0, f64::max)
    }
}
