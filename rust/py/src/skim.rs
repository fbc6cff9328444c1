//! Skimmed rounds: nothing of such a round goes to the disk, and only its first tensor is followed.
//!
//! Following a tensor takes some microseconds, and several times as many where computing has just
//! filled the processor's caches. The first tensor of a round is mostly the last that its backward
//! needs. All others are kept as small tensors are.
//!
//! They are counted all the same, as bytes or as a weight, and a look at a tensor for that costs
//! more than keeping it. But most such rounds save the same tensors as the one before, so the count
//! of each place is remembered, until a round is followed again. If a tensor differs from the
//! tensor before at its place, it and all after it are looked at again. A mistake makes a figure of
//! the report wrong, and nothing else: all of these tensors stay in memory in the same way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::rules::OwnSize;
use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound};

/// The most tensors of a skimmed round whose first tensor is neither needed nor dropped: a graph
/// that the program holds for ever must not keep all later rounds from being followed.
const COUNT_MAX: usize = 16_384;

/// The bytes of a storage with which a tensor counts.
#[derive(Clone, Copy)]
pub struct CountedPart {
    pub start: usize,
    pub nbytes: u64,
    pub storage_bytes: u64,
    /// True if it was packed in a forward. A backward packs no more than its forward did.
    pub is_forward: bool,
}

impl CountedPart {
    /// The address under which it is counted, and the most bytes that count there.
    ///
    /// A part counts apart from its storage, so that each layer may save the same storage.
    pub fn shared(&self, storage: usize) -> (usize, u64) {
        if self.nbytes < self.storage_bytes {
            return (storage.wrapping_add(self.start), self.nbytes);
        }
        (storage, self.storage_bytes)
    }
}

/// The count of a large tensor, or of a view of a large tensor, that is not followed.
#[derive(Clone, Copy)]
pub enum CountsAs {
    /// Bytes of its storage, in which it begins after `offset_bytes`.
    Bytes { offset_bytes: usize, part: CountedPart },
    /// A tensor made of a weight.
    Weight,
    /// It has to be judged each time.
    Unclear,
}

/// The skimmed round, if there is one.
#[derive(Default)]
pub struct Skim {
    /// True while a round is skimmed. Every pack looks at it.
    is_on: AtomicBool,
    of: Mutex<Option<Skimmed>>,
    known: Mutex<Known>,
}

/// The counts of the tensors of the last round, in the order of packing.
#[derive(Default)]
struct Known {
    tensors: Vec<(OwnSize, CountsAs)>,
    /// The place of the tensor that is packed next.
    next: usize,
}

struct Skimmed {
    round: SharedRound,
    first: SavedReference,
    /// The address of its storage.
    identity: usize,
    count: usize,
}

impl Skim {
    /// Begins with the first tensor of a round.
    pub fn begin(&self, first: &Bound<'_, SavedTensor>, round: &SharedRound) -> PyResult<()> {
        let py = first.py();
        let Some(storage) = first.get().record.get().storage(py) else { return Ok(()) };
        let identity = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let first = PyWeakrefReference::new(first)?.unbind();
        round.lock().skim();
        self.count_anew();
        let round = round.clone();
        let before = self.of().replace(Skimmed { round, first, identity, count: 0 });
        drop(before);
        self.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// True if a tensor that is packed now belongs to the skimmed round, whose first tensor is
    /// alive.
    pub fn go_on(&self, py: Python<'_>) -> bool {
        if !self.is_on.load(Ordering::Relaxed) {
            return false;
        }
        let first = self.of().as_ref().map(|skimmed| skimmed.first.clone_ref(py));
        let goes_on = first.is_some_and(|first| first.bind(py).upgrade().is_some());
        if !goes_on {
            self.end();
        }
        goes_on
    }

    /// The count of the tensor at this place before, if that was like this tensor. If it was not,
    /// the counts of all later places are forgotten.
    pub fn known_count(&self, own: OwnSize) -> Option<CountsAs> {
        let mut known = self.known();
        let next = known.next;
        match known.tensors.get(next) {
            Some(&(before, counts)) if before == own => {
                known.next += 1;
                Some(counts)
            }
            _ => {
                known.tensors.truncate(next);
                None
            }
        }
    }

    /// Notes the count of the tensor at this place, for the first [`COUNT_MAX`] places.
    pub fn note_count(&self, own: OwnSize, counts: CountsAs) {
        let mut known = self.known();
        if known.tensors.len() < COUNT_MAX {
            known.tensors.push((own, counts));
            known.next = known.tensors.len();
        }
    }

    /// Begins again with the tensor after the first of a round.
    pub fn count_anew(&self) {
        self.known().next = 0;
    }

    /// Forgets all counts, so that all tensors are looked at again.
    pub fn forget_counts(&self) {
        self.known().tensors.clear();
    }

    /// Counts a tensor that is not followed; `false` if it lies on the memory of the first tensor,
    /// whose record counts it, or if there were too many.
    pub fn passes_by(&self, identity: usize) -> bool {
        let mut of = self.of();
        let Some(skimmed) = of.as_mut() else { return false };
        if skimmed.identity == identity {
            return false;
        }
        skimmed.count += 1;
        let goes_on = skimmed.count <= COUNT_MAX;
        drop(of);
        if !goes_on {
            self.end();
        }
        goes_on
    }

    /// Ends the skimmed round if it is `round`, because its backward has begun.
    pub fn end_of(&self, round: &SharedRound) {
        let is_its_own = self.of().as_ref().is_some_and(|skimmed| skimmed.round.is(round));
        if is_its_own {
            self.end();
        }
    }

    /// Ends the skimmed round. The next pack begins a new round.
    fn end(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        let before = self.of().take();
        if let Some(skimmed) = &before {
            skimmed.round.lock().set_closed(true);
        }
        drop(before);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked for a change that calls nothing and drops nothing.
    fn of(&self) -> MutexGuard<'_, Option<Skimmed>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
