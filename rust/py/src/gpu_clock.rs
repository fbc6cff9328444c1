//! The times of rounds on a GPU, by the clock of the GPU.
//!
//! Python runs ahead of a GPU, so the moments of hooks are not those of the GPU. A round that
//! begins on a GPU records events on the streams of each of its GPUs: at the first pack there, and
//! at packs and needs of its tensors. The policy learns from the round once the GPUs have reached
//! all of them. A round with tensors that were packed while a CUDA graph was being captured has the
//! moments of the hooks instead. If Python is so far ahead that too many rounds have events
//! already, the next rounds get none, and nothing is learned from them.
//!
//! No event tells how the clocks of two GPUs differ. The hooks' moments of their first packs stand
//! for that: plans compare times of two GPUs only where these share the disk.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::hook;
use ssdtrain_core::cuda::stream::{Event, EventPool, ask_all, is_capturing};
use ssdtrain_core::round::Item;

use crate::error::raised;
use crate::gpu::user_stream;
use crate::gpu_calls::GpuStream;
use crate::gpu_waits::Noted;
use crate::saved_tensor::SharedRound;

/// The bytes that are packed, or needed, between two events: small tensors that follow each other
/// share one.
const MARK_BYTES: u64 = 8 << 20;
/// The most rounds that have events at once.
const MARKED_MAX: usize = 16;
/// Python is not ahead of a GPU that comes to the end of a round within this share of the time of
/// the hooks, or this much later: some operations are always in its queue.
const AHEAD_SHARE: f64 = 1.02;
const AHEAD_S: f64 = 200e-6;
/// A round loses its events after this many later rounds: the program holds its graph, and it may
/// never end.
const AGE_MAX: u64 = 256;

/// The clocks of the GPUs of one session.
#[derive(Default)]
pub struct GpuClock {
    pools: Mutex<Vec<(usize, Arc<EventPool>)>>,
    marked: Mutex<VecDeque<Marked>>,
    /// Rounds that began on a GPU.
    begun_count: AtomicU64,
}

/// A round with events.
struct Marked {
    round: SharedRound,
    /// Its number in the order of beginning.
    number: u64,
    began: Instant,
    /// The clock of the GPU of its first tensor, and those of its other GPUs.
    clocks: Vec<Clock>,
    /// The time until the last event of a need was recorded, by the clock of the hooks.
    recorded_s: f64,
    /// True if its GPUs were seen behind after its end.
    was_awaited: bool,
    /// True if a GPU has no clock, as a CUDA graph was being captured.
    is_unclear: bool,
}

/// The events of a round on one GPU.
struct Clock {
    gpu: usize,
    /// Its first event, and that moment by the hooks since the round began.
    begun: Arc<Event>,
    begun_s: f64,
    packed: Marks,
    needed: Marks,
    /// For each load, the event of the need and the event of its end.
    loads: Vec<(Arc<Event>, Arc<Event>)>,
    /// The copies from its GPU, and the waits of streams for copies of memory that was let go.
    noted: Noted,
    /// Key and event of the storage that is needed now, until its load is known.
    needed_now: Option<(i64, Arc<Event>)>,
}

/// The events of the packs, or of the needs, of a round.
#[derive(Default)]
struct Marks {
    events: Vec<Arc<Event>>,
    /// By the key of a storage, the place of its event.
    places: HashMap<i64, usize>,
    /// The bytes since the last event.
    nbytes: u64,
}

/// A use of a storage by the program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StorageUse {
    Packed,
    Needed {
        /// True if the GPU may have to wait for it; then it gets an event of its own.
        waits: bool,
    },
}

/// The times of a round by the clocks of its GPUs, in seconds since it began.
#[derive(Default)]
pub struct GpuTimes {
    pub items: Vec<Item>,
    /// By key, the ends of the copies from a GPU, since the first pack there.
    pub copied: Vec<(i64, f64)>,
    /// The moment of the last need.
    pub ended_s: f64,
    /// The waits of the GPUs for loads.
    pub load_stall_s: f64,
    /// The same with the waits for copies that should have ended by the plan.
    pub stall_s: f64,
    /// True if the GPU of the first tensor had done all work as soon as Python gave it.
    pub waits_for_python: bool,
}

impl GpuClock {
    /// Notes that a round begins with a tensor of this stream, or of the CPU (`None`).
    pub fn begin(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        stream: Option<GpuStream>,
    ) -> PyResult<()> {
        let Some(stream) = stream else { return Ok(()) };
        let number = self.begun_count.fetch_add(1, Ordering::Relaxed);
        let is_full = {
            let mut marked = self.marked();
            let is_old = |marked_round: &Marked| marked_round.number + AGE_MAX < number;
            let count = marked.iter().take_while(|marked_round| is_old(marked_round)).count();
            let old: Vec<_> = marked.drain(..count).collect();
            let is_full = marked.len() >= MARKED_MAX;
            drop(marked);
            for marked_round in &old {
                marked_round.round.lock().set_untimed();
            }
            is_full
        };
        if is_full {
            round.lock().set_untimed();
            return Ok(());
        }
        let Some(begun) = self.record(py, stream, None)? else { return Ok(()) };
        self.marked().push_back(Marked::new(round.clone(), number, stream.gpu, begun));
        Ok(())
    }

    /// Notes that a storage is packed, or needed, on this stream now, or on the CPU (`None`); its
    /// moments are then those of the round's first GPU. If the copy of a needed storage is on its
    /// way, the stream may wait for its end, `loaded`, in the same calls.
    pub fn note(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        used: StorageUse,
        (key, nbytes): (i64, u64),
        stream: Option<GpuStream>,
        loaded: Option<&Event>,
    ) -> PyResult<()> {
        let at_hand = stream.and_then(|it| hook::last_event(it.gpu, user_stream(it)));
        let is_due = {
            let mut marked = self.marked();
            let Some(marked_round) = find(&mut marked, round) else { return Ok(()) };
            match (marked_round.clock(stream), used) {
                (None, _) | (_, StorageUse::Needed { waits: true }) => true,
                // The last round that was followed in whole tells when tensors are packed.
                (Some(_), StorageUse::Packed) if round.lock().is_partial() => false,
                (Some(clock), _) => clock.marks(used).is_due(key, nbytes, at_hand.is_some()),
            }
        };
        // `record` releases the GIL, because a full stream makes the program wait.
        let event = match stream {
            Some(_) if is_due && at_hand.is_some() && loaded.is_none() => at_hand,
            Some(stream) if is_due => self.record(py, stream, loaded)?,
            _ => None,
        };
        if let Some(marked_round) = find(&mut self.marked(), round) {
            let clock = match (marked_round.clock(stream), stream, &event) {
                (Some(clock), ..) => clock,
                (None, Some(stream), Some(event)) => marked_round.begin(stream.gpu, event),
                (None, ..) => {
                    marked_round.is_unclear = true;
                    return Ok(());
                }
            };
            let is_need = used != StorageUse::Packed;
            if is_need {
                clock.needed_now = event.clone().map(|event| (key, event));
            }
            let is_recorded = event.is_some() && is_need;
            clock.marks(used).enter(key, nbytes, event);
            if is_recorded {
                marked_round.recorded_s = marked_round.began.elapsed().as_secs_f64();
            }
        }
        Ok(())
    }

    /// Notes the event at which the load of a needed storage ends.
    pub fn note_load(&self, round: &SharedRound, key: i64, loaded: Arc<Event>) {
        let mut marked = self.marked();
        let Some(marked_round) = find(&mut marked, round) else { return };
        for clock in &mut marked_round.clocks {
            // After another need the GPU has done other work as well.
            if let Some((_, needed)) = clock.needed_now.take_if(|(of, _)| *of == key) {
                clock.loads.push((needed, loaded));
                return;
            }
        }
    }

    /// Notes copies from a GPU of the round, and waits of its streams for copies of memory that was
    /// let go.
    pub fn note_waits(&self, round: &SharedRound, stream: GpuStream, noted: Noted) {
        let mut marked = self.marked();
        let found =
            find(&mut marked, round).and_then(|marked_round| marked_round.clock(Some(stream)));
        if let Some(clock) = found {
            clock.noted.extend(noted);
        }
    }

    /// True if the GPU of an ended round has not reached all its events yet.
    pub fn is_awaited(&self, py: Python<'_>, round: &SharedRound) -> PyResult<bool> {
        let (gpu, events) = {
            let mut marked = self.marked();
            let Some(marked_round) = find(&mut marked, round) else { return Ok(false) };
            // The last events first: a round that is awaited is told by one question.
            let mut events: Vec<_> = marked_round.events().cloned().collect();
            events.reverse();
            (marked_round.clocks[0].gpu, events)
        };
        let mut is_reached = true;
        let asked = Gpu::get(gpu).and_then(|gpu| {
            ask_all(&gpu, || {
                for event in &events {
                    is_reached = is_reached && event.is_reached()?;
                }
                Ok(())
            })
        });
        raised(py, asked)?;
        if !is_reached && let Some(marked_round) = find(&mut self.marked(), round) {
            marked_round.was_awaited = true;
        }
        Ok(!is_reached)
    }

    /// Takes the events of an ended round that is not awaited. Returns the times of its `items` by
    /// the clock of the GPU, or `None` if the round has no such times.
    pub fn take(&self, round: &SharedRound, items: &[Item]) -> Option<GpuTimes> {
        let taken = take(&mut self.marked(), round)?;
        let gpu = Gpu::get(taken.clocks[0].gpu).ok()?;
        ask_all(&gpu, || Ok(taken.times(items))).ok()?
    }

    /// An event of a stream now; `None` while the stream is captured into a CUDA graph, which has
    /// no time. After the event the stream waits for `loaded`.
    fn record(
        &self,
        py: Python<'_>,
        stream: GpuStream,
        loaded: Option<&Event>,
    ) -> PyResult<Option<Arc<Event>>> {
        let record = || -> core::Result<Option<Arc<Event>>> {
            let opened = Gpu::get(stream.gpu)?;
            let place = user_stream(stream);
            opened.within(|_| {
                if is_capturing(&opened, place)? {
                    return Ok(None);
                }
                let event = self.pool(stream.gpu, &opened).moment(place)?;
                // `GpuLoad::lend` makes sure of it. Here the wait shares calls of the driver.
                loaded.map_or(Ok(()), |loaded| loaded.wait_on(place))?;
                Ok(Some(event))
            })
        };
        raised(py, py.detach(record))
    }

    fn pool(&self, gpu: usize, opened: &Arc<Gpu>) -> Arc<EventPool> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(known, _)| *known == gpu) {
            return Arc::clone(pool);
        }
        let pool = EventPool::timed(opened);
        pools.push((gpu, Arc::clone(&pool)));
        pool
    }

    fn marked(&self) -> MutexGuard<'_, VecDeque<Marked>> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Marked {
    fn new(round: SharedRound, number: u64, gpu: usize, begun: Arc<Event>) -> Self {
        let clocks = vec![Clock::new(gpu, begun, 0.0)];
        let (recorded_s, was_awaited, is_unclear) = (0.0, false, false);
        Self { round, number, began: Instant::now(), clocks, recorded_s, was_awaited, is_unclear }
    }

    /// The clock of a stream's GPU, if that has one; of no stream, that of the first GPU.
    fn clock(&mut self, stream: Option<GpuStream>) -> Option<&mut Clock> {
        let is_its_own = |clock: &&mut Clock| stream.is_none_or(|stream| stream.gpu == clock.gpu);
        self.clocks.iter_mut().find(is_its_own)
    }

    /// Begins the clock of another GPU.
    fn begin(&mut self, gpu: usize, begun: &Arc<Event>) -> &mut Clock {
        let begun_s = self.began.elapsed().as_secs_f64();
        self.clocks.push(Clock::new(gpu, Arc::clone(begun), begun_s));
        self.clocks.last_mut().expect("it was pushed")
    }

    fn events(&self) -> impl Iterator<Item = &Arc<Event>> {
        self.clocks.iter().flat_map(Clock::events)
    }

    fn times(&self, items: &[Item]) -> Option<GpuTimes> {
        if self.is_unclear {
            return None;
        }
        let mut times = GpuTimes::default();
        let mut found: Vec<_> = Vec::new();
        for clock in &self.clocks {
            found.push((clock, clock.read(&mut times)?));
        }
        for item in items {
            let is_its_own =
                |(clock, _): &&(&Clock, _)| item.gpu.is_none_or(|gpu| gpu == clock.gpu);
            let (clock, (packed_s, needed_s)) = found.iter().find(is_its_own)?;
            let packed_s = *packed_s.get(*clock.packed.places.get(&item.key)?)?;
            let needed_s = *needed_s.get(*clock.needed.places.get(&item.key)?)?;
            // A stall of another stream may lie between the two moments.
            times.items.push(Item { packed_s, needed_s: needed_s.max(packed_s), ..*item });
        }
        times.waits_for_python = self.waits_for_python();
        Some(times)
    }

    /// True if the GPU of the first tensor came to the last need as soon after the first pack as
    /// the hooks did. If Python runs ahead within the round, the GPU takes longer; if it was ahead
    /// before, the GPU is behind at the end.
    fn waits_for_python(&self) -> bool {
        let clock = &self.clocks[0];
        let last = clock.needed.events.last();
        let Some(last_s) = last.and_then(|last| last.seconds_since(&clock.begun)) else {
            return false;
        };
        !self.was_awaited && last_s <= AHEAD_SHARE * self.recorded_s + AHEAD_S
    }
}

impl Clock {
    fn new(gpu: usize, begun: Arc<Event>, begun_s: f64) -> Self {
        Self {
            gpu,
            packed: Marks { events: vec![Arc::clone(&begun)], ..Marks::default() },
            begun,
            begun_s,
            needed: Marks::default(),
            loads: Vec::new(),
            noted: Noted::default(),
            needed_now: None,
        }
    }

    fn marks(&mut self, used: StorageUse) -> &mut Marks {
        match used {
            StorageUse::Packed => &mut self.packed,
            StorageUse::Needed { .. } => &mut self.needed,
        }
    }

    fn events(&self) -> impl Iterator<Item = &Arc<Event>> {
        let marks = self.packed.events.iter().chain(&self.needed.events);
        self.loads.iter().map(|(_, loaded)| loaded).chain(self.noted.events()).chain(marks)
    }

    /// Adds its copies and its stalls to `times`; returns the moments of packs and of needs.
    fn read(&self, times: &mut GpuTimes) -> Option<(Vec<f64>, Vec<f64>)> {
        let since_begun = |event: &Event| event.seconds_since(&self.begun);
        let mut stalls = Vec::new();
        for (needed, loaded) in &self.loads {
            stalls.push((since_begun(needed)?, since_begun(loaded)?));
        }
        let (loads, mut waits) = (Stalls::of(stalls.clone()), stalls.clone());
        for wait in &self.noted.waits {
            let span = (since_begun(&wait.from)?, since_begun(&wait.copied)?);
            waits.push(span);
            if wait.is_planned {
                stalls.push(span);
            }
        }
        let (stalls, waits) = (Stalls::of(stalls), Stalls::of(waits));
        let times_of = |marks: &Marks| -> Option<Vec<f64>> {
            let moments_s = marks.events.iter().map(|event| since_begun(event));
            let stands_still = |moment_s| self.begun_s + moment_s - waits.before(moment_s);
            moments_s.map(|moment_s| moment_s.map(stands_still)).collect()
        };
        let (packed_s, needed_s) = (times_of(&self.packed)?, times_of(&self.needed)?);
        // The link copies on while the streams wait, so its clock does not stand still then. A copy
        // from before the round is of the round before.
        let copied_s = |copied: &Event| since_begun(copied).filter(|moment_s| *moment_s > 0.0);
        let copies = self.noted.copies.iter();
        times.copied.extend(copies.filter_map(|(key, event)| Some((*key, copied_s(event)?))));
        times.ended_s = needed_s.iter().fold(times.ended_s, |last, moment_s| moment_s.max(last));
        times.load_stall_s += loads.before(f64::INFINITY);
        times.stall_s += stalls.before(f64::INFINITY);
        Some((packed_s, needed_s))
    }
}

impl Marks {
    /// True if the storage that comes now gets an event of its own; one that is at hand earlier, as
    /// that costs no call of the driver.
    fn is_due(&self, key: i64, nbytes: u64, is_at_hand: bool) -> bool {
        let due_bytes = if is_at_hand { MARK_BYTES / 2 } else { MARK_BYTES };
        let is_due = self.events.is_empty() || self.nbytes + nbytes >= due_bytes;
        is_due && !self.places.contains_key(&key)
    }

    /// Enters a storage with its event, or else with the last event. A storage before the first
    /// event gets the first: backward may need a tensor of the CPU first, in another thread.
    fn enter(&mut self, key: i64, nbytes: u64, event: Option<Arc<Event>>) {
        self.nbytes += nbytes;
        if let Some(event) = event {
            self.nbytes = 0;
            self.events.push(event);
        }
        self.places.entry(key).or_insert(self.events.len().saturating_sub(1));
    }
}

/// The waits of a GPU on any stream: spans that do not overlap, in their order.
struct Stalls(Vec<(f64, f64)>);

impl Stalls {
    /// Joins waits, each from the need of a storage to the end of its load. A wait that began
    /// before the round counts from the beginning of the round.
    fn of(mut waits: Vec<(f64, f64)>) -> Self {
        for (needed_s, _) in &mut waits {
            *needed_s = needed_s.max(0.0);
        }
        waits.retain(|(needed_s, loaded_s)| needed_s < loaded_s);
        waits.sort_by(|wait, other| wait.0.total_cmp(&other.0));
        let mut joined: Vec<(f64, f64)> = Vec::new();
        for (begun_s, ended_s) in waits {
            match joined.last_mut() {
                Some(last) if begun_s <= last.1 => last.1 = last.1.max(ended_s),
                _ => joined.push((begun_s, ended_s)),
            }
        }
        Self(joined)
    }

    /// The sum of the waits before a moment.
    fn before(&self, moment_s: f64) -> f64 {
        let spans = self.0.iter().take_while(|(begun_s, _)| *begun_s < moment_s);
        spans.map(|(begun_s, ended_s)| ended_s.min(moment_s) - begun_s).sum()
    }
}

fn find<'a>(marked: &'a mut VecDeque<Marked>, round: &SharedRound) -> Option<&'a mut Marked> {
    marked.iter_mut().rev().find(|marked_round| marked_round.round.is(round))
}

fn take(marked: &mut VecDeque<Marked>, round: &SharedRound) -> Option<Marked> {
    let place = marked.iter().position(|marked_round| marked_round.round.is(round))?;
    marked.remove(place)
}
