//! How streams of a GPU have waited for copies of what was let go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ssdtrain_core::cuda::stream::Event;

/// Of waits that nobody asks for no more are noted.
const WAITS_MAX: usize = 4096;

/// A wait of a stream until memory had been copied that was let go.
pub struct Wait {
    /// Where it began, if it did before the copy had ended.
    pub from: Arc<Event>,
    /// The end of the copy.
    pub copied: Arc<Event>,
    /// Whether by the plan the copy had ended.
    pub is_planned: bool,
}

/// Those of a GPU since somebody asked for them.
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
