//! Moves tensors of a GPU to the store and back, through pinned memory.
//!
//! ```text
//!            stream of the user                copy stream              worker
//! save       ready ●─────────────────────────► waits, copies to a slot
//! release    waits for copied ◄──────────────● copied ────────────────► write slot ─► SSD
//! load       allocated ●─────────────────────► waits, copies from slot ◄─ read ◄───── SSD
//! lend       waits for loaded ◄──────────────● loaded
//! ```
//!
//! Events order all work on the GPU; streams wait for them. The CPU waits only for room in the
//! ring, and in `lend` for a read that has not come from the disk. A stream that gives memory to
//! other tensors must first wait for the copy that uses it, even if nobody wants the copy any more:
//! for a source by [`Staged::release`], for a target by the event of [`Loading::give_up`]. It must
//! not wait while a CUDA graph is captured from it, because the wait would become a part of the
//! graph.
//!
//! Each direction has its own pinned memory. So a load finds room even if many saves wait for the
//! disk, or stay in their slots because the disk failed.

mod loading;
mod mailbox;
mod pinned_tier;
mod saving;
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
use crate::staging::shared::Shared;
use crate::store::TensorStore;

pub use loading::Loading;
pub use pinned_tier::PinnedTier;
pub use shared::PinnedBytes;
pub use staged::{Staged, Tier};

/// The order of a stream after a copy.
#[derive(Debug)]
pub enum Ordered {
    /// None: a CUDA graph is being captured from the stream.
    Captured,
    /// The stream waits, from the marked place on.
    Waits(Option<Arc<Event>>),
}

/// The reason that there is no slot for another save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The GPU has not reached the copies yet: the program is ahead of it, and waiting costs
    /// nothing.
    GpuBehind,
    /// All slots wait for the disk.
    DiskBehind,
    /// Tensors that stay in pinned memory hold all slots: waiting would not help.
    Pinned,
    /// The tensor is longer than the longest slot.
    TooLong,
}

/// Saves that were begun together.
#[derive(Debug)]
pub struct Saves {
    /// In their order, those whose copy has begun.
    pub begun: Vec<Staged>,
    /// The reason for which the next did not begin; `None` if all did.
    pub refused: Option<Refused>,
}

/// The reason for which a save did not begin.
#[derive(Debug)]
pub enum Refused {
    /// There is no slot.
    Full(Full),
    /// A CUDA graph is being captured from the stream.
    Capturing,
    /// An error of the driver, or of the store.
    Failed(Error),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The result of a save.
#[derive(Debug)]
pub enum Saved {
    /// The copy has begun.
    Begun(Staged),
    /// There is no slot: the tensor stays on the GPU, unless the caller waits and tries again.
    Full(Full),
    /// A CUDA graph is being captured from the stream: the tensor has to stay.
    Capturing,
}

/// The counts of a staging so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes copied from the GPU.
    pub down_bytes: u64,
    /// The part of `down_bytes` that was to stay in pinned memory.
    pub staying_bytes: u64,
    /// Bytes copied to the GPU.
    pub up_bytes: u64,
    /// Nanoseconds that the GPU took for the copies from it, without waits.
    pub down_ns: u64,
    /// Nanoseconds that the GPU took for the copies to it, without waits.
    pub up_ns: u64,
    /// Loads from a slot, because the bytes were still in it.
    pub from_slot_count: u64,
    /// Saves that stay in their slot because the write failed.
    pub write_failed_count: u64,
    /// Saves that stay in their slot because of `max_disk_bytes`.
    pub write_refused_count: u64,
}

/// The recent rates of the copies of one GPU, in bytes per second of the time that they took;
/// `None` before enough was copied to tell.
///
/// If both directions share a link, their times include each other's traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRates {
    /// From the GPU.
    pub down: Option<f64>,
    /// To the GPU.
    pub up: Option<f64>,
}

/// The copies between one GPU and the store.
#[derive(Debug)]
pub struct Staging(Option<Arc<Shared>>);

impl Staging {
    /// Pins the memory and starts the worker. Call it while nothing waits for the GPU. Tensors that
    /// stay lie in `tier`, which other stagings may use as well.
    pub fn open(
        gpu: &Arc<Gpu>,
        store: Arc<TensorStore>,
        pinned: PinnedBytes,
        tier: &Arc<PinnedTier>,
    ) -> Result<Self> {
        let pool = |nbytes| PinnedPool::new(gpu, nbytes);
        let shared = Arc::new(Shared::open(gpu, store, pinned, Arc::clone(tier), pool)?);
        worker::start(&shared)?;
        Ok(Self(Some(shared)))
    }

    /// Opens a staging without the CPU's memory (GPUDirect Storage): the slots lie on the GPU, and
    /// `store` is [for memory of GPUs](TensorStore::for_gpus).
    pub fn open_direct(
        gpu: &Arc<Gpu>,
        store: Arc<TensorStore>,
        ring: PinnedBytes,
        library: &'static Library,
    ) -> Result<Self> {
        let pool = |nbytes| PinnedPool::on_gpu(gpu, library, nbytes);
        let shared = Arc::new(Shared::open(gpu, store, ring, Arc::default(), pool)?);
        worker::start(&shared)?;
        Ok(Self(Some(shared)))
    }

    /// Begins the copy of `source` after the work of `stream` so far, and then its write to the
    /// disk.
    ///
    /// The allocator may reuse the source after one of its streams has waited for
    /// [`Staged::release`].
    pub fn save(&self, source: DeviceRange, stream: UserStream, tier: Tier) -> Result<Saved> {
        let Saves { mut begun, refused } = self.save_all(&[(source, tier)], stream);
        match refused {
            None => Ok(Saved::Begun(begun.remove(0))),
            Some(Refused::Full(full)) => Ok(Saved::Full(full)),
            Some(Refused::Capturing) => Ok(Saved::Capturing),
            Some(Refused::Failed(error)) => Err(error),
        }
    }

    /// Begins several saves of tensors of one stream, in their order, with the calls of the driver
    /// that one needs: the stream is asked once if it is captured, and marked once.
    pub fn save_all(&self, sources: &[(DeviceRange, Tier)], stream: UserStream) -> Saves {
        saving::save_all(self.shared(), sources, stream)
    }

    /// Makes the later work of `stream` wait for the end of a copy, unless a CUDA graph is being
    /// captured from it, because the wait would become a part of the graph. With `is_noted` it
    /// marks the place from which the stream may wait.
    pub fn order(&self, after: &Event, stream: UserStream, is_noted: bool) -> Result<Ordered> {
        if after.is_before(stream) {
            return Ok(Ordered::Waits(None)); // Nothing is added to a graph.
        }
        self.shared().gpu.within(|_| {
            if is_capturing(&self.shared().gpu, stream)? {
                return Ok(Ordered::Captured); // defence: nothing is let go into a graph
            }
            let from = is_noted.then(|| self.shared().copies.moment(stream)).transpose()?;
            after.wait_on(stream)?; // defence: a source is let go after its copy
            Ok(Ordered::Waits(from))
        })
    }

    fn shared(&self) -> &Arc<Shared> {
        self.0.as_ref().expect("it is there until this is dropped")
    }

    /// Waits at most `limit` until something has ended since `turn`. Read [`turn`](Self::turn)
    /// before the check that found too little room. Returns `false` if the time is over.
    pub fn wait_for_turn(&self, turn: u64, limit: Duration) -> bool {
        self.shared().wait_for(limit, |now| now != turn)
    }

    /// Number of times that something has ended.
    pub fn turn(&self) -> u64 {
        *self.shared().turn()
    }

    /// Begins to load a saved tensor into memory that was allocated for `stream`.
    ///
    /// Before a stream uses the target, [`Loading::lend`] makes it wait. To give the target up,
    /// call [`Loading::give_up`] first.
    pub fn load(
        &self,
        staged: &Staged,
        target: DeviceRange,
        stream: UserStream,
    ) -> Result<Loading> {
        self.load_all(&[(staged, target)], stream)?.remove(0)
    }

    /// Begins several loads into memory that was allocated for one stream.
    pub fn load_all(
        &self,
        wanted: &[(&Staged, DeviceRange)],
        stream: UserStream,
    ) -> Result<Vec<Result<Loading>>> {
        if let Some((staged, target)) = wanted.iter().find(|(it, to)| it.len() != to.len()) {
            let message = format!(
                "a load takes memory of the length that was saved: {} bytes, not {}",
                staged.len(),
                target.len()
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        self.shared().gpu.within(|_| Loading::begin_all(self.shared(), wanted, stream))
    }

    /// Returns true if this process was forked from the process that opened the staging.
    pub fn is_forked(&self) -> bool {
        self.shared().gpu.is_forked()
    }

    /// The counts so far.
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

    /// The recent rates of the copies.
    pub fn rates(&self) -> CopyRates {
        CopyRates { down: self.shared().down.rate(), up: self.shared().up.rate() }
    }

    /// The errors that left bytes in their slots since the last call: the last error beyond
    /// `max_disk_bytes` and the last of any other kind, each with its count.
    pub fn take_refusals(&self) -> Vec<(Error, u64)> {
        self.shared().refusals().take()
    }

    /// The error of the last write that left its bytes in a slot.
    pub fn last_refusal(&self) -> Option<Error> {
        self.shared().refusals().last()
    }

    /// The largest tensor that can be saved to the disk and loaded.
    pub fn longest_bytes(&self) -> usize {
        saving::longest_bytes(self.shared())
    }

    /// Bytes of the memory through which tensors pass, and the bytes of it in slots.
    pub fn pinned_bytes(&self) -> (usize, usize) {
        let (down, up) = (&self.shared().down.pool, &self.shared().up.pool);
        (down.len() + up.len(), down.live_bytes() + up.live_bytes())
    }

    /// The pinned memory in which tensors stay.
    pub fn tier(&self) -> &Arc<PinnedTier> {
        &self.shared().tier
    }

    /// Refuses new work and waits until nothing is under way: copies have ended, writes have ended,
    /// and loads that had not come from the disk have failed with `Closed`. Returns `false` if the
    /// time is over.
    pub fn close(&self, limit: Duration) -> bool {
        self.shared().mailbox.close();
        let end = Instant::now() + limit;
        loop {
            // Read before the check: the worker takes its last turn after it has left.
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
        // Dropping posts and returns: the worker ends by itself, and the rings go with it. Giving
        // the rings back waits for the GPU, so the worker must hold them last.
        let Some(shared) = self.0.take() else { return };
        let mailbox = Arc::clone(&shared.mailbox);
        drop(shared);
        mailbox.close();
    }
}
