//! `Record`: one saved storage at one version.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core as core;

use crate::by_plan::ByPlan;
use crate::geometry::{Layout, root_of};
use crate::gpu::Gpus;
use crate::gpu_calls::GpuStream;
use crate::kept::version_of;
use crate::timeline::{Life, Timeline};
use crate::torch::Torch;
use crate::transfer::{Handle, Way};

/// One saved storage at one version: its bytes in memory, on the way, or on the disk.
#[pyclass(frozen, weakref, freelist = 4096, module = "ssdtrain._core")]
pub struct Record {
    /// A weak reference to the storage; once it is dead, the memory is gone.
    storage: Py<PyWeakrefReference>,
    /// A weak reference to the tensor with the version counter; see [`root_of`].
    root: Py<PyWeakrefReference>,
    /// A tensor without bytes that shares this counter. Nothing ever changes it, because torch
    /// reads it without the GIL.
    pub counter: Py<PyAny>,
    /// First byte of the part of the storage that it covers; see [`Layout::part`].
    pub start: u64,
    #[pyo3(get)]
    pub nbytes: u64,
    /// The version at the pack, which identifies the content.
    pub version: i64,
    /// Autograd's sequence number when this was packed last: the gate.
    sequence: AtomicI64,
    /// The policy's name for this tensor.
    #[pyo3(get)]
    pub key: i64,
    /// The stream that it belongs to, if it is on a GPU.
    pub stream: Option<GpuStream>,
    /// The plan for its way, if it leaves a GPU by a plan.
    pub by_plan: OnceLock<ByPlan>,
    /// Its bytes in the account; they end with it.
    pub holding: core::Holding,
    /// Its moments, if the timeline was started.
    pub life: Life,
    state: Mutex<State>,
}

pub(super) struct State {
    /// The tensor itself, for as long as its bytes may be needed from memory.
    pub(super) source: Option<Py<PyAny>>,
    /// Its bytes in the store, from the beginning of a write until the write is given up.
    handle: Option<Py<Handle>>,
    is_lent: bool,
    was_found: bool,
    /// The write from before the bytes were saved again, which holds the storage until it ends.
    replaced: Option<Py<Handle>>,
    pub(super) recipe: Recipe,
    pub(super) made: Made,
}

/// The way in which the bytes are made again from other saved tensors, if there is one.
#[derive(Default)]
pub(super) enum Recipe {
    #[default]
    None,
    /// The bytes are kept or written, and the recipe is compared with them at their first need.
    Unproved(Py<PyAny>),
    /// The bytes are neither kept nor written.
    Used(Py<PyAny>),
}

/// Tells if the bytes in memory were made again, and if a node uses them.
#[derive(Clone, Copy, Default, Eq, PartialEq)]
pub(super) enum Made {
    #[default]
    Not,
    /// They may go at any time: they were made for another tensor, or an own node has used them.
    Idle,
    /// An own node uses them.
    InUse,
}

/// The parts of a new record beside its tensor.
pub struct Part<'a> {
    pub layout: &'a Layout,
    pub start: u64,
    pub nbytes: u64,
    pub sequence: i64,
    pub key: i64,
    /// The stream that it belongs to, if it is on a GPU.
    pub stream: Option<GpuStream>,
}

impl Record {
    /// Its key and its size.
    pub fn name(&self) -> (i64, u64) {
        (self.key, self.nbytes)
    }

    pub fn new<'py>(
        torch: &Torch,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        part: &Part<'_>,
        account: &core::Account,
        timeline: &Timeline,
    ) -> PyResult<Bound<'py, Self>> {
        let py = tensor.py();
        let source = tensor.call_method0(intern!(py, "detach"))?;
        let counter = tensor.call_method0(intern!(py, "detach"))?;
        let empty = torch.empty(part.layout.dtype.bind(py), part.layout.gpu)?;
        counter.setattr(intern!(py, "data"), empty)?;
        let record = Self {
            storage: PyWeakrefReference::new(storage)?.unbind(),
            root: PyWeakrefReference::new(&root_of(tensor)?)?.unbind(),
            counter: counter.unbind(),
            start: part.start,
            nbytes: part.nbytes,
            version: version_of(tensor)?,
            sequence: AtomicI64::new(part.sequence),
            key: part.key,
            stream: part.stream,
            by_plan: OnceLock::new(),
            holding: account.hold(part.nbytes),
            life: timeline.begin(part.key, part.nbytes),
            state: Mutex::new(State {
                source: Some(source.unbind()),
                handle: None,
                is_lent: false,
                was_found: false,
                replaced: None,
                recipe: Recipe::None,
                made: Made::default(),
            }),
        };
        Bound::new(py, record)
    }

    /// The node that has to be passed before its bytes are written.
    pub fn sequence(&self) -> i64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// Has the write wait for another node that saves the same bytes.
    pub fn wait_for_node(&self, sequence: i64) {
        self.sequence.fetch_max(sequence, Ordering::Relaxed);
    }

    /// True if it is on a GPU whose tensors may leave it.
    pub fn is_on_gpu(&self) -> bool {
        self.stream.is_some()
    }

    /// Notes the plan for its way from the GPU, before the way begins.
    pub fn plan(&self, by_plan: ByPlan) {
        self.by_plan.get_or_init(|| by_plan);
    }

    /// Finds the record of the tensor's part of the storage at its version.
    ///
    /// Tensors with different version counters never share a record.
    pub fn find<'py>(
        known: &[Bound<'py, Self>],
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        (start, end): (u64, u64),
    ) -> PyResult<Option<Bound<'py, Self>>> {
        if known.is_empty() {
            return Ok(None);
        }
        let (version, root) = (version_of(tensor)?, root_of(tensor)?);
        let is_own =
            |record: &&Bound<'py, Self>| record.get().is_of(storage, version, &root, start, end);
        Ok(known.iter().find(is_own).cloned())
    }

    /// True if it is of this storage, at this version of the counter of `root`, and has the bytes
    /// from `start` to `end` of the storage.
    fn is_of(
        &self,
        storage: &Bound<'_, PyAny>,
        version: i64,
        root: &Bound<'_, PyAny>,
        start: u64,
        end: u64,
    ) -> bool {
        let py = storage.py();
        let counts_apart = self.root.bind(py).upgrade().is_none_or(|own| !own.is(root));
        let is_elsewhere = start < self.start || self.start + self.nbytes < end;
        let is_other = is_elsewhere
            || !self.is_on(storage) // defence: identity with a look at life
            || counts_apart // defence: identity with the version counter
            || self.version != version; // defence: version at pack
        !is_other
    }

    pub fn source<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.state().source.as_ref().map(|source| source.bind(py).clone())
    }

    pub fn handle<'py>(&self, py: Python<'py>) -> Option<Bound<'py, Handle>> {
        self.state().handle.as_ref().map(|handle| handle.bind(py).clone())
    }

    pub fn set_handle(&self, handle: Option<Py<Handle>>) {
        let before = std::mem::replace(&mut self.state().handle, handle);
        drop(before);
    }

    pub fn has_source(&self) -> bool {
        self.state().source.is_some()
    }

    pub fn has_handle(&self) -> bool {
        self.state().handle.is_some()
    }

    pub fn is_lent(&self) -> bool {
        self.state().is_lent
    }

    /// Takes the bytes from memory again, because they were saved again after their write began.
    ///
    /// Under a bound the older write is given up, so that the memory that it still holds counts.
    pub fn renew(&self, tensor: &Bound<'_, PyAny>, is_bounded: bool) -> PyResult<()> {
        let source = self.counted(tensor)?.unbind();
        let py = tensor.py();
        let handle = self.handle(py).filter(|handle| !is_bounded && !handle.get().cancel(py));
        let before = {
            let mut state = self.state();
            let replaced = std::mem::replace(&mut state.replaced, handle.map(Bound::unbind));
            state.made = Made::Not;
            (state.source.replace(source), state.handle.take(), replaced)
        };
        self.holding.take_back();
        self.holding.set_fate(core::Fate::Kept);
        drop(before);
        Ok(())
    }

    /// The number of tensors on the storage that a write from before the last save holds.
    pub fn replaced_count(&self, py: Python<'_>) -> usize {
        let replaced = self.state().replaced.as_ref().map(|handle| handle.clone_ref(py));
        let is_under_way = replaced.is_some_and(|handle| !handle.get().is_done(py));
        if !is_under_way {
            let before = self.state().replaced.take();
            drop(before);
        }
        usize::from(is_under_way)
    }

    /// True if it is of this storage.
    pub fn is_on(&self, storage: &Bound<'_, PyAny>) -> bool {
        self.storage(storage.py()).is_some_and(|own| own.is(storage))
    }

    /// True if it has any of these bytes of its storage.
    pub fn overlaps(&self, (start, end): (u64, u64)) -> bool {
        self.start < end && start < self.start + self.nbytes
    }

    /// True if it is of this storage, and its version counter has seen no change.
    pub fn is_unchanged_on(&self, storage: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.is_on(storage) && self.version == version_of(self.counter.bind(storage.py()))?)
    }

    /// A tensor on the same bytes with the version counter of the saved tensor.
    ///
    /// So every other node that saved the same tensor notices a backward that changes its tensor in
    /// place, and a change between a backward and its double backward.
    pub fn counted<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, counter) = (tensor.py(), self.counter.bind(tensor.py()));
        // defence: one counter for all who saved it
        let twin = counter.call_method0(intern!(py, "detach"))?;
        twin.setattr(intern!(py, "data"), tensor)?;
        Ok(twin)
    }

    /// Notes that a backward has found its bytes in memory; `false` if another had before.
    pub fn note_found(&self) -> bool {
        !std::mem::replace(&mut self.state().was_found, true)
    }

    pub fn was_found(&self) -> bool {
        self.state().was_found
    }

    /// The storage, while it lives.
    pub fn storage<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.storage.bind(py).upgrade()
    }

    /// True if a storage has the bytes that it covers (`resize_` may have taken them).
    pub fn is_whole(&self, storage: &Bound<'_, PyAny>) -> PyResult<bool> {
        let nbytes: u64 = storage.call_method0(intern!(storage.py(), "nbytes"))?.extract()?;
        Ok(nbytes >= self.start + self.nbytes)
    }

    /// True if the bytes that were written are those that were saved.
    ///
    /// The program neither changed them in place on the way, nor moved them: sharing a tensor with
    /// another process swaps the memory of its storage and frees the old one, and the version
    /// counter does not change.
    pub fn is_unchanged(&self, source: &Bound<'_, PyAny>, handle: &Handle) -> PyResult<bool> {
        let py = source.py();
        let storage = source.call_method0(intern!(py, "untyped_storage"))?;
        let memory: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let is_same = self.is_whole(&storage)?
            && version_of(source)? == self.version // defence: version at the end of the write
            && memory + self.start as usize == handle.address; // defence: memory that moved
        Ok(is_same)
    }

    /// Begins the write of its bytes, unless that was done before.
    pub fn begin_write(
        &self,
        store: &crate::store::Store,
        gpus: Option<&Gpus>,
        source: &Bound<'_, PyAny>,
        waits_for_disk: bool,
        by_plan: Option<ByPlan>,
    ) -> PyResult<Result<(), core::Error>> {
        if self.has_handle() {
            return Ok(Ok(()));
        }
        let gpu_way;
        let way = match (self.stream, gpus) {
            (Some(stream), Some(gpus)) => {
                gpu_way = match gpus.way(source.py(), stream.gpu)? {
                    Ok(way) => way,
                    Err(error) => return Ok(Err(error)),
                };
                let own = || self.by_plan.get().copied().unwrap_or_default();
                let by_plan = by_plan.unwrap_or_else(own);
                Way::Gpu { way: &gpu_way, stream, waits_for_disk, by_plan }
            }
            _ => Way::Host,
        };
        let saved = Handle::save(store, source, self.start, self.nbytes, &way)?;
        // Another thread may have begun it as well while this one waited for the GPU.
        Ok(saved.map(|handle| {
            if !self.has_handle() {
                self.set_handle(Some(handle));
            }
        }))
    }

    /// Lets the memory go: the bytes are on the disk.
    pub fn free_source(&self) {
        let source = self.state().source.take();
        self.holding.free(core::Fate::Offloaded);
        drop(source);
    }

    /// Compares a recipe with the bytes at their first need.
    pub fn try_recipe(&self, recipe: Py<PyAny>) {
        self.state().recipe = Recipe::Unproved(recipe);
    }

    /// The recipe to compare, once.
    pub fn take_unproved(&self) -> Option<Py<PyAny>> {
        let mut state = self.state();
        match std::mem::take(&mut state.recipe) {
            Recipe::Unproved(recipe) => Some(recipe),
            other => {
                state.recipe = other;
                None
            }
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Record {
    #[getter(sequence)]
    fn get_sequence(&self) -> i64 {
        self.sequence()
    }

    #[getter(source)]
    fn get_source<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.source(py)
    }

    #[getter(handle)]
    fn get_handle<'py>(&self, py: Python<'py>) -> Option<Bound<'py, Handle>> {
        self.handle(py)
    }

    /// The recipe by which its bytes are made again, if they are neither kept nor written.
    #[getter]
    fn recipe<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.used_recipe(py)
    }

    #[getter(was_found)]
    fn get_was_found(&self) -> bool {
        self.was_found()
    }

    #[getter(is_lent)]
    fn get_is_lent(&self) -> bool {
        self.is_lent()
    }

    #[pyo3(name = "storage")]
    fn get_storage<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.storage(py)
    }

    fn lend(&self) {
        self.state().is_lent = true;
        self.holding.lend();
    }

    pub fn take_back(&self) {
        self.state().is_lent = false;
        self.holding.take_back();
    }

    /// True if it is in memory now, but may have to be read when its node needs it.
    pub fn is_leaving(&self, py: Python<'_>) -> bool {
        self.has_handle() && (self.has_source() || self.storage(py).is_some())
    }
}
