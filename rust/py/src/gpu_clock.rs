//! When the rounds of a GPU did what, by its own clock.
//!
//! Python runs ahead of a GPU, so the moments of the hooks tell what Python did, and not when the
//! GPU came to it. A round that begins on a GPU has events there: where it begins, and where its
//! tensors are packed and needed. It is learned from once the GPU has come to all of them. A round
//! with tensors of several GPUs, whose clocks differ, is learned from by the moments of the hooks,
//! as is one that began in a CUDA graph that is being captured.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::stream::{Event, EventPool, is_capturing};
use ssdtrain_core::round::Item;

use crate::gpu::{raised, user_stream};
use crate::gpu_calls::GpuStream;
use crate::saved_tensor::SharedRound;

/// So much is packed, or needed, from one event to the next: a driver has better to do than to tell
/// small tensors apart, which are packed within a moment.
const MARK_BYTES: u64 = 8 << 20;
/// Rounds with events; of older ones nobody learned, as they have no end.
const MARKED_MAX: usize = 16;

/// The clocks of the GPUs of one session.
#[derive(Default)]
pub struct GpuClock {
    pools: Mutex<Vec<(usize, Arc<EventPool>)>>,
    marked: Mutex<VecDeque<Marked>>,
}

/// A round with events.
struct Marked {
    round: SharedRound,
    gpu: usize,
    begun: Arc<Event>,
    packed: Marks,
    needed: Marks,
    /// Of what was loaded: when it was needed, and when it was there.
    loads: Vec<(Arc<Event>, Arc<Event>)>,
    has_other_gpus: bool,
}

/// When the storages of a round were packed, or needed.
#[derive(Default)]
struct Marks {
    /// Each with the storage for which it was recorded, if it was for one.
    events: Vec<(Option<i64>, Arc<Event>)>,
    /// By the key of a storage, the place of its event.
    places: HashMap<i64, usize>,
    /// What came since the last event.
    nbytes: u64,
}

/// What happens to a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum What {
    Packed,
    Needed,
}

/// What a round did by the clock of its GPU, in seconds since it began.
pub struct GpuTimes {
    pub items: Vec<Item>,
    /// When the last storage was needed.
    pub ended_s: f64,
    /// How long the GPU waited for loads: no part of the other times.
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
        let Some(begun) = self.record(py, stream)? else { return Ok(()) };
        let mut marked = self.marked();
        let surplus = (marked.len() + 1).saturating_sub(MARKED_MAX);
        let old: Vec<_> = marked.drain(..surplus).collect();
        marked.push_back(Marked::new(round.clone(), stream.gpu, begun));
        drop(marked);
        drop(old);
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
            let is_due = !one.has_other_gpus && one.marks(what).is_due(key, nbytes);
            is_due && stream.is_some()
        };
        // Without the lock of the interpreter: a stream that is full has the program wait.
        let event = match stream {
            Some(stream) if is_due => self.record(py, stream)?,
            _ => None,
        };
        if let Some(one) = find(&mut self.marked(), round) {
            one.marks(what).enter(key, nbytes, event);
        }
        Ok(())
    }

    /// Notes that what was needed is there once an event is reached.
    pub fn note_load(&self, round: &SharedRound, key: i64, loaded: Arc<Event>) {
        let mut marked = self.marked();
        let Some(one) = find(&mut marked, round) else { return };
        // From an event of another storage on, other work was done as well.
        if let Some(needed) = one.needed.own(key).cloned() {
            one.loads.push((needed, loaded));
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
    fn new(round: SharedRound, gpu: usize, begun: Arc<Event>) -> Self {
        Self {
            round,
            gpu,
            packed: Marks { events: vec![(None, Arc::clone(&begun))], ..Marks::default() },
            begun,
            needed: Marks::default(),
            loads: Vec::new(),
            has_other_gpus: false,
        }
    }

    fn marks(&mut self, what: What) -> &mut Marks {
        match what {
            What::Packed => &mut self.packed,
            What::Needed => &mut self.needed,
        }
    }

    fn events(&self) -> impl Iterator<Item = &Arc<Event>> {
        let marks = self.needed.events.iter().chain(&self.packed.events).map(|(_, event)| event);
        self.loads.iter().map(|(_, loaded)| loaded).chain(marks)
    }

    fn times(&self, items: &[Item]) -> Option<GpuTimes> {
        if self.has_other_gpus {
            return None;
        }
        let since_begun = |event: &Event| event.seconds_since(&self.begun);
        let mut stalls = Vec::new();
        for (needed, loaded) in &self.loads {
            let needed_s = since_begun(needed)?;
            stalls.push((needed_s, (since_begun(loaded)? - needed_s).max(0.0)));
        }
        let times_of = |marks: &Marks| -> Option<Vec<f64>> {
            marks.events.iter().map(|(_, event)| since_begun(event)).collect()
        };
        let packed_s = times_of(&self.packed)?;
        let mut needed_s = times_of(&self.needed)?;
        for moment_s in &mut needed_s {
            *moment_s = without(&stalls, *moment_s);
        }
        let timed = |item: &Item| {
            let packed_s = *packed_s.get(*self.packed.places.get(&item.key)?)?;
            let needed_s = *needed_s.get(*self.needed.places.get(&item.key)?)?;
            Some(Item { packed_s, needed_s, ..*item })
        };
        Some(GpuTimes {
            items: items.iter().map(timed).collect::<Option<_>>()?,
            ended_s: needed_s.iter().fold(0.0, |last, moment_s| moment_s.max(last)),
            stall_s: stalls.iter().map(|(_, stall_s)| stall_s).sum(),
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
            self.events.push((Some(key), event));
        }
        self.places.entry(key).or_insert(self.events.len().saturating_sub(1));
    }

    /// The event that was recorded for a storage, if one was.
    fn own(&self, key: i64) -> Option<&Arc<Event>> {
        let (of, event) = self.events.get(*self.places.get(&key)?)?;
        (*of == Some(key)).then_some(event)
    }
}

/// A moment without the stalls before it: when it would have been, had nothing been waited for.
fn without(stalls: &[(f64, f64)], moment_s: f64) -> f64 {
    let before = stalls.iter().filter(|(needed_s, _)| *needed_s < moment_s);
    moment_s - before.map(|(_, stall_s)| stall_s).sum::<f64>()
}

fn find<'a>(marked: &'a mut VecDeque<Marked>, round: &SharedRound) -> Option<&'a mut Marked> {
    marked.iter_mut().rev().find(|one| one.round.is(round))
}

fn take(marked: &mut VecDeque<Marked>, round: &SharedRound) -> Option<Marked> {
    let place = marked.iter().position(|one| one.round.is(round))?;
    marked.remove(place)
}
