//! The account of the bytes in memory, as a class of Python.
//!
//! Every call of the account holds the GIL, also the drop of a holding, and Python forks with the
//! GIL held. So a forked child never finds the account locked by a thread that it does not have.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ssdtrain_core as core;

use crate::kept::{Kept, is_true, storage_of};

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Account(pub core::Account);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Holding(core::Holding);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Reservation(core::Reservation);

#[pymethods]
impl Account {
    #[new]
    fn new() -> Self {
        Self(core::Account::new())
    }

    fn hold(&self, nbytes: u64) -> Holding {
        Holding(self.0.hold(nbytes))
    }

    fn reserve(&self, nbytes: u64) -> Reservation {
        Reservation(self.0.reserve(nbytes))
    }

    fn shared_more_bytes(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> u64 {
        self.0.shared_more_bytes(identity, nbytes, storage_bytes)
    }

    fn keep(
        &self,
        tensor: &Bound<'_, PyAny>,
        nbytes: u64,
        storage_bytes: u64,
        is_from_below: bool,
    ) -> PyResult<Py<Kept>> {
        let is_leaf = is_true(tensor, intern!(tensor.py(), "is_leaf"))?;
        let (identity, _) = storage_of(tensor)?;
        let holding = self.0.hold_shared(identity, nbytes, storage_bytes);
        Kept::hold(tensor, is_leaf, is_from_below, Some(holding))
    }

    #[getter]
    fn held_bytes(&self) -> u64 {
        self.0.held_bytes()
    }

    #[getter]
    fn reserved_bytes(&self) -> u64 {
        self.0.reserved_bytes()
    }

    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.0.peak_bytes()
    }

    #[getter]
    fn saved_peak_bytes(&self) -> u64 {
        self.0.saved_peak_bytes()
    }

    #[getter]
    fn alive_peak_bytes(&self) -> u64 {
        self.0.alive_peak_bytes()
    }

    fn small(&self) -> (u64, u64, u64) {
        let small = self.0.small();
        (small.count, small.bytes, small.largest_bytes)
    }

    fn limit_small(&self, nbytes: u64) {
        self.0.limit_small(nbytes);
    }

    #[getter]
    fn weight_count(&self) -> u64 {
        self.0.weight_count()
    }

    fn note_peak(&self, transfer_bytes: u64) {
        self.0.note_peak(transfer_bytes);
    }

    fn take_recent_peak(&self) -> u64 {
        self.0.take_recent_peak()
    }

    fn limit_softly(&self, nbytes: u64) {
        self.0.limit_softly(nbytes);
    }

    fn soft_room_bytes(&self, transfer_bytes: u64) -> u64 {
        self.0.soft_room_bytes(transfer_bytes)
    }

    fn begin_saved_peaks(&self) {
        self.0.begin_saved_peaks();
    }

    fn forget_peak(&self) {
        self.0.forget_peak();
    }

    fn ended<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let fates = PyDict::new(py);
        for (name, fate) in [
            ("offloaded", core::Fate::Offloaded),
            ("forwarded", core::Fate::Forwarded),
            ("rematerialized", core::Fate::Rematerialized),
            ("kept", core::Fate::Kept),
        ] {
            let ended = self.0.ended(fate);
            fates.set_item(name, (ended.bytes, ended.count))?;
        }
        Ok(fates)
    }
}

#[pymethods]
impl Reservation {
    fn resize(&self, nbytes: u64) {
        self.0.resize(nbytes);
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }
}

#[pymethods]
impl Holding {
    fn free(&self) {
        self.0.free(core::Fate::Offloaded);
    }

    fn lend(&self) {
        self.0.lend();
    }

    fn take_back(&self) {
        self.0.take_back();
    }

    fn keep(&self) {
        self.0.set_fate(core::Fate::Kept);
    }

    fn forward(&self) {
        self.0.set_fate(core::Fate::Forwarded);
    }
}
