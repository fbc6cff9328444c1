//! The Python objects that compiled code calls: one typed method here for each question.
//!
//! No other file but `planning.rs` names their methods and attributes. Their classes are in
//! `python/ssdtrain/activations`; `partners.py` there has the same questions as protocols, so that
//! mypy checks the answers.
//!
//! `Writeback` holds its `Records`, and `Prefetcher` its `Rounds`. A reference in the other
//! direction would make a cycle that Python's collector cannot see. So `Records` and `Rounds` get
//! [`Writing`] and [`Prefetching`] as arguments, and hold neither.

use std::convert::Infallible;

use pyo3::Borrowed;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core as core;

use crate::error::to_python;
use crate::offloading::Offloading;
use crate::planning::Planning;
use crate::record::Record;
use crate::round::Round;
use crate::saved_tensor::SavedTensor;
use crate::transfer::Loading;

/// The `Hooks` of a session, with its `Writeback`, `Prefetcher` and `Policy`.
pub struct SessionHooks {
    hooks: Py<PyAny>,
    writeback: Py<PyAny>,
    prefetcher: Py<PyAny>,
    policy: Planning,
    /// The `Rematerializer`; `None` if no saved tensor is made again.
    rematerializer: Option<Py<PyAny>>,
}

/// The `Writeback` of a session: failed writes, room under the bound, memory of others.
#[derive(Clone, Copy)]
pub struct Writing<'a, 'py>(Borrowed<'a, 'py, PyAny>);

/// The `Prefetcher` of a session: learning from rounds, and room for reads.
#[derive(Clone, Copy)]
pub struct Prefetching<'a, 'py>(Borrowed<'a, 'py, PyAny>);

/// The `Stalls` of a session: how long its threads have waited for I/O.
#[derive(FromPyObject)]
#[pyo3(transparent)]
pub struct Stalls(Py<PyAny>);

/// The `OffloadedTensor` of a weight or a gradient.
#[derive(Clone, Copy)]
pub struct AwayEntry<'a, 'py>(Borrowed<'a, 'py, PyAny>);

/// The reason for which `Hooks` keeps a tensor in memory.
#[derive(Clone, Copy)]
pub enum KeepReason {
    Small,
    Apart,
    Detached,
    Foreign,
}

/// How much of a round is followed; see `activations/followed.py`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Whole,
    Partial,
    Skimmed,
}

impl SessionHooks {
    pub fn new(hooks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = hooks.py();
        Ok(Self {
            hooks: hooks.clone().unbind(),
            writeback: hooks.getattr(intern!(py, "writeback"))?.unbind(),
            prefetcher: hooks.getattr(intern!(py, "prefetcher"))?.unbind(),
            policy: hooks.getattr(intern!(py, "policy"))?.extract()?,
            rematerializer: hooks.getattr(intern!(py, "rematerializer"))?.extract()?,
        })
    }

    /// The `Hooks` itself.
    pub fn object(&self, py: Python<'_>) -> Py<PyAny> {
        self.hooks.clone_ref(py)
    }

    pub fn writing<'a, 'py>(&'a self, py: Python<'py>) -> Writing<'a, 'py> {
        Writing(self.writeback.bind_borrowed(py))
    }

    pub fn prefetching<'a, 'py>(&'a self, py: Python<'py>) -> Prefetching<'a, 'py> {
        Prefetching(self.prefetcher.bind_borrowed(py))
    }

    pub fn planning(&self) -> &Planning {
        &self.policy
    }

    /// Packs a tensor in a forked child, which has no disk.
    pub fn exclude<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        self.hooks.bind(py).call_method1(intern!(py, "exclude"), (tensor,))
    }

    /// Packs a tensor that stays in memory; the answer is a `Kept` or a `Refused`.
    pub fn keep<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        reason: KeepReason,
        nbytes: u64,
        storage_bytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let kind = match reason {
            KeepReason::Small => intern!(py, "small_here"),
            KeepReason::Apart => intern!(py, "apart"),
            KeepReason::Detached => intern!(py, "detached"),
            KeepReason::Foreign => intern!(py, "foreign"),
        };
        let arguments = (tensor, kind, nbytes, storage_bytes);
        self.hooks.bind(py).call_method1(intern!(py, "keep"), arguments)
    }

    /// Unpacks a `Kept` or a `Refused`.
    pub fn unpack_kept<'py>(&self, packed: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = packed.py();
        self.hooks.bind(py).call_method1(intern!(py, "unpack_kept"), (packed,))
    }

    /// Raises, because the program changed a saved tensor in place.
    pub fn refuse_changed(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        let py = saved.py();
        self.hooks.bind(py).call_method1(intern!(py, "refuse_changed"), (saved,)).map(drop)
    }

    /// Unpacks a saved tensor in a forked child, which has its memory but not its disk.
    pub fn unpack_in_child<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = saved.py();
        self.hooks.bind(py).call_method1(intern!(py, "from_memory"), (saved,))
    }

    /// The recipe of a tensor that a forward has just saved, and whether it replaces the bytes. A
    /// recipe that does not is compared with them at their first need.
    pub fn recipe<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        tensor: &Bound<'py, PyAny>,
        is_new: bool,
        offloading: &Bound<'py, Offloading>,
    ) -> PyResult<Option<(Py<PyAny>, bool)>> {
        let Some(rematerializer) = &self.rematerializer else { return Ok(None) };
        let (py, arguments) = (saved.py(), (saved, tensor, is_new, offloading));
        rematerializer.bind(py).call_method1(intern!(py, "recipe"), arguments)?.extract()
    }

    /// Makes a saved tensor again. `unpack` brings the tensors that it is made from.
    pub fn rematerialize<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        recipe: &Bound<'py, PyAny>,
        unpack: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, arguments) = (saved.py(), (saved, recipe, unpack));
        self.rematerializer(py)?.call_method1(intern!(py, "rematerialize"), arguments)
    }

    /// Compares the result of a recipe with the bytes that were saved, on which `tensor` lies.
    pub fn prove<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        recipe: &Py<PyAny>,
        tensor: &Bound<'py, PyAny>,
        bring: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let (py, arguments) = (saved.py(), (saved, recipe, tensor, bring));
        self.rematerializer(py)?.call_method1(intern!(py, "prove"), arguments).map(drop)
    }

    fn rematerializer<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let rematerializer = self.rematerializer.as_ref().map(|object| object.bind(py));
        rematerializer.ok_or_else(|| PyRuntimeError::new_err("a recipe has a Rematerializer"))
    }

    /// Waits for a read, and counts the wait.
    pub fn wait_for<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        loading: &Bound<'py, Loading>,
    ) -> PyResult<()> {
        let py = saved.py();
        self.hooks.bind(py).call_method1(intern!(py, "wait_for"), (saved, loading)).map(drop)
    }
}

impl<'py> Writing<'_, 'py> {
    pub fn py(self) -> Python<'py> {
        self.0.py()
    }

    /// Makes room under the bound for a new record; answers whether others may hold its bytes, or
    /// with the `Refused` that is packed if there is no room.
    pub fn make_room(
        self,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        nbytes: u64,
        sequence: i64,
    ) -> PyResult<Result<bool, Bound<'py, PyAny>>> {
        let arguments = (tensor, storage, nbytes, sequence);
        let answer = self.0.call_method1(intern!(self.py(), "make_room"), arguments)?;
        Ok(answer.extract::<bool>().map_err(|_| answer))
    }

    /// Lets memory of GPUs go, as far as it can, to make room for so many bytes.
    pub fn let_go_for(self, nbytes: u64) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "let_go_for"), (nbytes,)).map(drop)
    }

    /// Gives the memory that torch keeps for later allocations on GPUs back.
    pub fn empty_caches(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.py(), "empty_caches")).map(drop)
    }

    /// Notes a new record under the bound.
    pub fn enter(
        self,
        record: &Bound<'py, Record>,
        storage: &Bound<'py, PyAny>,
        may_be_lent: bool,
    ) -> PyResult<()> {
        let arguments = (record, storage, may_be_lent);
        self.0.call_method1(intern!(self.py(), "enter"), arguments).map(drop)
    }

    /// Notes a record under the bound that was saved again after its write began.
    pub fn renewed(self, record: &Bound<'py, Record>) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "renewed"), (record,)).map(drop)
    }

    /// True if tensors of the program still lie on the storage of a lent record.
    pub fn is_held_by_others(self, record: &Bound<'py, Record>) -> PyResult<bool> {
        self.0.call_method1(intern!(self.py(), "is_held_by_others"), (record,))?.is_truthy()
    }

    /// True if the program holds the bytes of a record, so that to write them frees nothing.
    pub fn lends(self, record: &Bound<'py, Record>) -> PyResult<bool> {
        self.0.call_method1(intern!(self.py(), "lends"), (record,))?.is_truthy()
    }

    /// Remembers that the program holds a storage, if it does.
    pub fn learn_held(
        self,
        record: &Bound<'py, Record>,
        storage: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "learn_held"), (record, storage)).map(drop)
    }

    /// Says that the disk could take no more, so that a tensor stays in memory.
    pub fn note_busy(self, reason: &core::Error) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "note_busy"), (reason.to_string(),)).map(drop)
    }

    /// Counts a write that failed, and says why its tensor stays in memory.
    pub fn note_failure(self, error: &core::Error) -> PyResult<()> {
        let raised = to_python(self.py(), error);
        let arguments = (raised.value(self.py()),);
        self.0.call_method1(intern!(self.py(), "note_failure"), arguments).map(drop)
    }

    /// Waits for the oldest write or an abandoned transfer; `false` if there is none.
    pub fn wait_for_transfer(self) -> PyResult<bool> {
        self.0.call_method0(intern!(self.py(), "wait_for_transfer"))?.is_truthy()
    }

    /// Gives free memory back to the system.
    pub fn give_memory_back(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.py(), "give_memory_back")).map(drop)
    }

    /// The sequence number that the next node of this thread will get.
    pub fn sequence_number(self) -> PyResult<i64> {
        self.0.call_method0(intern!(self.py(), "sequence_number"))?.extract()
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Writing<'a, 'py> {
    type Error = Infallible;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self(object))
    }
}

impl<'py> Prefetching<'_, 'py> {
    fn py(self) -> Python<'py> {
        self.0.py()
    }

    /// Lets the policy plan with rounds that have ended.
    pub fn learn(self, finished: Vec<Round>) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "learn"), (finished,)).map(drop)
    }

    /// How much is followed of a round that begins with the tensor of the key `opening`.
    pub fn scope(self, opening: i64) -> PyResult<Scope> {
        let answer = self.0.call_method1(intern!(self.py(), "scope"), (opening,))?;
        match answer.extract::<String>()?.as_str() {
            "whole" => Ok(Scope::Whole),
            "partial" => Ok(Scope::Partial),
            "skimmed" => Ok(Scope::Skimmed),
            other => Err(PyValueError::new_err(format!("{other:?} is no scope of a round"))),
        }
    }

    /// Has the peak of a GPU read when the backward that begins now has ended.
    pub fn begin_backward(self) -> PyResult<()> {
        self.0.call_method0(intern!(self.py(), "begin_backward")).map(drop)
    }

    /// Makes room under the bound for the read of a tensor that a node needs now.
    pub fn make_room(self, saved: &Bound<'py, SavedTensor>, nbytes: u64) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "make_room"), (saved, nbytes)).map(drop)
    }

    /// Makes room under the bound for a tensor that is made again, and for its sources.
    pub fn make_room_to_make(self, saved: &Bound<'py, SavedTensor>) -> PyResult<()> {
        self.0.call_method1(intern!(self.py(), "make_room_to_make"), (saved,)).map(drop)
    }

    /// Logs that a read could not begin ahead of its need.
    pub fn note_refused(self, error: &PyErr) -> PyResult<()> {
        let arguments = (error.value(self.py()),);
        self.0.call_method1(intern!(self.py(), "note_refused"), arguments).map(drop)
    }
}

impl Stalls {
    pub fn total_s(&self, py: Python<'_>) -> PyResult<f64> {
        self.0.bind(py).getattr(intern!(py, "total_s"))?.extract()
    }
}

impl<'py> AwayEntry<'_, 'py> {
    /// Sets the entry as an attribute of its tensor.
    pub fn attach(self, tensor: &Bound<'py, PyAny>, attribute: &str) -> PyResult<()> {
        tensor.setattr(attribute, self.0)
    }

    /// True if a forward, a function or a block of the program uses the tensor.
    pub fn has_users(self) -> PyResult<bool> {
        self.0.getattr(intern!(self.0.py(), "users"))?.is_truthy()
    }

    /// Gives the entry the bytes of its tensor.
    pub fn take_bytes(self, memory: &Bound<'py, PyAny>) -> PyResult<()> {
        self.0.setattr(intern!(self.0.py(), "source"), memory)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for AwayEntry<'a, 'py> {
    type Error = Infallible;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self(object))
    }
}
