//! The target of a load, and its progress.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::stream::{DeviceRange, Event};
use crate::error::{Error, ErrorKind};

/// A load, shared by its consumer and the worker.
#[derive(Debug)]
pub struct Upload {
    pub target: DeviceRange,
    /// Reached once the earlier user of the target's memory is done with it.
    pub allocated: Event,
    progress: Mutex<Progress>,
}

/// The progress of a load.
#[derive(Debug)]
pub enum Progress {
    /// The copy has not begun.
    Coming,
    /// The copy is on its stream; the event marks its end.
    Enqueued(Arc<Event>),
    /// It will never begin.
    Failed(Error),
}

impl Upload {
    pub fn new(target: DeviceRange, allocated: Event) -> Arc<Self> {
        Arc::new(Self { target, allocated, progress: Mutex::new(Progress::Coming) })
    }

    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a load whose copy has not begun.
    pub fn fail(&self, error: Error) {
        let mut progress = self.progress();
        if matches!(*progress, Progress::Coming) {
            *progress = Progress::Failed(error);
        }
    }
}

/// A load that its consumer waits for. If it is dropped without an answer, the load fails with
/// `Poisoned`.
#[derive(Debug)]
pub struct Owed(pub Arc<Upload>);

impl Drop for Owed {
    fn drop(&mut self) {
        let message = "the worker of the copies to the GPU ended before this load did";
        self.0.fail(Error::new(ErrorKind::Poisoned, message));
    }
}
