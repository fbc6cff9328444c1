//! Stays out of the way of a round of which nothing goes to the disk.
//!
//! To follow a tensor takes some microseconds, and several times as many where computing has just
//! filled the processor's caches. So where it is known beforehand that all of a round stays in
//! memory, only its first tensor is followed, which is mostly the last one that its backward asks
//! for. All others are kept as small ones are.
//!
//! They are counted all the same: as how many bytes, or as a weight. To find that out costs more
//! than to keep them. But one such round mostly saves what the other did, so it is remembered by
//! the place in the round, until a round is followed again. Where a tensor is not like the one
//! before, it and all that come after it are looked at again. A mistake makes a figure of the
//! report wrong, and nothing else: all of these tensors stay in memory in the same way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::rules::OwnSize;
use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound};

/// So many tensors of a round pass by at most, if its first one is neither asked for nor dropped:
/// a graph that somebody holds for ever must not keep all later rounds from being followed.
const COUNT_MAX: usize = 16_384;

/// Which bytes of a storage a tensor counts with.
#[derive(Clone, Copy)]
pub struct CountedPart {
    pub start: usize,
    pub nbytes: u64,
    pub storage_bytes: u64,
    /// Whether it was packed in a forward: what a backward packs is no more than the forward did.
    pub is_forward: bool,
}

impl CountedPart {
    /// Under which address it is counted, and how many bytes there are at most.
    ///
    /// A part counts apart from its storage, so that each layer may save the same one.
    pub fn shared(&self, storage: usize) -> (usize, u64) {
        if self.nbytes < self.storage_bytes {
            return (storage.wrapping_add(self.start), self.nbytes);
        }
        (storage, self.storage_bytes)
    }
}

/// What a tensor counts as that is large, or a view of something large, and is not followed.
#[derive(Clone, Copy)]
pub enum CountsAs {
    /// Bytes of its storage, in which it begins after `offset_bytes`.
    Bytes { offset_bytes: usize, part: CountedPart },
    /// What was made of a weight.
    Weight,
    /// It has to be judged each time.
    Unclear,
}

/// The round that is skimmed, if there is one.
#[derive(Default)]
pub struct Skim {
    /// Looked at in every pack.
    is_on: AtomicBool,
    of: Mutex<Option<Skimmed>>,
    known: Mutex<Known>,
}

/// What the tensors of the round before counted as, one after the other.
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

    /// Whether a tensor that is packed now is one of the round: the first one waits for its
    /// backward.
    pub fn go_on(&self, py: Python<'_>) -> bool {
        if !self.is_on.load(Ordering::Relaxed) {
            return false;
        }
        let first = self.of().as_ref().map(|one| one.first.clone_ref(py));
        let goes_on = first.is_some_and(|first| first.bind(py).upgrade().is_some());
        if !goes_on {
            self.end();
        }
        goes_on
    }

    /// What the tensor at this place counted as before, if it was like this one. If it was not,
    /// what comes after it is unknown too.
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

    /// Notes what the tensor at this place counts as, of the first ones of a round.
    pub fn note_count(&self, own: OwnSize, counts: CountsAs) {
        let mut known = self.known();
        if known.tensors.len() < COUNT_MAX {
            known.tensors.push((own, counts));
            known.next = known.tensors.len();
        }
    }

    /// Begins with the tensor that comes after the first one of a round.
    pub fn count_anew(&self) {
        self.known().next = 0;
    }

    /// Has all tensors looked at again.
    pub fn forget_counts(&self) {
        self.known().tensors.clear();
    }

    /// Counts a tensor that is not followed; `false` if it has the memory of the first one, whose
    /// record counts it, or if there were too many.
    pub fn passes_by(&self, identity: usize) -> bool {
        let mut of = self.of();
        let Some(one) = of.as_mut() else { return false };
        if one.identity == identity {
            return false;
        }
        one.count += 1;
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

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked for a change that calls nothing and drops nothing.
    fn of(&self) -> MutexGuard<'_, Option<Skimmed>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
