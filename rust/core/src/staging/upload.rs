//! The target of a load, and its progress.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::stream::{DeviceRange, Event};
use crate::error::{Error, ErrorKind};

/// A load, shared by its consumer and the worker. It has as many parts as its tensor was saved in.
#[derive(Debug)]
pub struct Upload {
    /// Reached once the earlier user of the target's memory is done with it.
    pub allocated: Arc<Event>,
    progress: Mutex<Progress>,
}

/// The progress of a load.
#[derive(Debug)]
pub struct Progress {
    /// The number of parts whose copies are not on the stream.
    pub coming_count: usize,
    /// The end of the last copy that is on the stream.
    pub last: Option<Arc<Event>>,
    /// The error for which no more parts are copied.
    pub failure: Option<Error>,
}

impl Progress {
    /// Returns true if nothing more comes.
    pub fn is_over(&self) -> bool {
        self.coming_count == 0 || self.failure.is_some()
    }

    /// Ends a load of which parts are coming.
    pub fn fail(&mut self, error: Error) {
        if !self.is_over() {
            self.failure = Some(error);
        }
    }
}

impl Upload {
    pub fn new(allocated: Arc<Event>, part_count: usize) -> Arc<Self> {
        let progress = Progress { coming_count: part_count, last: None, failure: None };
        Arc::new(Self { allocated, progress: Mutex::new(progress) })
    }

    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a load that its consumer waits for. If it is dropped before it is
/// [settled](Self::settle), the load fails with `Poisoned`.
#[derive(Debug)]
pub struct Owed {
    pub upload: Arc<Upload>,
    pub target: DeviceRange,
    is_settled: bool,
}

impl Owed {
    pub fn new(upload: &Arc<Upload>, target: DeviceRange) -> Self {
        Self { upload: Arc::clone(upload), target, is_settled: false }
    }

    /// Ends the load with an error.
    pub fn fail(mut self, error: Error) {
        self.upload.progress().fail(error);
        self.settle();
    }

    /// Notes that the copy of this part is on the stream, or never will be.
    pub fn settle(&mut self) {
        self.is_settled = true;
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if !self.is_settled {
            let message = "the worker of the copies to the GPU ended before this load did";
            self.upload.progress().fail(Error::new(ErrorKind::Poisoned, message));
        }
    }
}
