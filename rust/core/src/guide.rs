//! What a round may leave out: the tensors that stayed in memory by plan in the last round of its
//! kind.
//!
//! To follow a tensor takes some ten microseconds in its two hooks. Where a GPU waits for Python,
//! that is lost. So between rounds that are followed in whole, from which plans are made, there are
//! rounds in which only those tensors are followed that leave memory. Each place of such a round is
//! compared with the guide, so that a round which packs something else is found out at once.

use std::sync::Arc;

/// A tensor of the round that is the guide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its key: it stands for all sizes until then.
    pub key: i64,
    /// Whether it brought a record of its own.
    pub is_new: bool,
    /// The GPU on which that is; `None`: the CPU.
    pub gpu: Option<usize>,
}

/// How far a round has come along its guide.
#[derive(Debug, Default)]
pub struct Along {
    guide: Option<Arc<[Place]>>,
    /// How many tensors were packed, followed or not.
    place: usize,
    passed_bytes: u64,
}

impl Along {
    /// Begins with what comes next.
    pub fn begin(&mut self, guide: Arc<[Place]>) {
        self.guide = Some(guide);
    }

    /// Whether a tensor that is packed now has a guide.
    #[must_use]
    pub fn has_guide(&self) -> bool {
        self.guide.is_some()
    }

    /// The place of the tensor with this key, which is packed now. One that the guide does not have
    /// there ends it: nothing is known of what comes then.
    pub fn place(&mut self, key: i64) -> Option<Place> {
        let found = self.guide.as_ref()?.get(self.place).copied();
        let found = found.filter(|place| place.key == key);
        if found.is_none() {
            self.guide = None;
        }
        found
    }

    /// Goes on by one tensor.
    pub fn step(&mut self) {
        self.place += 1;
    }

    /// Counts one that is not followed.
    pub fn pass(&mut self, nbytes: u64) {
        self.place += 1;
        self.passed_bytes += nbytes;
    }

    /// Whether some tensor was not followed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.passed_bytes > 0
    }
}
