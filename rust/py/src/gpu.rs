//! The GPUs of a session: the way of each to the disk, and the streams that use its tensors.
#![expect(unsafe_code, reason = "names streams of torch")]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use ssdtrain_core as core;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::stream::{Event, UserStream};
use ssdtrain_core::cufile::library::Library;
use ssdtrain_core::staging::{Full, PinnedBytes, PinnedTier, Staging};

use crate::error::{raised, to_python};
use crate::gpu_calls::{GpuStream, SeenStreams, TorchCalls};
use crate::gpu_waits::Waits;
use crate::session_lock::SessionLock;
use crate::store::{SIGNAL_CHECK, Store};

/// If no plan tells the end of a copy, its source is let go after this many more bytes are saved.
const WINDOW_BYTES: u64 = 64 << 20;

/// Pinned memory in which tensors stay grows by blocks of this size.
pub const TIER_BLOCK_BYTES: usize = 1 << 30;

/// Memory that may be let go once its stream waits for the end of a copy.
pub struct Departure {
    /// The end of the copy.
    pub after: Arc<Event>,
    /// The stream for which it was allocated, or under which it was packed.
    pub stream: GpuStream,
    /// The object that holds the memory.
    pub memory: Py<PyAny>,
    /// True if other streams may use it as well.
    pub is_shared: bool,
}

/// The GPUs of one session, each opened at its first tensor.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Gpus {
    store: Arc<core::TensorStore>,
    pinned: PinnedBytes,
    /// The same on a GPU, for tensors that go past the CPU's memory.
    ring: PinnedBytes,
    /// The pinned memory in which tensors of all GPUs may stay, and its most bytes.
    tier: Arc<PinnedTier>,
    pub tier_bytes_max: usize,
    /// Function: the path of cuFile for a GPU and if its compatibility mode is allowed, or `None`.
    choose_direct: Py<PyAny>,
    /// Function: takes the error of cuFile, and raises if the user requires it.
    direct_refused: Py<PyAny>,
    pub calls: Arc<TorchCalls>,
    pub seen: Arc<SeenStreams>,
    lock: Arc<SessionLock>,
    ways: Mutex<Vec<(usize, Arc<GpuWay>)>>,
}

/// The way of one GPU.
pub struct GpuWay {
    pub gpu: usize,
    pub staging: Staging,
    /// The most bytes of pinned memory in which tensors stay; 0 once no more can be pinned.
    pub tier_bytes_max: AtomicUsize,
    /// True if its tensors go past the CPU's memory.
    is_direct: bool,
    pub calls: Arc<TorchCalls>,
    pub seen: Arc<SeenStreams>,
    lock: Arc<SessionLock>,
    /// The number of threads that wait until this GPU comes to the copies.
    waiting_count: AtomicUsize,
    /// The last turn at which a thread gave up waiting, plus 1.
    given_up_at: AtomicU64,
    window_bytes: u64,
    pub waits: Waits,
    books: Mutex<Books>,
    held: Mutex<Vec<Departure>>,
}

#[derive(Default)]
struct Books {
    saved_bytes: u64,
    /// The progress of the program in its round, in seconds of the last plan.
    progress_s: f64,
    loaded_bytes: u64,
    /// Saved bytes whose source was let go, and whose tensor is not dropped.
    released_bytes: u64,
    /// The largest difference of `released_bytes` and `loaded_bytes`.
    away_bytes_peak: u64,
    full: FullRing,
    /// By number, weak references to the storages of loads.
    loads: HashMap<u64, Py<PyWeakrefReference>>,
    load_count: u64,
}

/// The cost of full rings.
#[derive(Clone, Copy, Default)]
struct FullRing {
    /// Waits for a GPU that was behind: the program would only have run further ahead of it.
    gpu_wait: Duration,
    /// Waits for the disk, which happen only under a bound.
    disk_wait: Duration,
    /// Tensors that stayed on the GPU.
    stayed_count: u64,
}

/// The callback of the weak reference to the storage of a load.
#[pyclass(frozen, module = "ssdtrain._core")]
struct Unloaded {
    way: Weak<GpuWay>,
    number: u64,
    nbytes: u64,
}

#[pymethods]
impl Unloaded {
    fn __call__(&self, _reference: &Bound<'_, PyAny>) {
        if let Some(way) = self.way.upgrade() {
            let mut books = way.books();
            books.loaded_bytes -= self.nbytes;
            let reference = books.loads.remove(&self.number);
            drop(books);
            drop(reference);
        }
    }
}

#[pymethods]
impl Gpus {
    #[new]
    #[pyo3(signature = (
        store, *, lock, down_bytes, up_bytes, ring_bytes, tier_bytes_max, choose_direct,
        direct_refused, current_stream, stream_object, allocate, out_of_memory, may_pin_now
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        store: &Store,
        lock: &Bound<'_, PyAny>,
        down_bytes: usize,
        up_bytes: usize,
        ring_bytes: usize,
        tier_bytes_max: usize,
        choose_direct: Py<PyAny>,
        direct_refused: Py<PyAny>,
        current_stream: Py<PyAny>,
        stream_object: Py<PyAny>,
        allocate: Py<PyAny>,
        out_of_memory: Py<PyAny>,
        may_pin_now: Py<PyAny>,
    ) -> PyResult<Self> {
        let calls =
            TorchCalls { current_stream, stream_object, allocate, out_of_memory, may_pin_now };
        let calls = Arc::new(calls);
        let pinned = PinnedBytes { down: down_bytes, up: up_bytes };
        let ring = PinnedBytes { down: ring_bytes, up: ring_bytes };
        let lock = Arc::new(SessionLock::new(lock)?);
        let (store, seen, ways) = (store.shared(), Arc::default(), Mutex::default());
        Ok(Self {
            store,
            pinned,
            ring,
            tier: Arc::default(),
            tier_bytes_max,
            choose_direct,
            direct_refused,
            calls,
            seen,
            lock,
            ways,
        })
    }

    /// Bytes of the GPUs' memory that loads hold.
    pub fn loaded_bytes(&self) -> u64 {
        self.ways().iter().map(|(_, way)| way.loaded_bytes()).sum()
    }

    /// Bytes of pinned memory, and how many of them are in use.
    fn pinned_bytes(&self) -> (usize, usize) {
        let (ways, tier) = (self.slot_bytes(false), self.tier.bytes());
        (ways.0 + tier.0, ways.1 + tier.1)
    }

    /// Bytes of GPUs' memory for GPUDirect Storage, and how many of them are in use.
    fn ring_bytes(&self) -> (usize, usize) {
        self.slot_bytes(true)
    }

    /// Threads that wait now until a GPU comes to the copies.
    #[getter]
    fn waiting_count(&self) -> usize {
        self.ways().iter().map(|(_, way)| way.waiting_count.load(Ordering::Relaxed)).sum()
    }

    /// Bytes copied from and to GPUs.
    fn copied_bytes(&self) -> (u64, u64) {
        let ways = self.ways();
        let counts = ways.iter().map(|(_, way)| way.staging.counts());
        counts.fold((0, 0), |sum, counts| (sum.0 + counts.down_bytes, sum.1 + counts.up_bytes))
    }

    /// Seconds that the copies from and to GPUs took, without their waits.
    fn copy_seconds(&self) -> (f64, f64) {
        let ways = self.ways();
        let counts = ways.iter().map(|(_, way)| way.staging.counts());
        let sum = counts.fold((0, 0), |sum, counts| (sum.0 + counts.down_ns, sum.1 + counts.up_ns));
        (sum.0 as f64 / 1e9, sum.1 as f64 / 1e9)
    }

    /// Seconds of waits for a full ring because a GPU was behind, and because the disk was; and the
    /// number of tensors that stayed on their GPU for either reason.
    fn full_ring(&self) -> (f64, f64, u64) {
        let ways = self.ways();
        let all = ways.iter().map(|(_, way)| way.books().full);
        all.fold((0.0, 0.0, 0), |sum, full| {
            let (gpu_s, disk_s) = (full.gpu_wait.as_secs_f64(), full.disk_wait.as_secs_f64());
            (sum.0 + gpu_s, sum.1 + disk_s, sum.2 + full.stayed_count)
        })
    }

    /// Bytes copied from GPUs that were to stay in pinned memory.
    fn staying_bytes(&self) -> u64 {
        self.ways().iter().map(|(_, way)| way.staging.counts().staying_bytes).sum()
    }

    /// Pins memory until `nbytes` of the GPUs' tensors can stay there, or the limit is reached.
    /// Does nothing if the tensors of all of them go past the CPU's memory.
    fn pin_for_tier(&self, py: Python<'_>, nbytes: usize) -> PyResult<()> {
        let found = self.ways().iter().find(|(_, way)| !way.is_direct).map(|(gpu, _)| *gpu);
        let Some(gpu) = found else { return Ok(()) };
        while self.tier.bytes().0 < nbytes.min(self.tier_bytes_max) {
            let left_bytes = self.tier_bytes_max.saturating_sub(self.tier.bytes().0);
            let grow = || self.tier.grow(&Gpu::get(gpu)?, left_bytes.min(TIER_BLOCK_BYTES));
            raised(py, py.detach(grow))?;
        }
        Ok(())
    }

    /// Each GPU whose tensors go through the CPU's memory, the recent bytes per second of the
    /// copies from it and to it, and the bytes of its longest tensor that can go to the disk.
    fn copy_rates(&self) -> Vec<(usize, Option<f64>, Option<f64>, usize)> {
        let ways = self.ways();
        let ways = ways.iter().filter(|(_, way)| !way.is_direct);
        let rates = ways.map(|(gpu, way)| (*gpu, way.staging.rates(), way.staging.longest_bytes()));
        rates.map(|(gpu, rates, longest)| (gpu, rates.down, rates.up, longest)).collect()
    }

    /// The errors of writes since the last call, each with the number of its tensors.
    fn take_refusals(&self, py: Python<'_>) -> Vec<(Py<PyAny>, u64)> {
        let ways = self.ways();
        let all: Vec<_> = ways.iter().flat_map(|(_, way)| way.staging.take_refusals()).collect();
        drop(ways);
        let raised = |error| to_python(py, error).into_value(py).into_any();
        all.iter().map(|(error, count)| (raised(error), *count)).collect()
    }

    /// Each GPU that has a way, and the most saved bytes that were away from it at once.
    fn away_bytes_peaks(&self) -> Vec<(usize, u64)> {
        self.ways().iter().map(|(gpu, way)| (*gpu, way.books().away_bytes_peak)).collect()
    }
}

impl Gpus {
    /// The way of a GPU, unless its tensors have no place to go; the first call allocates memory.
    pub fn way(&self, py: Python<'_>, gpu: usize) -> PyResult<core::Result<Arc<GpuWay>>> {
        if let Some(way) = self.known(gpu) {
            return Ok(Ok(way));
        }
        if self.tier_bytes_max == 0
            && let Err(error) = self.store.refuse_without_directory()
        {
            return Ok(Err(error));
        }
        let direct = self.direct(py, gpu)?;
        let is_direct = direct.is_some();
        let memory = if is_direct { self.ring } else { self.pinned };
        let open =
            || Staging::open(&Gpu::get(gpu)?, Arc::clone(&self.store), self.pinned, &self.tier);
        let opened = direct.map_or_else(|| py.detach(open), Ok);
        Ok(opened.map(|staging| self.enter(gpu, staging, is_direct, memory)))
    }

    /// Opens the way past the CPU's memory, if that was chosen and works.
    fn direct(&self, py: Python<'_>, gpu: usize) -> PyResult<Option<Staging>> {
        let chosen: Option<(Option<PathBuf>, bool)> =
            self.choose_direct.bind(py).call1((gpu,))?.extract()?;
        let Some((library, allows_compat)) = chosen else { return Ok(None) };
        let opened = py.detach(|| {
            let library = Library::find(library.as_deref())?;
            let gpu = Gpu::get(gpu)?;
            library.open_driver(allows_compat)?;
            Staging::open_direct(&gpu, self.store.for_gpus(library)?, self.ring, library)
        });
        match opened {
            Ok(staging) => Ok(Some(staging)),
            Err(error) => {
                self.direct_refused.bind(py).call1((gpu, error.to_string()))?;
                Ok(None)
            }
        }
    }

    fn enter(
        &self,
        gpu: usize,
        staging: Staging,
        is_direct: bool,
        memory: PinnedBytes,
    ) -> Arc<GpuWay> {
        let way = Arc::new(GpuWay {
            gpu,
            staging,
            tier_bytes_max: AtomicUsize::new(if is_direct { 0 } else { self.tier_bytes_max }),
            is_direct,
            calls: Arc::clone(&self.calls),
            seen: Arc::clone(&self.seen),
            lock: Arc::clone(&self.lock),
            waiting_count: AtomicUsize::new(0),
            given_up_at: AtomicU64::new(0),
            // Without a directory tensors pass through no slots: they stay in the tier.
            window_bytes: WINDOW_BYTES.min(memory.down.max(self.tier_bytes_max) as u64 / 2),
            waits: Waits::default(),
            books: Mutex::default(),
            held: Mutex::default(),
        });
        // Another thread may have been faster.
        let mut ways = self.ways();
        if let Some((_, known)) = ways.iter().find(|(known, _)| *known == gpu) {
            return Arc::clone(known);
        }
        ways.push((gpu, Arc::clone(&way)));
        way
    }

    fn slot_bytes(&self, is_direct: bool) -> (usize, usize) {
        let ways = self.ways();
        let ways = ways.iter().filter(|(_, way)| way.is_direct == is_direct);
        let sizes = ways.map(|(_, way)| way.staging.pinned_bytes());
        sizes.fold((0, 0), |sum, bytes| (sum.0 + bytes.0, sum.1 + bytes.1))
    }

    /// The current stream of a GPU, noted as a stream that uses tensors.
    pub fn stream(&self, py: Python<'_>, gpu: usize) -> PyResult<GpuStream> {
        let handle = self.calls.current_stream(py, gpu)?; // defence: the current stream
        let stream = GpuStream { gpu, handle };
        self.seen.note(py, stream, &self.calls)?;
        Ok(stream)
    }

    /// Lets go of memory that captures of CUDA graphs held back, if they have ended.
    pub fn let_held_go(&self, py: Python<'_>) {
        let has_held = |way: &&Arc<GpuWay>| !way.held().is_empty();
        let ways: Vec<_> =
            self.ways().iter().map(|(_, way)| way).filter(has_held).map(Arc::clone).collect();
        for way in &ways {
            way.let_held_go(py);
        }
    }

    /// Waits a moment with another thread that waits for a GPU; `false` if there is none.
    ///
    /// That thread has taken its record out of the books: the record is on its way out of memory,
    /// but other threads cannot find it.
    pub fn wait_with_others(&self, py: Python<'_>) -> PyResult<bool> {
        let is_waited_for = |way: &GpuWay| way.waiting_count.load(Ordering::Relaxed) > 0;
        let found = self.ways().iter().find(|(_, way)| is_waited_for(way)).cloned();
        let Some((_, way)) = found else { return Ok(false) };
        way.wait_for_turn(py, way.staging.turn()).map(|()| true)
    }

    /// The way of a GPU, if one of its tensors has left it.
    pub fn known(&self, gpu: usize) -> Option<Arc<GpuWay>> {
        let ways = self.ways();
        ways.iter().find(|(known, _)| *known == gpu).map(|(_, way)| Arc::clone(way))
    }

    pub fn ways(&self) -> MutexGuard<'_, Vec<(usize, Arc<GpuWay>)>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GpuWay {
    /// True in a child that was forked from the process that opened the way.
    pub fn is_forked(&self) -> bool {
        self.staging.is_forked()
    }

    /// Waits for the GPU to come to a copy, after there was no room at this turn. Meanwhile
    /// [`Gpus::wait_with_others`] of another thread waits too.
    pub fn wait_for_room(&self, py: Python<'_>, turn: u64) -> PyResult<()> {
        self.waiting_count.fetch_add(1, Ordering::Relaxed);
        let waited = self.wait_for_turn(py, turn);
        self.waiting_count.fetch_sub(1, Ordering::Relaxed);
        waited
    }

    fn wait_for_turn(&self, py: Python<'_>, turn: u64) -> PyResult<()> {
        py.check_signals()?;
        self.lock.without(py, || self.staging.wait_for_turn(turn, SIGNAL_CHECK)).map(drop)
    }

    /// Notes that a thread waited in vain: until the GPU comes to a copy, no other thread waits.
    pub fn give_up_waiting(&self, turn: u64) {
        self.given_up_at.store(turn + 1, Ordering::Relaxed);
    }

    /// True if a thread waited in vain at this turn.
    pub fn is_given_up(&self, turn: u64) -> bool {
        self.given_up_at.load(Ordering::Relaxed) == turn + 1
    }

    /// Counts a wait for room in the ring, by its cause.
    pub fn count_wait(&self, full: Full, waited: Duration) {
        let mut books = self.books();
        match full {
            Full::DiskBehind => books.full.disk_wait += waited,
            Full::GpuBehind | Full::Pinned | Full::TooLong => books.full.gpu_wait += waited,
        }
    }

    /// Counts a tensor that stays on the GPU because the ring is full.
    pub fn count_stayed(&self) {
        self.books().full.stayed_count += 1;
    }

    /// Counts a save; returns the sum of all saves so far.
    pub fn count_saved(&self, nbytes: u64) -> u64 {
        let mut books = self.books();
        books.saved_bytes += nbytes;
        books.saved_bytes
    }

    /// Notes the progress of the program in its round, in seconds of the plan.
    pub fn note_progress(&self, moment_s: f64) {
        self.books().progress_s = moment_s;
    }

    /// True if the program has reached this moment of its round.
    pub fn has_come_to(&self, moment_s: f64) -> bool {
        self.books().progress_s >= moment_s
    }

    /// True if so much was saved after `saved_bytes` that their copy has mostly ended.
    pub fn is_past_window(&self, saved_bytes: u64) -> bool {
        self.books().saved_bytes - saved_bytes >= self.window_bytes
    }

    /// Counts memory of the GPU that was let go.
    pub fn count_released(&self, nbytes: u64) {
        let mut books = self.books();
        books.released_bytes += nbytes;
        // A load may outlive the saved bytes.
        let away_bytes = books.released_bytes.saturating_sub(books.loaded_bytes);
        books.away_bytes_peak = books.away_bytes_peak.max(away_bytes);
    }

    /// Counts released bytes whose tensor is dropped.
    pub fn count_dropped(&self, nbytes: u64) {
        self.books().released_bytes -= nbytes;
    }

    /// Counts the memory of a load for as long as its storage lives.
    pub fn count_loaded(self: &Arc<Self>, storage: &Bound<'_, PyAny>, nbytes: u64) -> PyResult<()> {
        let number = {
            let mut books = self.books();
            books.load_count += 1;
            books.load_count
        };
        let unloaded = Unloaded { way: Arc::downgrade(self), number, nbytes };
        let unloaded = Bound::new(storage.py(), unloaded)?;
        let reference = PyWeakrefReference::new_with(storage, unloaded)?.unbind();
        let mut books = self.books();
        books.loaded_bytes += nbytes;
        books.loads.insert(number, reference);
        Ok(())
    }

    fn loaded_bytes(&self) -> u64 {
        self.books().loaded_bytes
    }

    /// The memory that captures of CUDA graphs held back.
    pub fn held(&self) -> MutexGuard<'_, Vec<Departure>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream as the driver knows it.
pub fn user_stream(stream: GpuStream) -> UserStream {
    // SAFETY: the handles are those of torch's current streams. Torch never destroys its own; a
    // program's own streams have to outlive the session, as docs/guides/gpu.md asks.
    unsafe { UserStream::new(stream.handle) }
}
