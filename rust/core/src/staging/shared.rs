//! What the threads of the program share with the worker.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{Event, EventPool, Stream};
use crate::disk::statistics::Recent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::{PinnedPool, PinnedSlot};
use crate::staging::mailbox::Mailbox;
use crate::staging::pinned_tier::PinnedTier;
use crate::store::TensorStore;

/// How much memory each direction gets, in bytes: pinned memory of the CPU, or for GPUDirect
/// Storage memory of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct PinnedBytes {
    /// For what goes to the disk.
    pub down: usize,
    /// For what comes back.
    pub up: usize,
}

/// One direction: its memory, and the stream that copies.
#[derive(Debug)]
pub struct Lane {
    pub pool: Arc<PinnedPool>,
    pub stream: Stream,
    /// How long its copies took, in nanoseconds of the GPU, without what they waited for.
    copy_ns: AtomicU64,
    recent: Mutex<Recent>,
}

/// Writes that left their bytes in a slot, by why.
#[derive(Debug, Default)]
pub struct Refusals {
    /// Beyond `max_disk_bytes`, and for another reason: their counts since the session began.
    pub refused_count: u64,
    pub failed_count: u64,
    /// The last of either kind, and how many there were, since somebody was told.
    untold: Vec<(Error, u64)>,
    last: Option<Error>,
}

impl Refusals {
    fn note(&mut self, error: &Error) {
        // Nobody asks any more for what a closed store did not write.
        if matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Closed) {
            return;
        }
        let is_bound = |error: &Error| error.kind() == ErrorKind::OverBound;
        *(if is_bound(error) { &mut self.refused_count } else { &mut self.failed_count }) += 1;
        self.last = Some(error.clone());
        match self.untold.iter_mut().find(|(one, _)| is_bound(one) == is_bound(error)) {
            Some((last, count)) => (*last, *count) = (error.clone(), *count + 1),
            None => self.untold.push((error.clone(), 1)),
        }
    }

    /// What came since this was called last: at most one error of each kind, and how many.
    pub fn take(&mut self) -> Vec<(Error, u64)> {
        std::mem::take(&mut self.untold)
    }

    /// Why the last of them was not written.
    pub fn last(&self) -> Option<Error> {
        self.last.clone()
    }
}

/// What all threads share.
pub struct Shared {
    pub gpu: Arc<Gpu>,
    pub store: Arc<TensorStore>,
    pub events: Arc<EventPool>,
    /// Of copies, which are timed.
    pub copies: Arc<EventPool>,
    pub down: Lane,
    pub up: Lane,
    pub tier: PinnedTier,
    pub mailbox: Arc<Mailbox>,
    /// Saves whose copy has not been seen to end, and those whose write has not.
    pub copying_count: AtomicUsize,
    pub writing_count: AtomicUsize,
    /// How often something has ended; who waits for room or for a load waits for it to change.
    turn: Mutex<u64>,
    turned: Condvar,
    pub down_bytes: AtomicU64,
    pub up_bytes: AtomicU64,
    pub staying_bytes: AtomicU64,
    pub from_slot_count: AtomicU64,
    refusals: Mutex<Refusals>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, down, up, .. } = self;
        let mut shared = formatter.debug_struct("Shared");
        shared.field("gpu", gpu).field("down", down).field("up", up).finish_non_exhaustive()
    }
}

impl Shared {
    /// Pins the memory of both directions by `pool`, and makes their streams.
    pub fn open(
        gpu: &Arc<Gpu>,
        store: Arc<TensorStore>,
        pinned: PinnedBytes,
        pool: impl Fn(usize) -> Result<Arc<PinnedPool>>,
    ) -> Result<Self> {
        let lane = |nbytes| {
            let (pool, stream) = (pool(nbytes)?, Stream::new(gpu)?);
            let (copy_ns, recent) = (AtomicU64::new(0), Mutex::default());
            Ok::<_, Error>(Lane { pool, stream, copy_ns, recent })
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            store,
            events: EventPool::new(gpu),
            copies: EventPool::timed(gpu),
            down: lane(pinned.down)?,
            up: lane(pinned.up)?,
            tier: PinnedTier::default(),
            mailbox: Arc::default(),
            copying_count: AtomicUsize::new(0),
            writing_count: AtomicUsize::new(0),
            turn: Mutex::new(0),
            turned: Condvar::new(),
            down_bytes: AtomicU64::new(0),
            up_bytes: AtomicU64::new(0),
            staying_bytes: AtomicU64::new(0),
            from_slot_count: AtomicU64::new(0),
            refusals: Mutex::default(),
        })
    }

    /// Writes that left their bytes in a slot.
    pub fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a write that left its bytes in a slot.
    pub fn note_refusal(&self, error: &Error) {
        self.refusals().note(error);
    }

    pub fn turn(&self) -> MutexGuard<'_, u64> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that something has ended.
    pub fn take_turn(&self) {
        *self.turn() += 1;
        self.turned.notify_all();
    }

    /// Waits at most `limit` until something has ended that makes `is_enough` true.
    pub fn wait_for(&self, limit: Duration, mut is_enough: impl FnMut(u64) -> bool) -> bool {
        let turn = self.turn();
        let waited = self.turned.wait_timeout_while(turn, limit, |turn| !is_enough(*turn));
        let (_turn, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }
}

impl Lane {
    /// Copies once all of `after` have been reached; returns the event that tells the end, and how
    /// long it took since `begun`, or since the stream had come to it.
    ///
    /// If a call fails, the copy may be under way all the same. Then the stream is waited for, and
    /// if that fails too, the slot is never given to others.
    pub fn copy(
        &self,
        events: &Arc<EventPool>,
        slot: &Arc<PinnedSlot>,
        after: &[&Event],
        begun: Option<Arc<Event>>,
        copy: impl FnOnce(&Stream, &PinnedSlot) -> Result<()>,
    ) -> Result<Event> {
        for event in after {
            event.wait_on(self.stream.handle())?;
        }
        let begun = match begun {
            Some(begun) => begun,
            None => Arc::new(events.record(self.stream.handle())?),
        };
        let ended =
            copy(&self.stream, slot).and_then(|()| events.record_end(begun, self.stream.handle()));
        if ended.is_err() && self.stream.synchronize().is_err() {
            std::mem::forget(Arc::clone(slot));
        }
        ended
    }

    /// Counts the time of a copy of so many bytes that has ended, which had to wait for the end of
    /// the one before.
    pub fn count(&self, copied: &Event, before: Option<&Event>, len: usize) {
        let Some(took) = copied.took() else { return };
        let since_before = before.and_then(|before| copied.since(before));
        let took_ns = since_before.map_or(took, |since| took.min(since)).as_nanos() as u64;
        self.copy_ns.fetch_add(took_ns, Ordering::Relaxed);
        self.recent().add(len as u64, took_ns);
    }

    /// Bytes per second of its copies of late; `None` before enough was copied to tell.
    pub fn rate(&self) -> Option<f64> {
        self.recent().ns_per_byte().map(|ns_per_byte| 1e9 / ns_per_byte)
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long all copies took that were counted, in nanoseconds.
    pub fn copy_ns(&self) -> u64 {
        self.copy_ns.load(Ordering::Relaxed)
    }
}
