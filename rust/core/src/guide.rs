//! The guide of a round: the tensors of an earlier round of the same kind, in order. By the guide,
//! hooks skip the tensors that stayed in memory by plan.
//!
//! Following a tensor takes some ten microseconds in its two hooks. That time is lost if a GPU
//! waits for Python. Plans are made from rounds that are followed in whole. In the rounds between
//! them only the tensors that leave memory are followed. Each tensor of such a round is compared
//! with the guide, so that a round which packs another tensor is noticed at once.

use std::sync::Arc;

/// A tensor of the earlier round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its key, which depends on the sizes of all tensors until this one.
    pub key: i64,
    /// The key of its record: its own, unless an earlier tensor had the same bytes.
    pub record_key: i64,
    /// The GPU that holds the tensor; `None`: the CPU.
    pub gpu: Option<usize>,
    /// True if it stays in memory by plan, so that it need not be followed.
    pub stays: bool,
}

/// The place a round has reached in its guide.
#[derive(Debug, Default)]
pub struct GuideCursor {
    guide: Option<Arc<[Place]>>,
    /// Number of packed tensors, followed or not.
    place: usize,
    passed_bytes: u64,
}

impl GuideCursor {
    /// Follows this guide from the next tensor on.
    pub fn begin(&mut self, guide: Arc<[Place]>) {
        self.guide = Some(guide);
    }

    /// Returns true if there is a guide for the tensor that is packed now.
    #[must_use]
    pub fn has_guide(&self) -> bool {
        self.guide.is_some()
    }

    /// The place of the tensor with this key, which is packed now. If the guide has another tensor
    /// there, the guide ends, because the tensors after it are unknown.
    pub fn place(&mut self, key: i64) -> Option<Place> {
        let found = self.guide.as_ref()?.get(self.place).copied();
        let found = found.filter(|place| place.key == key);
        if found.is_none() {
            self.guide = None;
        }
        found
    }

    /// Counts a tensor that is followed.
    pub fn step(&mut self) {
        self.place += 1;
    }

    /// Counts a tensor that is not followed.
    pub fn pass(&mut self, nbytes: u64) {
        self.place += 1;
        self.passed_bytes += nbytes;
    }

    /// Returns true if some tensor was not followed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.passed_bytes > 0
    }
}
