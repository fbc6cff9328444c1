//! What was saved from a GPU: where its bytes are, from the copy until nobody wants them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::stream::{Event, UserStream};
use crate::error::{Error, Result};
use crate::memory::pinned::PinnedSlot;
use crate::stored::Stored;

/// Where what is saved shall stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// On the disk.
    Disk,
    /// In its pinned slot.
    Pinned,
}

/// What was saved; dropping it gives its slot and its space on the disk back.
///
/// A copy that is under way goes on: before the source is given to others, a stream has to wait for
/// it, by [`release`](Self::release).
#[derive(Debug)]
pub struct Staged(Arc<Parcel>);

impl Drop for Staged {
    fn drop(&mut self) {
        self.0.is_wanted.store(false, Ordering::Relaxed);
    }
}

impl Staged {
    pub(super) fn new(parcel: Arc<Parcel>) -> Self {
        Self(parcel)
    }

    pub(super) fn parcel(&self) -> &Parcel {
        &self.0
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Makes what is put on `stream` from now on wait until the source has been copied.
    pub fn release(&self, stream: UserStream) -> Result<()> {
        self.0.copied.wait_on(stream)
    }

    /// The end of the copy of the source, for who waits for it later.
    pub fn copied(&self) -> Arc<Event> {
        Arc::clone(&self.0.copied)
    }

    /// Whether the end of the copy was seen, or its failure: the worker asks the driver, and nobody
    /// else has to.
    pub fn is_seen_copied(&self) -> bool {
        self.0.copied.is_known_reached() || !matches!(&*self.0.place(), Place::Copying(_))
    }

    /// Whether it has come where it stays: to the disk, or into its slot for good.
    pub fn is_settled(&self) -> bool {
        matches!(&*self.0.place(), Place::Pinned(..) | Place::OnDisk(_) | Place::Lost(_))
    }

    /// Whether its bytes are in pinned memory.
    pub fn is_pinned(&self) -> bool {
        self.0.slot().is_some()
    }

    /// Why it is not on the disk, where it should be.
    pub fn failure(&self) -> Option<Error> {
        match &*self.0.place() {
            Place::Pinned(_, failure) => failure.clone(),
            Place::Lost(error) => Some(error.clone()),
            Place::Copying(_) | Place::Writing(..) | Place::OnDisk(_) => None,
        }
    }
}

/// One saved range of a GPU's memory.
#[derive(Debug)]
pub struct Parcel {
    pub copied: Arc<Event>,
    pub len: usize,
    pub tier: Tier,
    /// Whether somebody may still load it; else it need not be written.
    pub is_wanted: AtomicBool,
    place: Mutex<Place>,
}

/// Where its bytes are.
#[derive(Debug)]
pub enum Place {
    /// On their way to the slot.
    Copying(Arc<PinnedSlot>),
    /// In the slot, and on their way to the disk.
    Writing(Arc<PinnedSlot>, Arc<Stored>),
    /// In the slot, where they stay: they were to stay there, or the disk did not take them.
    Pinned(Arc<PinnedSlot>, Option<Error>),
    /// On the disk.
    OnDisk(Arc<Stored>),
    /// Nowhere: the GPU failed before they were copied.
    Lost(Error),
}

impl Parcel {
    pub fn new(slot: Arc<PinnedSlot>, copied: Event, len: usize, tier: Tier) -> Self {
        let (is_wanted, place) = (AtomicBool::new(true), Mutex::new(Place::Copying(slot)));
        Self { copied: Arc::new(copied), len, tier, is_wanted, place }
    }

    /// Where the bytes are; whoever holds the lock calls no other thread's code.
    pub fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot that holds the bytes, or will.
    pub fn slot(&self) -> Option<Arc<PinnedSlot>> {
        match &*self.place() {
            Place::Copying(slot) | Place::Writing(slot, _) | Place::Pinned(slot, _) => {
                Some(Arc::clone(slot))
            }
            Place::OnDisk(_) | Place::Lost(_) => None,
        }
    }
}
