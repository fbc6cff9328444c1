//! When the rounds of a GPU did what, by its own clock.
//!
//! Python runs ahead of a GPU, so the moments of the hooks tell what Python did, and not when the
//! GPU came to it. A round that begins on a GPU has events there: where it begins, and where its
//! tensors are packed and needed. It is learned from once the GPU has come to all of them. A round
//! with tensors of several GPUs, whose clocks differ, is learned from by the moments of the hooks,
//! as is one that began in a CUDA graph that is being captured. Where Python is so far ahead that
//! too many rounds have events already, the next ones get none, and teach nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::stream::{Event, EventPool, is_capturing};
use ssdtrain_core::round::Item;

use crate::gpu::{raised, user_stream};
use crate::gpu_calls::GpuStream;
use crate::gpu_waits::Wait;
use crate::saved_tensor::SharedRound;

/// So much is packed, or needed, from one event to the next: a driver has better to do than to tell
/// small tensors apart, which are packed within a moment.
const MARK_BYTES: u64 = 8 << 20;
/// Rounds with events at once.
const MARKED_MAX: usize = 16;
/// A round that has events for longer than so many others took to begin never ends: somebody holds
/// its graph.
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
    /// How many rounds had begun with it.
    number: u64,
    gpu: usize,
    begun: Arc<Event>,
    packed: Marks,
    needed: Marks,
    /// Of what was loaded: when it was needed, and when it was there.
    loads: Vec<(Arc<Event>, Arc<Event>)>,
    /// Of what was let go: where streams waited for its copy, and the end of that.
    waits: Vec<Wait>,
    /// What is needed now, if it got an event for that, until its load is known.
    needed_now: Option<(i64, Arc<Event>)>,
    has_other_gpus: bool,
}

/// When the storages of a round were packed, or needed.
#[derive(Default)]
struct Marks {
    events: Vec<Arc<Event>>,
    /// By the key of a storage, the place of its event.
    places: HashMap<i64, usize>,
    /// What came since the last event.
    nbytes: u64,
}

/// What happens to a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum What {
    Packed,
    Needed {
        /// Whether the GPU may have to wait for it, which an event of its own tells.
        waits: bool,
    },
}

/// What a round did by the clock of its GPU, in seconds since it began.
pub struct GpuTimes {
    pub items: Vec<Item>,
    /// When the last storage was needed.
    pub ended_s: f64,
    /// How long the GPU waited for loads, and for copies that by the plan had ended.
    pub stall_s: f64,
}

impl GpuClock {
    /// Notes that a round begins, with a tensor of this stream; `None`: of no GPU.
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
            let is_old = |one: &Marked| one.number + AGE_MAX < number;
            let count = marked.iter().take_while(|one| is_old(one)).count();
            let old: Vec<_> = marked.drain(..count).collect();
            let is_full = marked.len() >= MARKED_MAX;
            drop(marked);
            for one in &old {
                one.round.lock().set_untimed();
            }
            is_full
        };
        if is_full {
            round.lock().set_untimed();
            return Ok(());
        }
        let Some(begun) = self.record(py, stream)? else { return Ok(()) };
        self.marked().push_back(Marked::new(round.clone(), number, stream.gpu, begun));
        Ok(())
    }

    /// Notes that a storage is packed, or needed, on this stream now; `None`: on no GPU.
    pub fn note(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        what: What,
        (key, nbytes): (i64, u64),
        stream: Option<GpuStream>,
    ) -> PyResult<()> {
        let is_due = {
            let mut marked = self.marked();
            let Some(one) = find(&mut marked, round) else { return Ok(()) };
            one.has_other_gpus |= stream.is_some_and(|stream| stream.gpu != one.gpu);
            let is_wanted = match what {
                What::Needed { waits: true } => true,
                What::Packed | What::Needed { waits: false } => one.marks(what).is_due(key, nbytes),
            };
            is_wanted && !one.has_other_gpus && stream.is_some()
        };
        // Without the lock of the interpreter: a stream that is full has the program wait.
        let event = match stream {
            Some(stream) if is_due => self.record(py, stream)?,
            _ => None,
        };
        if let Some(one) = find(&mut self.marked(), round) {
            if what != What::Packed {
                one.needed_now = event.clone().map(|event| (key, event));
            }
            one.marks(what).enter(key, nbytes, event);
        }
        Ok(())
    }

    /// Notes that what is needed now is there once an event is reached.
    pub fn note_load(&self, round: &SharedRound, key: i64, loaded: Arc<Event>) {
        let mut marked = self.marked();
        let Some(one) = find(&mut marked, round) else { return };
        // From an event of another need on, other work was done as well.
        if let Some((of, needed)) = one.needed_now.take()
            && of == key
        {
            one.loads.push((needed, loaded));
        }
    }

    /// Notes where streams of the round's GPU waited until memory had been copied.
    pub fn note_waits(&self, round: &SharedRound, waits: Vec<Wait>) {
        if let Some(one) = find(&mut self.marked(), round) {
            one.waits.extend(waits);
        }
    }

    /// Whether the GPU of an ended round has not come to its end yet.
    pub fn is_awaited(&self, py: Python<'_>, round: &SharedRound) -> PyResult<bool> {
        let events: Vec<_> = {
            let mut marked = self.marked();
            let Some(one) = find(&mut marked, round) else { return Ok(false) };
            one.events().cloned().collect()
        };
        for event in events {
            if !raised(py, event.is_reached())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives up the events of an ended round, which is not awaited; with them, the times of its
    /// `items`, which have those of the hooks. `None` if there are none.
    pub fn take(&self, round: &SharedRound, items: &[Item]) -> Option<GpuTimes> {
        let taken = take(&mut self.marked(), round);
        taken?.times(items)
    }

    /// Marks where a stream is; `None` if it is captured into a graph, which has no time.
    fn record(&self, py: Python<'_>, stream: GpuStream) -> PyResult<Option<Arc<Event>>> {
        let record = || -> core::Result<Option<Arc<Event>>> {
            let opened = Gpu::get(stream.gpu)?;
            let place = user_stream(stream);
            if is_capturing(&opened, place)? {
                return Ok(None);
            }
            self.pool(stream.gpu, &opened).record(place).map(|event| Some(Arc::new(event)))
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
        Self {
            round,
            number,
            gpu,
            packed: Marks { events: vec![Arc::clone(&begun)], ..Marks::default() },
            begun,
            needed: Marks::default(),
            loads: Vec::new(),
            waits: Vec::new(),
            needed_now: None,
            has_other_gpus: false,
        }
    }

    fn marks(&mut self, what: What) -> &mut Marks {
        match what {
            What::Packed => &mut self.packed,
            What::Needed { .. } => &mut self.needed,
        }
    }

    fn events(&self) -> impl Iterator<Item = &Arc<Event>> {
        let marks = self.needed.events.iter().chain(&self.packed.events);
        let waits = self.waits.iter().flat_map(|wait| [&wait.from, &wait.copied]);
        self.loads.iter().map(|(_, loaded)| loaded).chain(waits).chain(marks)
    }

    fn times(&self, items: &[Item]) -> Option<GpuTimes> {
        if self.has_other_gpus {
            return None;
        }
        let since_begun = |event: &Event| event.seconds_since(&self.begun);
        let mut stalls = Vec::new();
        for (needed, loaded) in &self.loads {
            stalls.push((since_begun(needed)?, since_begun(loaded)?));
        }
        let mut waits = stalls.clone();
        for wait in &self.waits {
            let span = (since_begun(&wait.from)?, since_begun(&wait.copied)?);
            waits.push(span);
            if wait.is_planned {
                stalls.push(span);
            }
        }
        let (stalls, waits) = (Stalls::of(stalls), Stalls::of(waits));
        let times_of = |marks: &Marks| -> Option<Vec<f64>> {
            marks.events.iter().map(|event| since_begun(event)).collect()
        };
        let (mut packed_s, mut needed_s) = (times_of(&self.packed)?, times_of(&self.needed)?);
        for moment_s in packed_s.iter_mut().chain(&mut needed_s) {
            *moment_s -= waits.before(*moment_s);
        }
        let timed = |item: &Item| {
            let packed_s = *packed_s.get(*self.packed.places.get(&item.key)?)?;
            let needed_s = *needed_s.get(*self.needed.places.get(&item.key)?)?;
            // A stall of another stream may lie between them.
            Some(Item { packed_s, needed_s: needed_s.max(packed_s), ..*item })
        };
        Some(GpuTimes {
            items: items.iter().map(timed).collect::<Option<_>>()?,
            ended_s: needed_s.iter().fold(0.0, |last, moment_s| moment_s.max(last)),
            stall_s: stalls.before(f64::INFINITY),
        })
    }
}

impl Marks {
    /// Whether a storage that comes now is to have an event of its own.
    fn is_due(&self, key: i64, nbytes: u64) -> bool {
        !self.places.contains_key(&key)
            && (self.events.is_empty() || self.nbytes + nbytes >= MARK_BYTES)
    }

    /// Enters a storage with its event, or with the one before. What comes before the first one
    /// has that: backward may need a tensor of the CPU first, in another thread.
    fn enter(&mut self, key: i64, nbytes: u64, event: Option<Arc<Event>>) {
        self.nbytes += nbytes;
        if let Some(event) = event {
            self.nbytes = 0;
            self.events.push(event);
        }
        self.places.entry(key).or_insert(self.events.len().saturating_sub(1));
    }
}

/// When a GPU waited, on whichever stream: spans that do not overlap, in their order.
struct Stalls(Vec<(f64, f64)>);

impl Stalls {
    /// Joins waits, each from the moment when something was needed to that when it was there. Of
    /// one that began before the round, what lies in the round counts.
    fn of(mut waits: Vec<(f64, f64)>) -> Self {
        for (needed_s, _) in &mut waits {
            *needed_s = needed_s.max(0.0);
        }
        waits.retain(|(needed_s, loaded_s)| needed_s < loaded_s);
        waits.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut joined: Vec<(f64, f64)> = Vec::new();
        for (begun_s, ended_s) in waits {
            match joined.last_mut() {
                Some(last) if begun_s <= last.1 => last.1 = last.1.max(ended_s),
                _ => joined.push((begun_s, ended_s)),
            }
        }
        Self(joined)
    }

    /// How long it had waited at a moment.
    fn before(&self, moment_s: f64) -> f64 {
        let spans = self.0.iter().take_while(|(begun_s, _)| *begun_s < moment_s);
        spans.map(|(begun_s, ended_s)| ended_s.min(moment_s) - begun_s).sum()
    }
}

fn find<'a>(marked: &'a mut VecDeque<Marked>, round: &SharedRound) -> Option<&'a mut Marked> {
    marked.iter_mut().rev().find(|one| one.round.is(round))
}

fn take(marked: &mut VecDeque<Marked>, round: &SharedRound) -> Option<Marked> {
    let place = marked.iter().position(|one| one.round.is(round))?;
    marked.remove(place)
}
