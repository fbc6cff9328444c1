//! Handles and loadings, which every kind of memory offers to every user.
//!
//! A *handle* is a range of a storage in the store, and a *loading* is its way back. Neither knows
//! its user: activations use them, and other memory of training could. Memory of the CPU is written
//! in place, and read into memory that becomes the tensor, without a copy; that of a GPU goes
//! through pinned memory (`staged.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core as core;
use ssdtrain_core::cuda::stream::Event;

use crate::by_plan::ByPlan;
use crate::error::to_python;
use crate::geometry::Layout;
use crate::gpu::GpuWay;
use crate::gpu_calls::GpuStream;
use crate::owner::{LetGo, let_go};
use crate::staged::{GpuBytes, GpuLoad, Leaving};
use crate::store::{Slot, Store, wait};
use crate::torch::Torch;

/// A range in the store; its death gives the space back.
#[pyclass(frozen, freelist = 4096, module = "ssdtrain._core")]
pub struct Handle {
    bytes: Bytes,
    /// The address that was written: torch can move the memory of a live storage.
    pub address: usize,
    /// First byte of the range in its storage.
    start: u64,
    last: Mutex<LastRead>,
    _let_go: LetGo,
}

enum Bytes {
    Host(core::Stored),
    Gpu(GpuBytes),
}

/// The way of a write.
pub enum Way<'a> {
    Host,
    Gpu {
        way: &'a Arc<GpuWay>,
        stream: GpuStream,
        /// True if the write waits while the disk takes no more.
        waits_for_disk: bool,
        by_plan: ByPlan,
    },
}

#[derive(Default)]
struct LastRead {
    loading: Option<Py<PyWeakrefReference>>,
    /// The memory of the CPU that it filled; alive as long as some tensor lies on it.
    slot: Weak<core::Restored>,
    /// The storage on a GPU, with the load that fills it.
    on_gpu: Option<(Py<PyWeakrefReference>, Arc<core::staging::Loading>)>,
}

impl Handle {
    /// Begins the write of a range of the storage of `source`, which is held until its bytes are
    /// safe.
    pub fn save(
        store: &Store,
        source: &Bound<'_, PyAny>,
        start: u64,
        nbytes: u64,
        way: &Way<'_>,
    ) -> PyResult<Result<Py<Self>, core::Error>> {
        let py = source.py();
        let storage = source.call_method0(intern!(py, "untyped_storage"))?;
        let memory: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let address = memory + start as usize;
        let begun = match way {
            Way::Host => store
                .begin_write(py, address, nbytes as usize, source.clone().unbind())?
                .map(Bytes::Host),
            Way::Gpu { way, stream, waits_for_disk, by_plan } => {
                let (source, by_plan) = (source.clone(), *by_plan);
                let leaving = Leaving { source, address, nbytes, by_plan };
                GpuBytes::save(way, *stream, leaving, *waits_for_disk)?.map(Bytes::Gpu)
            }
        };
        begun.map_or_else(|error| Ok(Err(error)), |it| Self::new(py, it, address, start).map(Ok))
    }

    /// The handle of a tensor whose copy from its GPU has begun.
    pub fn of_gpu(
        py: Python<'_>,
        bytes: GpuBytes,
        address: usize,
        start: u64,
    ) -> PyResult<Py<Self>> {
        Self::new(py, Bytes::Gpu(bytes), address, start)
    }

    fn new(py: Python<'_>, bytes: Bytes, address: usize, start: u64) -> PyResult<Py<Self>> {
        Py::new(py, Self { bytes, address, start, last: Mutex::default(), _let_go: LetGo })
    }

    /// Waits until the source may be let go; on a GPU, in the order of its streams. Returns the
    /// error of a write that failed, or `false` if no wait helps, because a CUDA graph is being
    /// captured.
    pub fn ended(&self, py: Python<'_>) -> PyResult<Result<bool, core::Error>> {
        match &self.bytes {
            Bytes::Host(stored) => {
                let answer = wait(py, stored.ticket());
                let_go(py);
                Ok(answer?.map(|()| true))
            }
            Bytes::Gpu(bytes) => bytes.release(py),
        }
    }

    pub fn is_done(&self, py: Python<'_>) -> bool {
        match &self.bytes {
            Bytes::Host(stored) => {
                let done = stored.ticket().is_done();
                // A caller that sees a write done sees its source dropped.
                let_go(py);
                done
            }
            Bytes::Gpu(bytes) => bytes.is_done(),
        }
    }

    /// Begins the read, or joins one that another user of the handle began.
    pub fn begin_read(slf: &Bound<'_, Self>, store: &Store) -> PyResult<Py<Loading>> {
        let (this, py) = (slf.get(), slf.py());
        if let Some(loading) = this.joinable(py) {
            return Ok(loading.unbind());
        }
        let state = this.begin(py, store)?;
        Self::note_read(slf, state)
    }

    /// True if its read is one that [`begin_reads`](Self::begin_reads) can begin with others.
    pub fn reads_with(&self, py: Python<'_>, others: &[Bound<'_, Self>]) -> bool {
        let Bytes::Gpu(bytes) = &self.bytes else { return false };
        let is_alike = |other: &Bound<'_, Self>| match &other.get().bytes {
            Bytes::Gpu(first) => first.loads_with(bytes),
            Bytes::Host(_) => false,
        };
        others.first().is_none_or(is_alike) && !self.is_here(py)
    }

    /// Begins the reads of tensors of one GPU together, each of which
    /// [can be begun so](Self::reads_with).
    pub fn begin_reads(
        py: Python<'_>,
        handles: &[Bound<'_, Self>],
    ) -> PyResult<Vec<PyResult<Py<Loading>>>> {
        let bytes = handles.iter().filter_map(|handle| match &handle.get().bytes {
            Bytes::Gpu(bytes) => Some(bytes),
            Bytes::Host(_) => None,
        });
        let loads = GpuBytes::load_all(py, &bytes.collect::<Vec<_>>())?;
        let begun = handles.iter().zip(loads);
        let begun =
            begun.map(|(handle, load)| Self::note_read(handle, handle.get().note_load(py, load?)?));
        Ok(begun.collect())
    }

    fn note_read(slf: &Bound<'_, Self>, state: LoadState) -> PyResult<Py<Loading>> {
        let (this, py) = (slf.get(), slf.py());
        let is_here = matches!(state, LoadState::Here(_));
        let state = Mutex::new(state);
        let loading = Py::new(py, Loading { handle: slf.clone().unbind(), state })?;
        if !is_here {
            let reference = PyWeakrefReference::new(loading.bind(py))?.unbind();
            let before = this.last().loading.replace(reference);
            drop(before);
        }
        Ok(loading)
    }

    fn note_load(&self, py: Python<'_>, load: GpuLoad) -> PyResult<LoadState> {
        let storage = PyWeakrefReference::new(&load.storage(py))?.unbind();
        let on_gpu = Some((storage, Arc::clone(&load.loading)));
        let before = std::mem::replace(&mut self.last().on_gpu, on_gpu);
        drop(before);
        Ok(LoadState::Gpu(Arc::new(load)))
    }

    /// Begins a read, unless a node still holds a tensor on the bytes of the last read.
    fn begin(&self, py: Python<'_>, store: &Store) -> PyResult<LoadState> {
        match &self.bytes {
            Bytes::Host(stored) => {
                if let Some(slot) = self.last().slot.upgrade() {
                    return Ok(LoadState::Here(slot));
                }
                let pending = store.begin_read(stored).map_err(|error| to_python(py, &error))?;
                Ok(LoadState::Pending(Arc::new(pending)))
            }
            Bytes::Gpu(bytes) => {
                if let Some((storage, loading)) = self.on_gpu(py) {
                    return Ok(LoadState::Gpu(Arc::new(bytes.join(&loading, storage))));
                }
                self.note_load(py, bytes.load(py)?)
            }
        }
    }

    /// The last read, if it lives and did not fail: another user can join it.
    fn joinable<'py>(&self, py: Python<'py>) -> Option<Bound<'py, Loading>> {
        let reference = self.last().loading.as_ref()?.clone_ref(py);
        let loading = reference.bind(py).upgrade()?;
        let loading: Bound<'_, Loading> =
            loading.cast_into().expect("a handle has references to its own loadings alone");
        let has_failed = loading.get().has_failed();
        (!has_failed).then_some(loading)
    }

    /// The memory of the last load to a GPU and that load, if the memory is still in use.
    fn on_gpu<'py>(
        &self,
        py: Python<'py>,
    ) -> Option<(Bound<'py, PyAny>, Arc<core::staging::Loading>)> {
        let (storage, loading) = {
            let last = self.last();
            let (storage, loading) = last.on_gpu.as_ref()?;
            (storage.clone_ref(py), Arc::clone(loading))
        };
        let storage = storage.bind(py).upgrade()?;
        loading.failure().is_none().then_some((storage, loading))
    }

    fn last(&self) -> MutexGuard<'_, LastRead> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Handle {
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    pub fn slot_bytes(&self) -> usize {
        match &self.bytes {
            Bytes::Host(stored) => stored.slot_bytes(),
            Bytes::Gpu(bytes) => bytes.nbytes(),
        }
    }

    pub fn is_here(&self, py: Python<'_>) -> bool {
        let is_read = self.joinable(py).is_some() || self.last().slot.strong_count() > 0;
        is_read || self.on_gpu(py).is_some()
    }

    fn done(&self, py: Python<'_>) -> bool {
        self.is_done(py)
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.ended(py)?.map(drop).map_err(|error| to_python(py, &error))
    }

    pub fn cancel(&self, py: Python<'_>) -> bool {
        let Bytes::Host(stored) = &self.bytes else {
            // The copy is on its stream.
            return false;
        };
        let cancelled = stored.cancel();
        let_go(py);
        cancelled
    }
}

/// A read that was begun, or bytes that are here; it holds their memory.
#[pyclass(frozen, weakref, freelist = 4096, module = "ssdtrain._core")]
pub struct Loading {
    handle: Py<Handle>,
    state: Mutex<LoadState>,
}

#[derive(Clone)]
enum LoadState {
    Pending(Arc<core::Pending>),
    Here(Arc<core::Restored>),
    /// Nobody joins it any more: the next user reads anew.
    Failed(core::Error),
    Gpu(Arc<GpuLoad>),
}

impl Loading {
    /// Waits for the bytes; of a GPU, until they are on their way on a stream.
    fn wait(&self, py: Python<'_>) -> PyResult<Result<(), core::Error>> {
        let pending = match self.state() {
            LoadState::Pending(pending) => pending,
            LoadState::Here(_) => return Ok(Ok(())),
            LoadState::Failed(error) => return Ok(Err(error)),
            LoadState::Gpu(load) => return load.wait(py),
        };
        let answer = wait(py, pending.ticket())?;
        let restored = answer.and_then(|()| pending.restored());
        let outcome = restored.as_ref().map(|_| ()).map_err(Clone::clone);
        // Several threads may have waited for the same read; the slot of the first counts.
        let mut state = self.locked();
        if matches!(*state, LoadState::Pending(_)) {
            *state = match restored {
                Ok(restored) => LoadState::Here(Arc::new(restored)),
                Err(error) => LoadState::Failed(error),
            };
        }
        Ok(outcome)
    }

    /// Waits for the bytes, and returns a tensor of a layout on them.
    pub fn restore<'py>(
        &self,
        py: Python<'py>,
        torch: &Torch,
        layout: &Layout,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.wait(py)?.map_err(|error| to_python(py, &error))?;
        let handle = self.handle.get();
        match self.state() {
            LoadState::Here(restored) => {
                handle.last().slot = Arc::downgrade(&restored);
                let storage = torch.storage_on(&Bound::new(py, Slot(restored))?)?;
                layout.build(torch, &storage, handle.start)
            }
            LoadState::Gpu(load) => {
                let tensor = layout.build(torch, &load.storage(py), handle.start)?;
                load.lend(&tensor)?.map_err(|error| to_python(py, &error))?;
                Ok(tensor)
            }
            LoadState::Pending(_) | LoadState::Failed(_) => unreachable!("it was waited for"),
        }
    }

    /// The event at which the bytes are on their GPU, if a copy is on its way.
    pub fn loaded(&self) -> Option<Arc<Event>> {
        match self.state() {
            LoadState::Gpu(load) => load.loading.loaded(),
            LoadState::Here(_) | LoadState::Failed(_) | LoadState::Pending(_) => None,
        }
    }

    /// True if the bytes are there.
    pub fn is_here(&self) -> bool {
        match self.state() {
            LoadState::Here(_) => true,
            LoadState::Failed(_) => false,
            LoadState::Pending(pending) => pending.ticket().is_done() && pending.restored().is_ok(),
            LoadState::Gpu(load) => load.is_here(),
        }
    }

    /// True if the bytes are there, or will never be.
    pub fn is_done(&self) -> bool {
        match self.state() {
            LoadState::Here(_) | LoadState::Failed(_) => true,
            LoadState::Pending(pending) => pending.ticket().is_done(),
            LoadState::Gpu(load) => load.loading.is_enqueued(),
        }
    }

    fn has_failed(&self) -> bool {
        match self.state() {
            LoadState::Failed(_) => true,
            LoadState::Gpu(load) => load.loading.failure().is_some(),
            LoadState::Pending(_) | LoadState::Here(_) => false,
        }
    }

    /// A copy of the state, so that no lock is held while torch is called.
    fn state(&self) -> LoadState {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, LoadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Loading {
    fn done(&self) -> bool {
        self.is_done()
    }

    #[pyo3(name = "wait")]
    fn wait_for_bytes(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py)?.map_err(|error| to_python(py, &error))
    }
}
