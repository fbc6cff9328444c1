//! Stays out of the way of a round of which nothing goes to the disk.
//!
//! To follow a tensor takes some microseconds, and several times as many where computing has just
//! filled the processor's caches. So where it is known beforehand that all of a round stays in
//! memory, only its first tensor is followed, which is mostly the last one that its backward asks
//! for. All others are kept as small ones are.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound};

/// So many tensors of a round pass by at most, if its first one is neither asked for nor dropped:
/// a graph that somebody holds for ever must not keep all later rounds from being followed.
const COUNT_MAX: usize = 16_384;

/// Why nothing of a round goes to the disk.
#[derive(Clone, Copy)]
pub enum Cause {
    /// The plan keeps everything.
    Plan,
    /// Nothing is worth its price.
    Price,
}

/// The round that is skimmed, if there is one.
#[derive(Default)]
pub struct Skim {
    /// Looked at in every pack.
    is_on: AtomicBool,
    of: Mutex<Option<Skimmed>>,
}

struct Skimmed {
    round: SharedRound,
    first: SavedReference,
    /// The address of its storage.
    identity: usize,
    count: usize,
    cause: Cause,
}

impl Cause {
    pub fn of(name: &str) -> PyResult<Self> {
        match name {
            "plan" => Ok(Self::Plan),
            "price" => Ok(Self::Price),
            _ => Err(PyValueError::new_err(format!("{name:?} is no cause to keep a round"))),
        }
    }
}

impl Skim {
    /// Begins with the first tensor of a round.
    pub fn begin(
        &self,
        first: &Bound<'_, SavedTensor>,
        round: &SharedRound,
        cause: Cause,
    ) -> PyResult<()> {
        let py = first.py();
        let Some(storage) = first.get().record.get().storage(py) else { return Ok(()) };
        let identity = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let first = PyWeakrefReference::new(first)?.unbind();
        round.lock().skim();
        let round = round.clone();
        let before = self.of().replace(Skimmed { round, first, identity, count: 0, cause });
        drop(before);
        self.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The cause, for a tensor that is packed now, as long as the first one waits for its backward.
    pub fn go_on(&self, py: Python<'_>) -> Option<Cause> {
        if !self.is_on.load(Ordering::Relaxed) {
            return None;
        }
        let first = self.of().as_ref().map(|one| (one.first.clone_ref(py), one.cause));
        let cause = first.and_then(|(first, cause)| first.bind(py).upgrade().map(|_| cause));
        if cause.is_none() {
            self.end();
        }
        cause
    }

    /// Counts a tensor that is not followed; `false` if it has the memory of the first one, whose
    /// record counts it, or if there were too many.
    pub fn passes_by(&self, identity: usize, nbytes: u64) -> bool {
        let mut of = self.of();
        let Some(one) = of.as_mut() else { return false };
        if one.identity == identity {
            return false;
        }
        one.count += 1;
        one.round.lock().note_skimmed(nbytes);
        let goes_on = one.count <= COUNT_MAX;
        drop(of);
        if !goes_on {
            self.end();
        }
        goes_on
    }

    /// Ends with a round, because its backward has come; one that ended before ends nothing.
    pub fn end_of(&self, round: &SharedRound) {
        let is_its_own = self.of().as_ref().is_some_and(|one| one.round.is(round));
        if is_its_own {
            self.end();
        }
    }

    /// Ends, because its backward has come, or never will. What is packed next begins a new round.
    fn end(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        let before = self.of().take();
        if let Some(one) = &before {
            one.round.lock().set_closed(true);
        }
        drop(before);
    }

    /// Locked for a change that calls nothing and drops nothing.
    fn of(&self) -> MutexGuard<'_, Option<Skimmed>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
