//! Records that were saved again after their write began, until the program lets go of their bytes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use crate::gate::RecordReference;
use crate::record::Record;

/// The held records of all threads.
pub struct Held {
    records: Mutex<Vec<RecordReference>>,
    /// Function: the number of tensors on the storage at an address of C++.
    count_users: Py<PyAny>,
}

impl Held {
    pub fn new(count_users: Py<PyAny>) -> Self {
        Self { records: Mutex::default(), count_users }
    }

    pub fn add(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        let reference = PyWeakrefReference::new(record)?.unbind();
        self.records().push(reference);
        Ok(())
    }

    pub fn take(&self) -> Vec<RecordReference> {
        std::mem::take(&mut self.records())
    }

    pub fn put_back(&self, mut records: Vec<RecordReference>) {
        self.records().append(&mut records);
    }

    fn records(&self) -> MutexGuard<'_, Vec<RecordReference>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the program, or the operation of a node that is being made, has tensors on a
    /// storage; `known` are the records on it.
    pub fn is_used(
        &self,
        storage: &Bound<'_, PyAny>,
        known: &[Bound<'_, Record>],
    ) -> PyResult<bool> {
        let py = storage.py();
        // `storage` itself is a user; so are source and replaced write of each record.
        let mut own_count = 1;
        for record in known.iter().map(Bound::get).filter(|record| record.is_on(storage)) {
            // Our own users are counted first: a write that ends in between leaves fewer of torch's
            // users.
            own_count += record.replaced_count(py) + usize::from(record.has_source());
        }
        let address = storage.getattr(intern!(py, "_cdata"))?;
        Ok(self.count_users.bind(py).call1((address,))?.extract::<usize>()? > own_count)
    }
}
