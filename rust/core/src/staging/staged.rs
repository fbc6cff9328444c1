//! A saved tensor of a GPU and the place of its bytes, from the copy until it is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::stream::{Event, UserStream};
use crate::error::{Error, Result};
use crate::memory::pinned::PinnedSlot;
use crate::stored::Stored;

/// The place in which a saved tensor should stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// On the disk.
    Disk,
    /// In its pinned slot.
    Pinned,
}

/// A saved tensor, in one part or in several. Dropping it frees its slots and its space on the
/// disk.
///
/// A copy that is under way goes on. Before the source is given to other tensors, a stream has to
/// wait for the copy by [`release`](Self::release).
#[derive(Debug)]
pub struct Staged {
    /// In the order of their bytes, which is that of their copies on the stream.
    parts: Vec<Arc<Parcel>>,
    len: usize,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.parts.iter().for_each(|parcel| parcel.is_wanted.store(false, Ordering::Relaxed));
    }
}

impl Staged {
    pub(super) fn new() -> Self {
        Self { parts: Vec::with_capacity(1), len: 0 }
    }

    pub(super) fn add(&mut self, part: Arc<Parcel>) {
        self.len += part.len;
        self.parts.push(part);
    }

    pub(super) fn parts(&self) -> &[Arc<Parcel>] {
        &self.parts
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the later work of `stream` wait until the source has been copied.
    pub fn release(&self, stream: UserStream) -> Result<()> {
        self.copied().wait_on(stream)
    }

    /// The event of the end of the copy, to wait for later.
    pub fn copied(&self) -> Arc<Event> {
        let last = &self.parts[self.parts.len() - 1]; // defence: a source waits for its last part
        Arc::clone(&last.copied)
    }

    /// Returns true if the worker has seen the end or the failure of the copy; does not ask the
    /// driver.
    pub fn is_seen_copied(&self) -> bool {
        let is_over = |part: &Arc<Parcel>| !matches!(&*part.place(), Place::Copying(_));
        self.copied().is_known_reached() || self.parts.iter().all(is_over)
    }

    /// Returns true if the bytes are in their last place: on the disk, or in slots for good.
    pub fn is_settled(&self) -> bool {
        let is_settled = |part: &Arc<Parcel>| {
            matches!(&*part.place(), Place::Pinned(..) | Place::OnDisk(_) | Place::Lost(_))
        };
        self.parts.iter().all(is_settled)
    }

    /// Returns true if bytes are in pinned memory.
    pub fn is_pinned(&self) -> bool {
        self.parts.iter().any(|part| part.slot().is_some())
    }

    /// The error that kept bytes from the disk; `None` if there was none.
    pub fn failure(&self) -> Option<Error> {
        self.parts.iter().find_map(|part| match &*part.place() {
            Place::Pinned(_, failure) => failure.clone(),
            Place::Lost(error) => Some(error.clone()),
            Place::Copying(_) | Place::Writing(..) | Place::OnDisk(_) => None,
        })
    }
}

/// One saved range of a GPU's memory.
#[derive(Debug)]
pub struct Parcel {
    /// The end of its copy, and of those of its group.
    pub copied: Arc<Event>,
    pub len: usize,
    /// The bytes of its group if it is the last of that; else 0.
    pub group_bytes: usize,
    pub tier: Tier,
    /// True if a load may still come; otherwise the bytes need not be written.
    pub is_wanted: AtomicBool,
    place: Mutex<Place>,
}

/// The place of its bytes.
#[derive(Debug)]
pub enum Place {
    /// On their way to the slot.
    Copying(Arc<PinnedSlot>),
    /// In the slot, and on their way to the disk.
    Writing(Arc<PinnedSlot>, Arc<Stored>),
    /// In the slot for good, by plan or because the disk did not take them.
    Pinned(Arc<PinnedSlot>, Option<Error>),
    /// On the disk.
    OnDisk(Arc<Stored>),
    /// Nowhere: the GPU failed before they were copied.
    Lost(Error),
}

impl Parcel {
    pub fn new(
        slot: Arc<PinnedSlot>,
        copied: Arc<Event>,
        (len, group_bytes): (usize, usize),
        tier: Tier,
    ) -> Self {
        let (is_wanted, place) = (AtomicBool::new(true), Mutex::new(Place::Copying(slot)));
        Self { copied, len, group_bytes, tier, is_wanted, place }
    }

    /// The place of the bytes. A thread that holds the lock waits for no other thread.
    pub fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot that holds the bytes, or will hold them.
    pub fn slot(&self) -> Option<Arc<PinnedSlot>> {
        match &*self.place() {
            Place::Copying(slot) | Place::Writing(slot, _) | Place::Pinned(slot, _) => {
                Some(Arc::clone(slot))
            }
            Place::OnDisk(_) | Place::Lost(_) => None,
        }
    }
}
