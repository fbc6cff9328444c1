//! The two functions that autograd calls for each saved tensor.
//!
//! Most saved tensors are weights or small. Those are packed and unpacked here, because functions
//! in Python would cost more than all else (`benches/training/small_tensors.py` measures it); other
//! plain tensors go on to `offloading.rs`, and unusual tensors to the hooks in Python. No lock is
//! held while Python runs, because any call of it may come back here.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use ssdtrain_core as core;

use crate::account::Account;
use crate::gpu::Gpus;
use crate::kept::{Kept, is_true};
use crate::offloading::Offloading;
use crate::rules::{Glance, Outline, OwnSize, Rules, Verdict};
use crate::store::Store;

/// The hooks of one session for one thread's block; autograd holds it as long as a graph needs it.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct HookPair {
    rules: Py<Rules>,
    account: core::Account,
    store: Py<Store>,
    gpus: Option<Py<Gpus>>,
    small_bytes: u64,
    is_bounded: bool,
    offloading: Py<Offloading>,
    pack_unusual: Py<PyAny>,
    pack_below: Py<PyAny>,
    untraced: Py<PyAny>,
}

#[pymethods]
impl HookPair {
    #[new]
    #[pyo3(signature = (
        rules, account, store, gpus, *, small_bytes, is_bounded, offloading, pack_unusual,
        pack_below, untraced
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        rules: Py<Rules>,
        account: &Account,
        store: Py<Store>,
        gpus: Option<Py<Gpus>>,
        small_bytes: u64,
        is_bounded: bool,
        offloading: Py<Offloading>,
        pack_unusual: Py<PyAny>,
        pack_below: Py<PyAny>,
        untraced: Py<PyAny>,
    ) -> Self {
        Self {
            rules,
            account: account.0.clone(),
            store,
            gpus,
            small_bytes,
            is_bounded,
            offloading,
            pack_unusual,
            pack_below,
            untraced,
        }
    }

    #[getter]
    fn hooks(&self, py: Python<'_>) -> Py<PyAny> {
        self.offloading.get().session.object(py)
    }

    fn pack(slf: &Bound<'_, Self>, tensor: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (this, py) = (slf.get(), slf.py());
        let rules = this.rules.get();
        let outline = rules.outline(tensor)?;
        // A weight that is a leaf is held itself, also inside an operation.
        let is_own = matches!(outline, Some(Outline::Weight));
        if !is_own && rules.is_below_autograd(py)? {
            return this.in_python(py, &this.pack_below, &[slf.as_any(), tensor]);
        }
        this.pack_seen(tensor, outline, false)
    }

    fn pack_here(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let outline = self.rules.get().outline(tensor)?;
        self.pack_seen(tensor, outline, true)
    }

    fn unpack(&self, packed: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = packed.py();
        if let Ok(kept) = packed.cast_exact::<Kept>()
            && !kept.get().is_from_below
            && let Some(tensor) = kept.get().unchanged(py)?
            && self.rules.get().is_in_memory(tensor)?
        {
            if let Some(passed) = &kept.get().passed
                && self.offloading.get().note_passed_need(passed)
                && !self.is_traced(py)?
            {
                self.offloading.get().begin_due(py, passed)?;
            }
            return Ok(tensor.clone().unbind());
        }
        if self.is_traced(py)? {
            return self.call_untraced(&self.method(py, intern!(py, "unpack"))?, &[packed]);
        }
        Offloading::unpack(self.offloading.bind(py), packed)
    }
}

impl HookPair {
    fn pack_seen(
        &self,
        tensor: &Bound<'_, PyAny>,
        outline: Option<Outline>,
        is_from_below: bool,
    ) -> PyResult<Py<PyAny>> {
        let (rules, py) = (self.rules.get(), tensor.py());
        match outline {
            Some(Outline::Weight) => {
                self.account.note_weight();
                return Ok(Kept::hold(tensor, true, is_from_below, None)?.into_any());
            }
            Some(Outline::Other(own)) => {
                if let Some(packed) = self.pack_at_a_glance(tensor, own, is_from_below)? {
                    return Ok(packed);
                }
            }
            None => {}
        }
        match rules.judge(tensor)? {
            Verdict::Unusual => self.in_python(py, &self.pack_unusual, &[tensor]),
            Verdict::Weight => {
                self.account.note_weight();
                let is_leaf = is_true(tensor, intern!(py, "is_leaf"))?;
                Ok(Kept::hold(tensor, is_leaf, is_from_below, None)?.into_any())
            }
            Verdict::Plain => self.pack_other(tensor, is_from_below),
        }
    }

    /// Packs a tensor that need not be judged; `None` if it has to be.
    fn pack_at_a_glance(
        &self,
        tensor: &Bound<'_, PyAny>,
        own: OwnSize,
        is_from_below: bool,
    ) -> PyResult<Option<Py<PyAny>>> {
        let (rules, py) = (self.rules.get(), tensor.py());
        // In a skimmed round, a look at the tensor would cost more than all else.
        let may_pass_by = !is_from_below;
        let is_large = own.nbytes >= self.small_bytes;
        let pass_by = || -> PyResult<Option<Py<PyAny>>> {
            let kept = self.offloading.get().pass_by_at_a_glance(rules, tensor, own)?;
            Ok(kept.map(Py::into_any))
        };
        if is_large
            && may_pass_by
            && let Some(kept) = pass_by()?
        {
            return Ok(Some(kept));
        }
        match rules.glance(tensor, own, self.small_bytes, self.is_bounded)? {
            Some(Glance::Weight) => {
                self.account.note_weight();
                Ok(Some(Kept::hold(tensor, own.is_leaf, is_from_below, None)?.into_any()))
            }
            Some(Glance::Small { identity, nbytes }) => {
                let on_gpus = self.gpus.as_ref().map_or(0, |gpus| gpus.get().loaded_bytes());
                let transfer_bytes = self.store.get().transfer_bytes(py) + on_gpus;
                // No other code runs in between, so both numbers are of the same moment.
                let Some(holding) = self.account.hold_small(identity, nbytes, transfer_bytes)
                else {
                    return self.pack_other(tensor, is_from_below).map(Some);
                };
                let kept = Kept::hold(tensor, own.is_leaf, is_from_below, Some(holding))?;
                Ok(Some(kept.into_any()))
            }
            // A small view of a large tensor.
            Some(Glance::Large) if !is_large && may_pass_by => pass_by(),
            Some(Glance::Large) | None => Ok(None),
        }
    }

    /// Packs a tensor that may leave memory; untraced, if the compiler traces this thread.
    fn pack_other(&self, tensor: &Bound<'_, PyAny>, is_from_below: bool) -> PyResult<Py<PyAny>> {
        let py = tensor.py();
        if self.is_traced(py)? {
            return self.call_untraced(&self.method(py, intern!(py, "pack"))?, &[tensor]);
        }
        Offloading::pack_plain(self.offloading.bind(py), tensor, !is_from_below)
    }

    /// Calls a function of Python; untraced, if the compiler traces this thread.
    fn in_python<'py>(
        &self,
        py: Python<'py>,
        function: &Py<PyAny>,
        arguments: &[&Bound<'py, PyAny>],
    ) -> PyResult<Py<PyAny>> {
        let function = function.bind(py);
        if self.is_traced(py)? {
            return self.call_untraced(function, arguments);
        }
        function.call1(PyTuple::new(py, arguments)?).map(Bound::unbind)
    }

    /// True if the compiler traces this thread.
    fn is_traced(&self, py: Python<'_>) -> PyResult<bool> {
        self.rules.get().tracer.bind(py).call0()?.is_truthy()
    }

    /// Calls a function that the compiler does not trace.
    fn call_untraced<'py>(
        &self,
        function: &Bound<'py, PyAny>,
        arguments: &[&Bound<'py, PyAny>],
    ) -> PyResult<Py<PyAny>> {
        let py = function.py();
        let arguments = [&[function], arguments].concat();
        self.untraced.bind(py).call1(PyTuple::new(py, arguments)?).map(Bound::unbind)
    }

    fn method<'py>(
        &self,
        py: Python<'py>,
        name: &Bound<'py, PyString>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.offloading.bind(py).getattr(name)
    }
}
