//! What the threads of the program share with the worker.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{Event, EventPool, Stream};
use crate::error::{Error, Result};
use crate::memory::pinned::{PinnedPool, PinnedSlot};
use crate::staging::mailbox::Mailbox;
use crate::store::TensorStore;

/// How much memory each direction gets, in bytes: pinned memory of the CPU, or for GPUDirect
/// Storage memory of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct PinnedBytes {
    /// For what goes to the disk, and for what stays in pinned memory.
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
    pub mailbox: Mailbox,
    /// Saves whose copy has not been seen to end, and those whose write has not.
    pub copying_count: AtomicUsize,
    pub writing_count: AtomicUsize,
    /// How often something has ended; who waits for room or for a load waits for it to change.
    turn: Mutex<u64>,
    turned: Condvar,
    pub down_bytes: AtomicU64,
    pub up_bytes: AtomicU64,
    pub from_slot_count: AtomicU64,
    pub write_failed_count: AtomicU64,
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
            Ok::<_, Error>(Lane { pool, stream, copy_ns: AtomicU64::new(0) })
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            store,
            events: EventPool::new(gpu),
            copies: EventPool::timed(gpu),
            down: lane(pinned.down)?,
            up: lane(pinned.up)?,
            mailbox: Mailbox::default(),
            copying_count: AtomicUsize::new(0),
            writing_count: AtomicUsize::new(0),
            turn: Mutex::new(0),
            turned: Condvar::new(),
            down_bytes: AtomicU64::new(0),
            up_bytes: AtomicU64::new(0),
            from_slot_count: AtomicU64::new(0),
            write_failed_count: AtomicU64::new(0),
        })
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

    /// Counts the time of a copy that has ended, which had to wait for the end of the one before.
    pub fn count(&self, copied: &Event, before: Option<&Event>) {
        let since_before = before.and_then(|before| copied.since(before));
        let took = copied.took().map(|took| since_before.map_or(took, |since| took.min(since)));
        let took_ns = took.map_or(0, |took| took.as_nanos() as u64);
        self.copy_ns.fetch_add(took_ns, Ordering::Relaxed);
    }

    /// How long all copies took that were counted, in nanoseconds.
    pub fn copy_ns(&self) -> u64 {
        self.copy_ns.load(Ordering::Relaxed)
    }
}
