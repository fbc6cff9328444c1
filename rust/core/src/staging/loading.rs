//! A load on its way back to a GPU, from a slot that still holds the bytes or from the disk.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::cuda::stream::{DeviceRange, Event, UserStream, is_capturing};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::PinnedSlot;
use crate::staging::mailbox::{Reading, Task, Uploading};
use crate::staging::shared::Shared;
use crate::staging::staged::{Parcel, Place, Staged, Tier};
use crate::staging::upload::{Owed, Progress, Upload};
use crate::stored::Stored;

/// A load that has begun.
#[derive(Debug)]
pub struct Loading {
    shared: Arc<Shared>,
    upload: Arc<Upload>,
}

impl Loading {
    pub(super) fn begin(
        shared: &Arc<Shared>,
        staged: &Staged,
        target: DeviceRange,
        stream: UserStream,
    ) -> Result<Self> {
        shared.mailbox.refuse_if_closed()?;
        refuse_if_capturing(shared, stream)?;
        let upload = Upload::new(target, shared.events.record(stream)?);
        let parcel = staged.parcel();
        if let Some(slot) = parcel.slot() {
            if parcel.tier == Tier::Disk {
                shared.from_slot_count.fetch_add(1, Ordering::Relaxed);
            }
            enqueue(shared, &upload, slot, Some(parcel));
            if let Progress::Failed(error) = &*upload.progress() {
                return Err(error.clone());
            }
            return Ok(Self { shared: Arc::clone(shared), upload });
        }
        let stored = match &*parcel.place() {
            Place::OnDisk(stored) => Arc::clone(stored),
            Place::Lost(error) => return Err(error.clone()),
            // Only the two places above follow on these, and the slot was gone before.
            Place::Copying(_) | Place::Writing(..) | Place::Pinned(..) => {
                unreachable!("bytes never come back into a slot")
            }
        };
        let loading = Self { shared: Arc::clone(shared), upload: Arc::clone(&upload) };
        let owed = Owed(upload);
        shared.mailbox.post(read(shared, owed, stored)?);
        Ok(loading)
    }

    /// Returns true if `lend` would not wait.
    pub fn is_enqueued(&self) -> bool {
        !matches!(&*self.upload.progress(), Progress::Coming)
    }

    /// Waits at most `limit` until `lend` would not wait. Returns `false` if the time is over.
    pub fn wait(&self, limit: Duration) -> bool {
        self.is_enqueued() || self.shared.wait_for(limit, |_turn| self.is_enqueued())
    }

    /// The event of the end of its copy; `None` if the copy has not begun.
    pub fn loaded(&self) -> Option<Arc<Event>> {
        match &*self.upload.progress() {
            Progress::Enqueued(loaded) => Some(Arc::clone(loaded)),
            Progress::Coming | Progress::Failed(_) => None,
        }
    }

    /// The error of a load that has failed; `None` if it has not.
    pub fn failure(&self) -> Option<Error> {
        match &*self.upload.progress() {
            Progress::Failed(error) => Some(error.clone()),
            Progress::Coming | Progress::Enqueued(_) => None,
        }
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
        Some(match &*self.upload.progress() {
            Progress::Coming => return None,
            Progress::Enqueued(loaded) => self.shared.gpu.within(|_| {
                refuse_if_capturing(&self.shared, stream)?;
                loaded.wait_on(stream)
            }),
            Progress::Failed(error) => Err(error.clone()),
        })
    }

    /// Gives the target up. A copy to it that has not begun never begins. If the copy has begun,
    /// this returns its event; the stream that gives the memory to other tensors has to wait for
    /// it.
    pub fn give_up(&self) -> Option<Arc<Event>> {
        let mut progress = self.upload.progress();
        match &*progress {
            Progress::Coming => {
                let message = "this load was given up";
                *progress = Progress::Failed(Error::new(ErrorKind::Cancelled, message));
                None
            }
            Progress::Enqueued(loaded) => Some(Arc::clone(loaded)),
            Progress::Failed(_) => None,
        }
    }
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
/// If one of them is missing, the returned task waits for it. The load gets an error as its answer,
/// too.
pub fn read(shared: &Shared, upload: Owed, stored: Arc<Stored>) -> Result<Task> {
    let len = upload.0.target.len();
    let Some(slot) = shared.up.pool.slot(len) else { return Ok(Task::Waiting(upload, stored)) };
    let slot = Arc::new(slot);
    match shared.store.read_into(&stored, slot.target(len)) {
        Ok(pending) => Ok(Task::Reading(Reading { upload, slot, pending })),
        Err(error) if error.kind() == ErrorKind::Busy => Ok(Task::Waiting(upload, stored)),
        Err(error) => {
            upload.0.fail(error.clone());
            Err(error)
        }
    }
}

/// Puts the copy from a slot on the stream for copies up, unless the target was given up.
///
/// Pass `parcel` if the copy from the GPU may still be filling the slot.
pub fn enqueue(shared: &Shared, upload: &Upload, slot: Arc<PinnedSlot>, parcel: Option<&Parcel>) {
    let mut progress = upload.progress();
    if !matches!(*progress, Progress::Coming) {
        return;
    }
    let mut after = Vec::new();
    after.push(&upload.allocated); // defence: a load waits for the memory of its target
    // The target's stream has mostly waited for this copy already, when the source was released.
    after.extend(parcel.map(|parcel| &*parcel.copied));
    let copied = shared.up.copy(&shared.copies, &slot, &after, None, |stream, slot| {
        stream.copy_up(slot, upload.target)
    });
    *progress = match copied {
        Ok(loaded) => {
            let loaded = Arc::new(loaded);
            let len = upload.target.len();
            shared.up_bytes.fetch_add(len as u64, Ordering::Relaxed);
            let uploading = Uploading { slot, loaded: Arc::clone(&loaded), len };
            shared.mailbox.post(Task::Uploading(uploading));
            Progress::Enqueued(loaded)
        }
        Err(error) => Progress::Failed(error),
    };
}
