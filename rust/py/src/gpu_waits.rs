//! The copies from a GPU, and the waits of its streams for copies of memory that was let go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ssdtrain_core::cuda::stream::Event;

/// The most waits, and the most copies, that are noted until they are taken.
const NOTED_MAX: usize = 4096;

/// A wait of a stream for the copy of memory that was let go.
pub struct Wait {
    /// The beginning of the wait; after `copied`, if there was none.
    pub from: Arc<Event>,
    /// The end of the copy.
    pub copied: Arc<Event>,
    /// True if the copy should have ended by the plan.
    pub is_planned: bool,
}

/// The waits and the copies of a GPU since they were taken last.
#[derive(Default)]
pub struct Waits(Mutex<Noted>);

#[derive(Default)]
pub struct Noted {
    pub waits: Vec<Wait>,
    /// Keys of tensors, each with the end of its copy from the GPU.
    pub copies: Vec<(i64, Arc<Event>)>,
}

impl Noted {
    pub fn is_empty(&self) -> bool {
        self.waits.is_empty() && self.copies.is_empty()
    }

    /// Adds what was noted later.
    pub fn extend(&mut self, later: Self) {
        self.waits.extend(later.waits);
        self.copies.extend(later.copies);
    }

    pub fn events(&self) -> impl Iterator<Item = &Arc<Event>> {
        let waits = self.waits.iter().flat_map(|wait| [&wait.from, &wait.copied]);
        waits.chain(self.copies.iter().map(|(_, copied)| copied))
    }
}

impl Waits {
    pub fn add(&self, wait: Wait) {
        let mut noted = self.locked();
        if noted.waits.len() < NOTED_MAX {
            noted.waits.push(wait);
        }
    }

    pub fn add_copy(&self, key: i64, copied: Arc<Event>) {
        let mut noted = self.locked();
        if noted.copies.len() < NOTED_MAX {
            noted.copies.push((key, copied));
        }
    }

    pub fn take(&self) -> Noted {
        std::mem::take(&mut *self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
