//! A load on its way back to a GPU, from a slot that still holds the bytes or from the disk.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::cuda::stream::{DeviceRange, Event, UserStream, is_capturing};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::PinnedSlot;
use crate::staging::mailbox::{Reading, Task, Uploading};
use crate::staging::shared::{Begun, Shared};
use crate::staging::staged::{Parcel, Place, Staged, Tier};
use crate::staging::upload::{Owed, Upload};
use crate::stored::Stored;

/// A load that has begun.
#[derive(Debug)]
pub struct Loading {
    shared: Arc<Shared>,
    upload: Arc<Upload>,
}

impl Loading {
    /// Begins loads into memory that was allocated before, so that one place of the stream is
    /// enough for all.
    pub(super) fn begin_all(
        shared: &Arc<Shared>,
        wanted: &[(&Staged, DeviceRange)],
        stream: UserStream,
    ) -> Result<Vec<Result<Self>>> {
        shared.mailbox.refuse_if_closed()?;
        refuse_if_capturing(shared, stream)?;
        let allocated = shared.copies.record(stream)?;
        let begin = |(staged, target): &(&Staged, DeviceRange)| {
            Self::begin(shared, staged, *target, &allocated)
        };
        Ok(wanted.iter().map(begin).collect())
    }

    fn begin(
        shared: &Arc<Shared>,
        staged: &Staged,
        target: DeviceRange,
        allocated: &Arc<Event>,
    ) -> Result<Self> {
        let upload = Upload::new(Arc::clone(allocated), staged.parts().len());
        let mut start = 0;
        for parcel in staged.parts() {
            let owed = Owed::new(&upload, target.part(start, parcel.len));
            if let Some(slot) = parcel.slot() {
                if parcel.tier == Tier::Disk && start == 0 {
                    shared.from_slot_count.fetch_add(1, Ordering::Relaxed);
                }
                enqueue(shared, owed, slot, Some(parcel));
            } else if let Some(task) = read_part(shared, owed, parcel) {
                shared.mailbox.post(task);
            }
            start += parcel.len;
        }
        let progress = upload.progress();
        match &progress.failure {
            // Parts that are on their way to the target have to be given up.
            Some(error) if progress.last.is_none() => Err(error.clone()),
            _ => {
                drop(progress);
                Ok(Self { shared: Arc::clone(shared), upload })
            }
        }
    }

    /// Returns true if `lend` would not wait.
    pub fn is_enqueued(&self) -> bool {
        self.upload.progress().is_over()
    }

    /// Waits at most `limit` until `lend` would not wait. Returns `false` if the time is over.
    pub fn wait(&self, limit: Duration) -> bool {
        self.is_enqueued() || self.shared.wait_for(limit, |_turn| self.is_enqueued())
    }

    /// The event of the end of its copy; `None` if the copy has not begun.
    pub fn loaded(&self) -> Option<Arc<Event>> {
        let progress = self.upload.progress();
        let is_enqueued = progress.coming_count == 0 && progress.failure.is_none();
        progress.last.as_ref().filter(|_| is_enqueued).map(Arc::clone)
    }

    /// The error of a load that has failed; `None` if it has not.
    pub fn failure(&self) -> Option<Error> {
        self.upload.progress().failure.clone()
    }

    /// Makes the later work of `stream` wait until the bytes are there.
    ///
    /// Returns `None` if they have not come from the disk within `limit`: call it again.
    ///
    /// Call it for each stream that uses the target.
    pub fn lend(&self, stream: UserStream, limit: Duration) -> Option<Result<()>> {
        if !self.wait(limit) {
            return None;
        }
        if let Some(error) = self.failure() {
            return Some(Err(error));
        }
        let loaded = self.loaded()?;
        let order = || {
            refuse_if_capturing(&self.shared, stream)?;
            loaded.wait_on(stream)
        };
        // Mostly the hook has asked, and the stream waits since its need was noted.
        let is_ordered = loaded.is_before(stream);
        Some(if is_ordered { order() } else { self.shared.gpu.within(|_| order()) })
    }

    /// Gives the target up. A copy to it that has not begun never begins. If a copy has begun, this
    /// returns the event of the last; the stream that gives the memory to other tensors has to wait
    /// for it.
    pub fn give_up(&self) -> Option<Arc<Event>> {
        let mut progress = self.upload.progress();
        progress.fail(Error::new(ErrorKind::Cancelled, "this load was given up"));
        progress.last.clone()
    }
}

/// Begins the read of a part whose bytes are in no slot; fails its load if they are lost.
fn read_part(shared: &Shared, owed: Owed, parcel: &Parcel) -> Option<Task> {
    let stored = match &*parcel.place() {
        Place::OnDisk(stored) => Arc::clone(stored),
        Place::Lost(error) => {
            owed.fail(error.clone());
            return None;
        }
        // Only the two places above follow on these, and the slot was gone before.
        Place::Copying(_) | Place::Writing(..) | Place::Pinned(..) => {
            unreachable!("bytes never come back into a slot")
        }
    };
    read(shared, owed, stored)
}

/// Refuses to load into a CUDA graph. A copy that was begun outside of the graph is no part of it:
/// at its next launch the graph would use other bytes.
fn refuse_if_capturing(shared: &Shared, stream: UserStream) -> Result<()> {
    if is_capturing(&shared.gpu, stream)? {
        let message = "a CUDA graph is being captured, which needs a tensor that was offloaded \
                       before; capture the forward and its backward together, or keep the tensors \
                       of a forward whose backward is captured alone out of the offload block";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok(())
}

/// Begins the read of bytes on the disk. It needs a slot and a place in the store's queue.
///
/// If one of them is missing, the returned task waits for it. `None` if the load has an error as
/// its answer.
pub fn read(shared: &Shared, owed: Owed, stored: Arc<Stored>) -> Option<Task> {
    let len = owed.target.len();
    let Some(slot) = shared.up.pool.slot(len) else { return Some(Task::Waiting(owed, stored)) };
    let slot = Arc::new(slot);
    match shared.store.read_into(&stored, slot.target(len)) {
        Ok(pending) => Some(Task::Reading(Reading { owed, slot, pending })),
        Err(error) if error.kind() == ErrorKind::Busy => Some(Task::Waiting(owed, stored)),
        Err(error) => {
            owed.fail(error);
            None
        }
    }
}

/// Puts the copy from a slot on the stream for copies up, unless the target was given up.
///
/// Pass `parcel` if the copy from the GPU may still be filling the slot.
pub fn enqueue(shared: &Shared, mut owed: Owed, slot: Arc<PinnedSlot>, parcel: Option<&Parcel>) {
    owed.settle();
    let (upload, target) = (&owed.upload, owed.target);
    let mut progress = upload.progress();
    if progress.is_over() {
        return;
    }
    let mut after = Vec::new();
    after.push(&*upload.allocated); // defence: a load waits for the memory of its target
    // The target's stream has mostly waited for this copy already, when the source was released.
    after.extend(parcel.map(|parcel| &*parcel.copied));
    // If the bytes were here, the copy begins there, or at the end of the copy before it.
    let was_here = parcel.is_some_and(|parcel| parcel.copied.is_known_reached());
    let (begun, timed_bytes) = if was_here {
        (Begun::At(Arc::clone(&upload.allocated)), target.len() as u64)
    } else {
        match shared.up.timed_bytes(target.len() as u64) {
            Some(bytes) => (Begun::Here, bytes),
            None => (Begun::Untimed, 0),
        }
    };
    let range = iter::once((&slot, target));
    let copied = shared.up.copy(&shared.copies, range, after, begun, |stream, slot, target| {
        stream.copy_up(slot, target)
    });
    match copied {
        Ok(loaded) => {
            let len = target.len();
            shared.up_bytes.fetch_add(len as u64, Ordering::Relaxed);
            progress.coming_count -= 1;
            progress.last = Some(Arc::clone(&loaded));
            let uploading = Uploading { slot, loaded, len, timed_bytes };
            shared.mailbox.post(Task::Uploading(uploading));
        }
        Err(error) => progress.fail(error),
    }
}
