//! Tensors of a GPU on their way to the store and back, through pinned memory.
//!
//! ```text
//!            stream of the user                copy stream              worker
//! save       ready ●─────────────────────────► waits, copies to a slot
//! release    waits for copied ◄──────────────● copied ────────────────► write slot ─► SSD
//! load       allocated ●─────────────────────► waits, copies from slot ◄─ read ◄───── SSD
//! lend       waits for loaded ◄──────────────● loaded
//! ```
//!
//! Everything on the GPU is ordered by events that streams wait for; the CPU waits only where it
//! must: for room in the ring, and in `lend` for a read that has not come from the disk. Whatever
//! is begun must be waited for by the stream that gives its memory to others, also if nobody wants
//! it any more: a source by [`Staged::release`], a target by what [`Loading::give_up`] returns.
//! Not while a CUDA graph is being made of that stream, of which the wait would become a part.
//!
//! Each direction has its own pinned memory, so that a load finds room however many saves wait for
//! the disk, or stay in their slots because it failed.

mod loading;
mod mailbox;
mod pinned_tier;
mod shared;
mod staged;
mod upload;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{DeviceRange, Event, UserStream, is_capturing};
use crate::cufile::library::Library;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::PinnedPool;
use crate::staging::mailbox::Task;
use crate::staging::shared::Shared;
use crate::staging::staged::Parcel;
use crate::store::TensorStore;

pub use loading::Loading;
pub use shared::PinnedBytes;
pub use staged::{Staged, Tier};

/// How a stream is ordered after a copy.
#[derive(Debug)]
pub enum Ordered {
    /// Not at all: a CUDA graph is being made of it.
    Captured,
    /// It waits, from the place that was marked.
    Waits(Option<Event>),
}

/// Why there is no slot for another save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The GPU has not come to the copies yet: the program is ahead of it, and waiting costs
    /// nothing.
    GpuBehind,
    /// All slots wait for the disk.
    DiskBehind,
    /// All slots are taken for good, by what stays in pinned memory: waiting would not help.
    Pinned,
    /// No slot can ever be as long as this tensor.
    TooLong,
}

/// What came of a save.
#[derive(Debug)]
pub enum Saved {
    /// The copy has begun.
    Begun(Staged),
    /// It has not: the tensor stays where it is, unless somebody waits and tries again.
    Full(Full),
    /// A CUDA graph is being made of the stream: the tensor has to stay.
    Capturing,
}

/// What a staging did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes copied from the GPU.
    pub down_bytes: u64,
    /// Of these, bytes that were to stay in pinned memory.
    pub staying_bytes: u64,
    /// Bytes copied to the GPU.
    pub up_bytes: u64,
    /// Nanoseconds that the GPU took for the copies from it, one after the other, waits excluded.
    pub down_ns: u64,
    /// The same of the copies to it.
    pub up_ns: u64,
    /// Loads that came from a slot, because the bytes had not left it for the disk.
    pub from_slot_count: u64,
    /// Saves whose write failed, so that they stay in their slot.
    pub write_failed_count: u64,
    /// The same of those that `max_disk_bytes` did not allow.
    pub write_refused_count: u64,
}

/// What the copies of one GPU did of late, in bytes per second of the time that they took; `None`
/// before enough was copied to tell.
///
/// Where both directions share a link, what both did at once is in their times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRates {
    /// From the GPU.
    pub down: Option<f64>,
    /// To the GPU.
    pub up: Option<f64>,
}

/// The way between one GPU and the store.
#[derive(Debug)]
pub struct Staging(Option<Arc<Shared>>);

impl Staging {
    /// Pins the memory and starts the worker; call it where nothing waits for the GPU.
    pub fn open(gpu: &Arc<Gpu>, store: Arc<TensorStore>, pinned: PinnedBytes) -> Result<Self> {
        let pool = |nbytes| PinnedPool::new(gpu, nbytes);
        let shared = Arc::new(Shared::open(gpu, store, pinned, pool)?);
        worker::start(&shared)?;
        Ok(Self(Some(shared)))
    }

    /// The same past the CPU's memory (GPUDirect Storage): the slots lie on the GPU, and `store` is
    /// one [for memory of GPUs](TensorStore::for_gpus).
    pub fn open_direct(
        gpu: &Arc<Gpu>,
        store: Arc<TensorStore>,
        ring: PinnedBytes,
        library: &'static Library,
    ) -> Result<Self> {
        let pool = |nbytes| PinnedPool::on_gpu(gpu, library, nbytes);
        let shared = Arc::new(Shared::open(gpu, store, ring, pool)?);
        worker::start(&shared)?;
        Ok(Self(Some(shared)))
    }

    /// Begins the copy of what `stream` has computed, and its way to the disk.
    ///
    /// The source may be given to others once a stream of its allocator has waited for
    /// [`Staged::release`].
    pub fn save(&self, source: DeviceRange, stream: UserStream, tier: Tier) -> Result<Saved> {
        self.shared().gpu.within(|_| self.begin_save(source, stream, tier))
    }

    fn begin_save(&self, source: DeviceRange, stream: UserStream, tier: Tier) -> Result<Saved> {
        let shared = self.shared();
        if is_capturing(&shared.gpu, stream)? {
            return Ok(Saved::Capturing);
        }
        if tier == Tier::Disk && source.len() > self.longest_bytes() {
            return Ok(Saved::Full(Full::TooLong));
        }
        shared.mailbox.refuse_if_closed()?;
        let slot = match tier {
            Tier::Disk => shared.down.pool.slot(source.len()),
            Tier::Pinned => shared.tier.slot(source.len()),
        };
        let Some(slot) = slot else {
            let full = if tier == Tier::Pinned { Full::Pinned } else { self.why_full() };
            return Ok(Saved::Full(full));
        };
        let slot = Arc::new(slot);
        // The copy begins there, or where the one before it ends.
        let ready = Arc::new(shared.copies.record(stream)?);
        // defence: a copy down waits for what computes its source
        let after: [&Event; 1] = [&ready];
        let begun = Some(Arc::clone(&ready));
        let copied = shared.down.copy(&shared.copies, &slot, &after, begun, |stream, slot| {
            stream.copy_down(source, slot)
        })?;
        shared.down_bytes.fetch_add(source.len() as u64, Ordering::Relaxed);
        if tier == Tier::Pinned {
            shared.staying_bytes.fetch_add(source.len() as u64, Ordering::Relaxed);
        }
        let parcel = Arc::new(Parcel::new(slot, copied, source.len(), tier));
        shared.copying_count.fetch_add(1, Ordering::Relaxed);
        shared.mailbox.post(Task::Copying(Arc::clone(&parcel)));
        Ok(Saved::Begun(Staged::new(parcel)))
    }

    /// Makes what is put on `stream` from now on wait for the end of a copy, unless a CUDA graph is
    /// being made of it, of which the wait would become a part. Marks where the stream may wait, if
    /// that `is_noted`.
    pub fn order(&self, after: &Event, stream: UserStream, is_noted: bool) -> Result<Ordered> {
        self.shared().gpu.within(|_| {
            if is_capturing(&self.shared().gpu, stream)? {
                return Ok(Ordered::Captured); // defence: nothing is let go into a graph
            }
            let is_long_ago = after.is_known_reached();
            let from = (is_noted && !is_long_ago).then(|| self.shared().copies.record(stream));
            after.wait_on(stream)?; // defence: a source is let go after its copy
            Ok(Ordered::Waits(from.transpose()?))
        })
    }

    fn shared(&self) -> &Arc<Shared> {
        self.0.as_ref().expect("it is there until this is dropped")
    }

    fn why_full(&self) -> Full {
        if self.shared().writing_count.load(Ordering::Relaxed) > 0 {
            Full::DiskBehind
        } else if self.shared().copying_count.load(Ordering::Relaxed) > 0 {
            Full::GpuBehind
        } else {
            Full::Pinned
        }
    }

    /// Waits at most `limit` until something has ended since `turn`, which [`turn`](Self::turn)
    /// told before the room was found too small; `false` if the time is over.
    pub fn wait_for_turn(&self, turn: u64, limit: Duration) -> bool {
        self.shared().wait_for(limit, |now| now != turn)
    }

    /// How often something has ended.
    pub fn turn(&self) -> u64 {
        *self.shared().turn()
    }

    /// Begins to bring back what was saved, into memory that was allocated for `stream`.
    ///
    /// Who uses the target makes its stream wait by [`Loading::lend`]; who gives it up calls
    /// [`Loading::give_up`] first.
    pub fn load(
        &self,
        staged: &Staged,
        target: DeviceRange,
        stream: UserStream,
    ) -> Result<Loading> {
        if target.len() != staged.len() {
            let message = format!(
                "a load takes memory of the length that was saved: {} bytes, not {}",
                staged.len(),
                target.len()
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        self.shared().gpu.within(|_| Loading::begin(self.shared(), staged, target, stream))
    }

    /// Whether this process was forked from the one that opened it.
    pub fn is_forked(&self) -> bool {
        self.shared().gpu.is_forked()
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let refusals = self.shared().refusals();
        Counts {
            down_bytes: count(&self.shared().down_bytes),
            up_bytes: count(&self.shared().up_bytes),
            down_ns: self.shared().down.copy_ns(),
            up_ns: self.shared().up.copy_ns(),
            staying_bytes: count(&self.shared().staying_bytes),
            from_slot_count: count(&self.shared().from_slot_count),
            write_failed_count: refusals.failed_count,
            write_refused_count: refusals.refused_count,
        }
    }

    /// What the copies did of late.
    pub fn rates(&self) -> CopyRates {
        CopyRates { down: self.shared().down.rate(), up: self.shared().up.rate() }
    }

    /// Why bytes stayed in their slots that were to be written, since this was called last: of
    /// those beyond `max_disk_bytes`, and of all others, the last error and how many there were.
    pub fn take_refusals(&self) -> Vec<(Error, u64)> {
        self.shared().refusals().take()
    }

    /// Why the last save was not written that stayed in its slot.
    pub fn last_refusal(&self) -> Option<Error> {
        self.shared().refusals().last()
    }

    /// The longest memory that can be saved to the disk, and brought back.
    pub fn longest_bytes(&self) -> usize {
        let shared = self.shared();
        shared.down.pool.slot_bytes_max().min(shared.up.pool.slot_bytes_max())
    }

    /// Bytes of pinned memory, and how many of them are in slots.
    pub fn pinned_bytes(&self) -> (usize, usize) {
        let pools = [&self.shared().down.pool, &self.shared().up.pool];
        let sizes = pools.iter().map(|pool| (pool.len(), pool.live_bytes()));
        sizes.fold(self.tier_bytes(), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Bytes of the pinned memory in which tensors stay, and how many of them are in slots.
    pub fn tier_bytes(&self) -> (usize, usize) {
        self.shared().tier.bytes()
    }

    /// Pins one more block for tensors that stay there; call it between steps.
    pub fn grow_tier(&self, nbytes: usize) -> Result<()> {
        self.shared().tier.grow(&self.shared().gpu, nbytes)
    }

    /// Refuses new work and waits until nothing is under way: the copies have ended, what was to
    /// be written is written, and loads that had not come from the disk have failed with `Closed`.
    pub fn close(&self, limit: Duration) -> bool {
        self.shared().mailbox.close();
        let end = Instant::now() + limit;
        loop {
            // Before the look: the worker takes its last turn after it has left.
            let turn = self.turn();
            if self.shared().mailbox.is_left() {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.wait_for_turn(turn, left);
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A finalizer posts and returns: the worker ends by itself, and with it go the rings. To
        // give them back waits for the GPU, so the worker has to be the last one that has them.
        let Some(shared) = self.0.take() else { return };
        let mailbox = Arc::clone(&shared.mailbox);
        drop(shared);
        mailbox.close();
    }
}
