//! The waits of a GPU's streams for copies of memory that was let go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ssdtrain_core::cuda::stream::Event;

/// The most waits that are noted until they are taken.
const WAITS_MAX: usize = 4096;

/// A wait of a stream for the copy of memory that was let go.
pub struct Wait {
    /// The beginning of the wait; after `copied`, if there was none.
    pub from: Arc<Event>,
    /// The end of the copy.
    pub copied: Arc<Event>,
    /// True if the copy should have ended by the plan.
    pub is_planned: bool,
}

/// The waits of a GPU since they were taken last.
#[derive(Default)]
pub struct Waits(Mutex<Vec<Wait>>);

impl Waits {
    pub fn add(&self, wait: Wait) {
        let mut waits = self.locked();
        if waits.len() < WAITS_MAX {
            waits.push(wait);
        }
    }

    pub fn take(&self) -> Vec<Wait> {
        std::mem::take(&mut *self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Wait>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
