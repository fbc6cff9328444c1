//! Counts packed tensors of one kind; each pack counts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ssdtrain_core::Passed;

/// Tensors of one kind.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Tally(Mutex<Passed>);

#[pymethods]
impl Tally {
    #[new]
    #[pyo3(signature = (count=0, nbytes=0, largest_bytes=0))]
    fn new(count: u64, nbytes: u64, largest_bytes: u64) -> Self {
        Self(Mutex::new(Passed { count, bytes: nbytes, largest_bytes }))
    }

    pub fn add(&self, nbytes: u64) {
        let mut passed = self.passed();
        passed.count += 1;
        passed.bytes += nbytes;
        passed.largest_bytes = passed.largest_bytes.max(nbytes);
    }

    #[getter]
    fn count(&self) -> u64 {
        self.passed().count
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.passed().bytes
    }

    #[getter]
    fn largest_bytes(&self) -> u64 {
        self.passed().largest_bytes
    }
}

impl Tally {
    fn passed(&self) -> MutexGuard<'_, Passed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
