//! One tensor of a GPU on the staged way: its saved bytes, and a load of them.
//!
//! Memory of a GPU may be given to others only once the stream for which it was allocated has
//! waited for all work that uses it. Only torch's allocator knows that stream, and in a plain run
//! autograd holds the memory for as long as any stream may use it. So before a source is let go,
//! its stream waits for the copy, and `record_stream` tells the allocator of every stream that was
//! seen in a hook (it does nothing for the stream of the allocation). Then the allocator gives the
//! memory to nobody before each of these streams has done the work that it has now.
#![expect(unsafe_code, reason = "names memory of torch")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::stream::DeviceRange;
use ssdtrain_core::error::shown_bytes;
use ssdtrain_core::staging::{Full, Loading, Saved, Staged, Tier};
use ssdtrain_core::{Error, ErrorKind};

use crate::by_plan::ByPlan;
use crate::error::raised;
use crate::gpu::{Departure, GpuWay, user_stream};
use crate::gpu_calls::GpuStream;
use crate::store::SIGNAL_CHECK;

/// The longest wait of a pack for a GPU that is behind. The GPU may wait for work that this program
/// submits later, such as communication on another stream; then the tensor stays.
const PATIENCE: Duration = Duration::from_secs(1);

/// Saved bytes of a GPU's memory. Dropping them gives the copy up, in the order of the streams.
pub struct GpuBytes {
    way: Arc<GpuWay>,
    staged: Staged,
    stream: GpuStream,
    /// Held until the streams have waited for its copy.
    source: Mutex<Option<Py<PyAny>>>,
    /// The sum of all saves on this way until then, with this save.
    saved_bytes: u64,
    /// See [`ByPlan`].
    copied_s: Option<f64>,
}

/// A tensor that leaves a GPU.
pub struct Leaving<'py> {
    /// The object that holds its memory.
    pub source: Bound<'py, PyAny>,
    pub address: usize,
    pub nbytes: u64,
    pub by_plan: ByPlan,
}

impl GpuBytes {
    /// Begins the copies of several tensors of one stream together, in their order, as long as
    /// there is room; the others need a [`save`](Self::save) each, which finds out why.
    pub fn save_all(
        way: &Arc<GpuWay>,
        stream: GpuStream,
        wanted: Vec<Leaving<'_>>,
        py: Python<'_>,
    ) -> Vec<Self> {
        let range = |leaving: &Leaving<'_>| {
            // SAFETY: as in `save`.
            let range =
                unsafe { DeviceRange::new(leaving.address as u64, leaving.nbytes as usize) };
            (range, leaving.by_plan.tier)
        };
        let sources: Vec<_> = wanted.iter().map(range).collect();
        let raw = user_stream(stream); // defence: the stream of the pack
        let begun = py.detach(|| way.staging.save_all(&sources, raw)).begun;
        let saved = begun.into_iter().zip(wanted);
        saved.map(|(staged, leaving)| Self::new(way, staged, stream, leaving)).collect()
    }

    fn new(way: &Arc<GpuWay>, staged: Staged, stream: GpuStream, leaving: Leaving<'_>) -> Self {
        let saved_bytes = way.count_saved(leaving.nbytes);
        if let Some(key) = leaving.by_plan.key {
            way.waits.add_copy(key, staged.copied());
        }
        Self {
            way: Arc::clone(way),
            staged,
            stream,
            source: Mutex::new(Some(leaving.source.unbind())),
            saved_bytes,
            copied_s: leaving.by_plan.copied_s,
        }
    }

    /// Begins the copy of memory that `source` holds.
    ///
    /// If the ring is full because the GPU is behind, waiting costs nothing: the program would only
    /// run further ahead of it. If the disk is behind, the tensor stays, unless `waits_for_disk`. A
    /// tensor that should stay in pinned memory goes to the disk if there is no room for it.
    pub fn save(
        way: &Arc<GpuWay>,
        stream: GpuStream,
        leaving: Leaving<'_>,
        waits_for_disk: bool,
    ) -> PyResult<core::Result<Self>> {
        let (py, address, nbytes) = (leaving.source.py(), leaving.address, leaving.nbytes);
        // SAFETY: `source` holds the memory until the streams have waited for the copy: `release`
        // and `drop` see to it.
        let range = unsafe { DeviceRange::new(address as u64, nbytes as usize) };
        let ByPlan { mut tier, is_spare, .. } = leaving.by_plan;
        let began = Instant::now();
        loop {
            let turn = way.staging.turn();
            let raw = user_stream(stream); // defence: the stream of the pack
            let saved = match py.detach(|| way.staging.save(range, raw, tier)) {
                Ok(saved) => saved,
                Err(error) => return Ok(Err(error)),
            };
            let full = match saved {
                Saved::Begun(staged) => return Ok(Ok(Self::new(way, staged, stream, leaving))),
                Saved::Capturing => return Ok(Err(stays("a CUDA graph is being captured"))),
                Saved::Full(_) if tier == Tier::Pinned => {
                    if is_spare && way.grow_tier(py)? {
                        continue;
                    }
                    tier = Tier::Disk;
                    continue;
                }
                Saved::Full(full) => full,
            };
            match full {
                Full::GpuBehind => {}
                Full::DiskBehind if waits_for_disk || is_spare => {}
                Full::DiskBehind => {
                    way.count_stayed();
                    let message = "the disk is behind, and all pinned memory waits for it";
                    return Ok(Err(Error::new(ErrorKind::Busy, message)));
                }
                Full::Pinned => {
                    let full = "all pinned memory holds tensors for good";
                    let refusal = way.staging.last_refusal();
                    let note = format!("; {full}, so this tensor stays on the GPU");
                    return Ok(Err(
                        refusal.map_or_else(|| stays(full), |refusal| refusal.with_note(&note))
                    ));
                }
                Full::TooLong => return Ok(Err(too_long(nbytes, way.staging.longest_bytes()))),
            }
            if !waits_for_disk && (way.is_given_up(turn) || began.elapsed() > PATIENCE) {
                way.give_up_waiting(turn);
                way.count_stayed();
                let message = match full {
                    Full::DiskBehind => "the disk is behind for longer than a second",
                    _ => "the GPU is behind, and may wait for later work of this program",
                };
                return Ok(Err(Error::new(ErrorKind::Busy, message)));
            }
            let waits_since = Instant::now();
            way.wait_for_room(py, turn)?;
            way.count_wait(full, waits_since.elapsed());
        }
    }

    /// True if the source may be let go without a long wait on the GPU; a capture may still hold
    /// it.
    ///
    /// Most forwards save faster than the link copies. So if a plan tells the end of the copy, the
    /// program has to come to that moment first: before it, the stream would wait for the copy, and
    /// that time would be lost.
    pub fn is_done(&self) -> bool {
        self.staged.is_seen_copied()
            || self.is_released()
            || match self.copied_s {
                Some(copied_s) => self.way.has_come_to(copied_s),
                None => self.way.is_past_window(self.saved_bytes),
            }
    }

    /// True if the source was let go: a thread waited for it before the worker saw its copy end.
    fn is_released(&self) -> bool {
        self.source.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Lets the source go, in the order of the streams; `false` if it has to wait for the end of a
    /// CUDA graph that is being captured.
    pub fn release(&self, py: Python<'_>) -> PyResult<core::Result<bool>> {
        let Some(source) = self.take_source() else { return Ok(Ok(true)) };
        let departure = self.departure(source);
        let answer = self.way.order(py, &departure, Some(self.copied_s.is_some()));
        if matches!(answer, Ok(Ok(true))) {
            self.way.count_released(self.nbytes() as u64);
        } else {
            // The copy may still use the memory.
            self.put_back(departure.memory);
        }
        answer
    }

    fn departure(&self, source: Py<PyAny>) -> Departure {
        let after = self.staged.copied();
        Departure { after, stream: self.stream, memory: source, is_shared: true }
    }

    /// Begins a load, into memory that is allocated for the stream of the pack.
    pub fn load(&self, py: Python<'_>) -> PyResult<GpuLoad> {
        Self::load_all(py, &[self])?.remove(0)
    }

    /// Begins the loads of tensors that were packed under one stream. The first error of the
    /// allocator is raised, and then none has begun.
    pub fn load_all(py: Python<'_>, wanted: &[&Self]) -> PyResult<Vec<PyResult<GpuLoad>>> {
        let (mut storages, mut ranges) = (Vec::new(), Vec::new());
        for bytes in wanted {
            let (storage, target) = bytes.allocate(py)?;
            storages.push(storage);
            ranges.push((&bytes.staged, target));
        }
        let Some(first) = wanted.first() else { return Ok(Vec::new()) };
        let stream = user_stream(first.stream);
        let begun = py.detach(|| first.way.staging.load_all(&ranges, stream));
        let loads = raised(py, begun)?.into_iter().zip(storages);
        Ok(loads
            .map(|(loading, storage)| Ok(first.filling(storage, raised(py, loading)?)))
            .collect())
    }

    /// True if both are loaded by the same calls.
    pub fn loads_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.way, &other.way) && self.stream == other.stream
    }

    fn allocate<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, DeviceRange)> {
        let nbytes = self.staged.len() as u64;
        // defence: a target is allocated for the stream of the pack
        let storage = self.way.calls.allocate(py, self.stream, nbytes)?;
        self.way.count_loaded(&storage, nbytes)?;
        let address: u64 = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        // SAFETY: the load holds the storage, and gives it up as `Loading` asks.
        Ok((storage, unsafe { DeviceRange::new(address, nbytes as usize) }))
    }

    fn filling(&self, storage: Bound<'_, PyAny>, loading: Loading) -> GpuLoad {
        GpuLoad {
            way: Arc::clone(&self.way),
            loading: Arc::new(loading),
            stream: self.stream,
            storage: Some(storage.unbind()),
            was_lent: AtomicBool::new(false),
        }
    }

    /// Another load of the same memory, for another node.
    pub fn join(&self, loading: &Arc<Loading>, storage: Bound<'_, PyAny>) -> GpuLoad {
        GpuLoad {
            way: Arc::clone(&self.way),
            loading: Arc::clone(loading),
            stream: self.stream,
            storage: Some(storage.unbind()),
            was_lent: AtomicBool::new(true),
        }
    }

    pub fn nbytes(&self) -> usize {
        self.staged.len()
    }

    fn take_source(&self) -> Option<Py<PyAny>> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put_back(&self, source: Py<PyAny>) {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
    }
}

impl Drop for GpuBytes {
    fn drop(&mut self) {
        let Some(source) = self.take_source() else {
            // A forked child counts nothing: the lock may be held for ever there.
            if !self.way.is_forked() {
                self.way.count_dropped(self.nbytes() as u64);
            }
            return;
        };
        let departure = self.departure(source);
        // defence: a source that dies under its copy
        let _ended = Python::try_attach(|py| self.way.let_go(py, departure));
    }
}

/// A load on its way to a GPU, or there; it holds its memory.
pub struct GpuLoad {
    way: Arc<GpuWay>,
    pub loading: Arc<Loading>,
    stream: GpuStream,
    storage: Option<Py<PyAny>>,
    /// True if a stream waits for it, here or through the load that this load joined.
    was_lent: AtomicBool,
}

impl GpuLoad {
    pub fn storage<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        let storage = self.storage.as_ref().expect("it is taken only when this is dropped");
        storage.bind(py).clone()
    }

    /// Waits until the copy to the GPU is on its stream.
    pub fn wait(&self, py: Python<'_>) -> PyResult<core::Result<()>> {
        while !self.loading.is_enqueued() {
            py.check_signals()?;
            py.detach(|| self.loading.wait(SIGNAL_CHECK));
        }
        Ok(self.loading.failure().map_or(Ok(()), Err))
    }

    /// Makes the current stream wait for the bytes; `tensor` lies on them.
    pub fn lend(&self, tensor: &Bound<'_, PyAny>) -> PyResult<core::Result<()>> {
        let (py, gpu) = (tensor.py(), self.stream.gpu);
        if let Err(error) = self.wait(py)? {
            return Ok(Err(error));
        }
        let handle = self.way.calls.current_stream(py, gpu)?;
        let stream = GpuStream { gpu, handle };
        self.way.seen.note(py, stream, &self.way.calls)?;
        // defence: every stream waits for a load
        let lent = self.loading.lend(user_stream(stream), SIGNAL_CHECK);
        if let Err(error) = lent.expect("an enqueued load is lent at once") {
            return Ok(Err(error));
        }
        if stream != self.stream {
            // defence: streams that use a target
            self.way.seen.record(tensor, stream)?;
        }
        // Set last: before that, a drop gives up a load that nobody used.
        self.was_lent.store(true, Ordering::Relaxed);
        Ok(Ok(()))
    }

    /// True if the bytes are there, or on their way on a stream.
    pub fn is_here(&self) -> bool {
        self.loading.is_enqueued() && self.loading.failure().is_none()
    }
}

impl Drop for GpuLoad {
    fn drop(&mut self) {
        // A forked child has neither the copy nor the thread that may hold the load's lock.
        if self.was_lent.load(Ordering::Relaxed) || self.way.is_forked() {
            return;
        }
        // The load was read ahead and given up: its copy may still write there.
        let Some(after) = self.loading.give_up() else { return };
        let memory = self.storage.take().expect("it is taken only here");
        let departure = Departure { after, stream: self.stream, memory, is_shared: false };
        // defence: a target that is given up
        let _ended = Python::try_attach(|py| self.way.let_go(py, departure));
    }
}

fn too_long(nbytes: u64, longest_bytes: usize) -> Error {
    let (nbytes, longest) = (shown_bytes(nbytes), shown_bytes(longest_bytes as u64));
    stays(&format!(
        "it has {nbytes}, and at most {longest} of one tensor go to the disk here at once; \
         pinned_bytes may be raised"
    ))
}

fn stays(why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("a tensor stays on the GPU: {why}"))
}
