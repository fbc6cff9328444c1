//! `SavedTensor`: autograd holds it in the place of a tensor whose bytes may leave memory.
//!
//! The packed object is the lifetime: autograd drops it when its node has run, when the graph is
//! dropped, or after an exception, and with its last user a record gives up its memory, its write
//! and its extent. Nobody counts steps.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core as core;
use ssdtrain_core::cuda::stream::Event;

use crate::geometry::Layout;
use crate::kept::{NO_VERSION, is_true, version_of};
use crate::record::Record;
use crate::torch::Torch;
use crate::transfer::Loading;

/// A weak reference to a saved tensor.
pub type SavedReference = Py<PyWeakrefReference>;
/// The tensors that are packed between two backwards; they keep their round alive.
pub type SharedRound = core::rounds::SharedRound<SavedReference>;

/// The packed object of a tensor whose bytes a record manages.
#[pyclass(frozen, weakref, freelist = 4096, module = "ssdtrain._core")]
pub struct SavedTensor {
    pub record: Py<Record>,
    pub layout: Layout,
    #[pyo3(get)]
    pub sequence: i64,
    leaf: Option<Py<PyWeakrefReference>>,
    /// Its round, and its place there in the order of packing.
    place: OnceLock<(SharedRound, usize)>,
    /// A read that was begun before a node needed it.
    ahead: Mutex<Option<Py<Loading>>>,
}

impl SavedTensor {
    pub fn new<'py>(
        tensor: &Bound<'py, PyAny>,
        layout: Layout,
        record: &Bound<'py, Record>,
        sequence: i64,
    ) -> PyResult<Bound<'py, Self>> {
        let py = tensor.py();
        let leaf = if is_true(tensor, intern!(py, "is_leaf"))? {
            Some(PyWeakrefReference::new(tensor)?.unbind())
        } else {
            None
        };
        let saved = Self {
            record: record.clone().unbind(),
            layout,
            sequence,
            leaf,
            place: OnceLock::new(),
            ahead: Mutex::default(),
        };
        Bound::new(py, saved)
    }

    /// True if the tensor was not changed in place since it was saved.
    ///
    /// With hooks set autograd itself no longer checks, and the gradient would be silently wrong.
    pub fn is_unchanged(&self, py: Python<'_>) -> PyResult<bool> {
        let record = self.record.get();
        let now = version_of(record.counter.bind(py))?;
        Ok(record.version == NO_VERSION || record.version == now)
    }

    /// The very tensor that was saved, if it is a leaf that still lies on `storage`.
    ///
    /// Autograd hands out the leaf itself. A backward may return it as a gradient, and a gradient
    /// that nobody else holds becomes a parameter's own, to which others are added in place: a
    /// second tensor on the same bytes would let the user's own tensor change.
    pub fn original<'py>(
        &self,
        torch: &Torch,
        storage: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = storage.py();
        let Some(leaf) = self.leaf.as_ref().and_then(|leaf| leaf.bind(py).upgrade()) else {
            return Ok(None);
        };
        let is_original = !torch.is_below_autograd(py)?
            && leaf.call_method0(intern!(py, "untyped_storage"))?.is(storage)
            && self.layout.is_of(&leaf)?; // defence: a leaf in memory is handed out itself
        Ok(is_original.then_some(leaf))
    }

    /// A tensor on the same bytes with the version counter of the saved tensor.
    pub fn counted<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.record.get().counted(tensor)
    }

    /// Gives it its place, once.
    pub fn take_place(&self, round: SharedRound, ordinal: usize) {
        self.place.get_or_init(|| (round, ordinal));
    }

    /// Counts the time of a hook for its round.
    pub fn note_hook(&self, took: Duration) {
        if let Some((round, _)) = self.place() {
            round.lock().note_hook(took.as_secs_f64());
        }
    }

    /// Its round and its ordinal there.
    pub fn place(&self) -> Option<&(SharedRound, usize)> {
        self.place.get()
    }

    /// Replaces the read ahead; returns the read ahead before.
    pub fn set_ahead(&self, ahead: Option<Py<Loading>>) -> Option<Py<Loading>> {
        std::mem::replace(&mut *self.ahead(), ahead)
    }

    /// The end of a copy to its GPU, if a read ahead has come so far.
    pub fn loaded_ahead(&self) -> Option<Arc<Event>> {
        self.ahead().as_ref().and_then(|loading| loading.get().loaded())
    }

    fn ahead(&self) -> MutexGuard<'_, Option<Py<Loading>>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SavedTensor {
    /// A tensor like the saved tensor, on memory that is still there.
    pub fn on_memory<'py>(
        &self,
        torch: &Torch,
        storage: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.counted(&self.layout.build(torch, storage, 0)?)
    }

    #[getter]
    fn record(&self, py: Python<'_>) -> Py<Record> {
        self.record.clone_ref(py)
    }

    #[getter]
    fn counter(&self, py: Python<'_>) -> Py<PyAny> {
        self.record.get().counter.clone_ref(py)
    }

    #[getter]
    fn version(&self) -> i64 {
        self.record.get().version
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> Py<PyAny> {
        self.layout.dtype.clone_ref(py)
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.layout.size(py)
    }

    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.layout.stride(py)
    }

    /// Bytes from the start of its storage to the tensor.
    #[getter]
    fn offset(&self) -> u64 {
        self.layout.offset
    }

    /// The other tensors of its node, which needs all of them at once.
    fn mates(&self, py: Python<'_>) -> PyResult<Vec<Py<Self>>> {
        let Some((round, own)) = self.place() else { return Ok(Vec::new()) };
        let (count, mut mates) = (round.lock().len(), Vec::new());
        let ways: [&mut dyn Iterator<Item = usize>; 2] =
            [&mut (0..*own).rev(), &mut (own + 1..count)];
        for way in ways {
            for ordinal in way {
                let reference = round.lock().entry(ordinal).clone_ref(py);
                match reference.bind(py).upgrade_as::<Self>()? {
                    Some(mate) if mate.get().sequence == self.sequence => mates.push(mate.unbind()),
                    _ => break,
                }
            }
        }
        Ok(mates)
    }

    #[getter]
    pub fn is_ahead(&self) -> bool {
        self.ahead().is_some()
    }

    fn note_stall(&self, stall_s: f64) {
        if let Some((round, _)) = self.place() {
            round.lock().note_stall(stall_s);
        }
    }
}

/// True if the saved tensor is dead.
pub fn is_dead(py: Python<'_>, reference: &SavedReference) -> bool {
    reference.bind(py).upgrade().is_none()
}
