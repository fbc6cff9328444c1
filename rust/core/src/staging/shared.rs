//! The state that the threads of the program share with the worker.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{DeviceRange, Event, EventPool, Stream};
use crate::disk::statistics::Recent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::{PinnedPool, PinnedSlot};
use crate::staging::mailbox::Mailbox;
use crate::staging::pinned_tier::PinnedTier;
use crate::store::TensorStore;

/// The memory of each direction, in bytes: pinned memory of the CPU, or memory of the GPU for
/// GPUDirect Storage.
#[derive(Clone, Copy, Debug)]
pub struct PinnedBytes {
    /// For tensors that go to the disk.
    pub down: usize,
    /// For tensors that come back.
    pub up: usize,
}

/// One direction: its memory, and the stream that copies.
#[derive(Debug)]
pub struct Lane {
    pub pool: Arc<PinnedPool>,
    pub stream: Stream,
    /// Nanoseconds that the GPU took for its copies, without waits.
    copy_ns: AtomicU64,
    recent: Mutex<Recent>,
    /// Bytes copied since the last timed copy.
    untimed_bytes: Mutex<u64>,
}

/// The moment from which the time of copies counts.
pub enum Begun {
    /// This event.
    At(Arc<Event>),
    /// The beginning of the copies, which gets an event.
    Here,
    /// None: other copies tell the rate.
    Untimed,
}

/// The bytes copied to a GPU from one timed copy to the next.
const TIMED_EVERY_BYTES: u64 = 16 << 20;

/// Writes that left their bytes in a slot, by reason.
#[derive(Debug, Default)]
pub struct Refusals {
    /// Number of writes beyond `max_disk_bytes`, and of writes that failed for another reason,
    /// since the session began.
    pub refused_count: u64,
    pub failed_count: u64,
    /// The last error of either kind and the number of errors since the last call of `take`.
    unreported: Vec<(Error, u64)>,
    last: Option<Error>,
}

impl Refusals {
    fn note(&mut self, error: &Error) {
        // After a close or a cancel nobody needs the write.
        if matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Closed) {
            return;
        }
        let is_bound = |error: &Error| error.kind() == ErrorKind::OverBound;
        *(if is_bound(error) { &mut self.refused_count } else { &mut self.failed_count }) += 1;
        self.last = Some(error.clone());
        match self.unreported.iter_mut().find(|(known, _)| is_bound(known) == is_bound(error)) {
            Some((last, count)) => (*last, *count) = (error.clone(), *count + 1),
            None => self.unreported.push((error.clone(), 1)),
        }
    }

    /// The errors since the last call: at most one of each kind, with its count.
    pub fn take(&mut self) -> Vec<(Error, u64)> {
        std::mem::take(&mut self.unreported)
    }

    /// The error of the last of these writes.
    pub fn last(&self) -> Option<Error> {
        self.last.clone()
    }
}

/// The state that all threads share.
pub struct Shared {
    pub gpu: Arc<Gpu>,
    pub store: Arc<TensorStore>,
    pub events: Arc<EventPool>,
    /// Events with times, for copies.
    pub copies: Arc<EventPool>,
    pub down: Lane,
    pub up: Lane,
    pub tier: Arc<PinnedTier>,
    pub mailbox: Arc<Mailbox>,
    /// Number of saves whose copy has not been seen to end, and of saves whose write has not.
    pub copying_count: AtomicUsize,
    pub writing_count: AtomicUsize,
    /// Number of times that something has ended. Threads that wait for room or for a load watch it.
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
        tier: Arc<PinnedTier>,
        pool: impl Fn(usize) -> Result<Arc<PinnedPool>>,
    ) -> Result<Self> {
        let lane = |nbytes| {
            let (pool, stream) = (pool(nbytes)?, Stream::new(gpu)?);
            let (copy_ns, recent) = (AtomicU64::new(0), Mutex::default());
            let untimed_bytes = Mutex::default();
            Ok::<_, Error>(Lane { pool, stream, copy_ns, recent, untimed_bytes })
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            store,
            events: EventPool::new(gpu),
            copies: EventPool::timed(gpu),
            down: lane(pinned.down)?,
            up: lane(pinned.up)?,
            tier,
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

    /// Counts that something has ended, and wakes the threads that wait.
    pub fn take_turn(&self) {
        *self.turn() += 1;
        self.turned.notify_all();
    }

    /// Waits at most `limit` until `is_enough` returns true for the number of turns.
    pub fn wait_for(&self, limit: Duration, mut is_enough: impl FnMut(u64) -> bool) -> bool {
        let turn = self.turn();
        let waited = self.turned.wait_timeout_while(turn, limit, |turn| !is_enough(*turn));
        let (_turn, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }
}

impl Lane {
    /// Copies a group of slots, each with another range, after all events in `after` have been
    /// reached. Returns the event of the end of all, which measures the time since `begun`.
    ///
    /// If a call fails, copies may be under way all the same. Then this waits for the stream. If
    /// that fails too, the slots are never used again.
    pub fn copy<'a>(
        &self,
        events: &Arc<EventPool>,
        group: impl Iterator<Item = (&'a Arc<PinnedSlot>, DeviceRange)> + Clone,
        after: impl IntoIterator<Item = &'a Event>,
        begun: Begun,
        copy: impl Fn(&Stream, &PinnedSlot, DeviceRange) -> Result<()>,
    ) -> Result<Arc<Event>> {
        for event in after {
            event.wait_on(self.stream.handle())?;
        }
        let begun = match begun {
            Begun::At(begun) => Some(begun),
            Begun::Here => Some(events.record(self.stream.handle())?),
            Begun::Untimed => None,
        };
        let mut copied = group.clone().map(|(slot, range)| copy(&self.stream, slot, range));
        let ended = copied
            .try_for_each(|answer| answer)
            .and_then(|()| events.record_after(begun, self.stream.handle()));
        if ended.is_err() && self.stream.synchronize().is_err() {
            group.for_each(|(slot, _)| std::mem::forget(Arc::clone(slot)));
        }
        ended.map(Arc::new)
    }

    /// Returns the bytes for which the time of the next copy stands, which has `len` bytes; `None`
    /// if it needs no time. Once the rate is known, one copy in 16 MiB is timed, as an event costs
    /// a call of the driver.
    pub fn timed_bytes(&self, len: u64) -> Option<u64> {
        let is_known = self.rate().is_some();
        let mut untimed = self.untimed();
        let bytes = *untimed + len;
        let is_timed = !is_known || bytes >= TIMED_EVERY_BYTES;
        *untimed = if is_timed { 0 } else { bytes };
        is_timed.then_some(bytes)
    }

    /// Counts the time of copies of `len` bytes that have ended, if they were timed; it stands for
    /// `timed_bytes`. They had to wait for the end of `before`.
    pub fn count(&self, copied: &Event, before: Option<&Event>, len: u64, timed_bytes: u64) {
        let Some(took) = copied.took() else { return };
        let since_before = before.and_then(|before| copied.since(before));
        let own = since_before.map_or(took, |since| took.min(since));
        let took_ns = (own.as_nanos() as f64 * timed_bytes as f64 / len as f64) as u64;
        self.copy_ns.fetch_add(took_ns, Ordering::Relaxed);
        self.recent().add(timed_bytes, took_ns);
    }

    /// Recent bytes per second of its copies; `None` before enough was copied to tell.
    pub fn rate(&self) -> Option<f64> {
        self.recent().ns_per_byte().map(|ns_per_byte| 1e9 / ns_per_byte)
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds that its copies took; those since the last timed copy, by the recent rate.
    pub fn copy_ns(&self) -> u64 {
        let untimed_ns = *self.untimed() as f64 * self.recent().ns_per_byte().unwrap_or(0.0);
        self.copy_ns.load(Ordering::Relaxed) + untimed_ns as u64
    }

    fn untimed(&self) -> MutexGuard<'_, u64> {
        self.untimed_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
