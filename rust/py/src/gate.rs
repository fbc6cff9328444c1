//! The gates of all threads of a session; see `writeback.rs` for the rule.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core::gate::{Gate, Waiting};

use crate::record::Record;

/// A weak reference to a record.
pub type RecordReference = Py<PyWeakrefReference>;

/// The gate of one thread, with the records that wait there.
#[derive(Default)]
pub struct ThreadGate {
    has_ended: AtomicBool,
    gate: Mutex<Gate<RecordReference>>,
}

impl ThreadGate {
    /// True if its thread has ended, and so has passed all its nodes.
    pub fn is_of_ended_thread(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// True if records wait for the thread to pass another node.
    pub fn is_waiting(&self) -> bool {
        !self.is_of_ended_thread() && self.gate().is_waiting()
    }

    /// The sequence number before which the thread has passed all nodes; known only for a reserve.
    pub fn passed(&self) -> i64 {
        if self.is_of_ended_thread() { i64::MAX } else { self.gate().passed_sequence() }
    }

    pub fn add(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        let waiting_record = waiting(record)?;
        self.gate().add(waiting_record);
        Ok(())
    }

    pub fn add_to_reserve(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        let (py, waiting_record) = (record.py(), waiting(record)?);
        let dead = self.gate().add_to_reserve(waiting_record, |record| is_dead(py, record));
        drop(dead);
        Ok(())
    }

    /// Locked for a look or a change that calls nothing.
    pub fn gate(&self) -> MutexGuard<'_, Gate<RecordReference>> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_needed(&self, py: Python<'_>) -> bool {
        !self.is_of_ended_thread() || self.gate().is_needed(|record| is_dead(py, record))
    }
}

/// The gates of all threads. Those of ended threads are removed when another gate is made.
pub struct Gates {
    /// A `threading.local`: its objects die with their thread.
    threads: Py<PyAny>,
    all: Mutex<Vec<Arc<ThreadGate>>>,
}

impl Gates {
    pub fn new(threads: Py<PyAny>) -> Self {
        Self { threads, all: Mutex::default() }
    }

    /// The gate of this thread, if it has one.
    pub fn here(&self, py: Python<'_>) -> PyResult<Option<Arc<ThreadGate>>> {
        let (threads, name) = (self.threads.bind(py), intern!(py, "gate"));
        let Some(own) = threads.getattr_opt(name)? else {
            // A thread that only runs backwards comes here often, and a missing attribute costs an
            // exception.
            threads.setattr(name, py.None())?;
            return Ok(None);
        };
        if own.is_none() {
            return Ok(None);
        }
        Ok(Some(Arc::clone(&own.cast::<OwnGate>()?.get().0)))
    }

    /// The gate of this thread, which is made if there is none.
    pub fn own(&self, py: Python<'_>) -> PyResult<Arc<ThreadGate>> {
        if let Some(gate) = self.here(py)? {
            return Ok(gate);
        }
        let gate = Arc::new(ThreadGate::default());
        let own = Bound::new(py, OwnGate(Arc::clone(&gate)))?;
        self.threads.bind(py).setattr(intern!(py, "gate"), own)?;
        let mut all = self.list();
        all.retain(|gate| gate.is_needed(py));
        all.push(Arc::clone(&gate));
        Ok(gate)
    }

    pub fn all(&self) -> Vec<Arc<ThreadGate>> {
        self.list().clone()
    }

    /// True if records wait at a gate whose thread has to pass another node.
    pub fn has_waiting(&self) -> bool {
        self.list().iter().any(|gate| gate.is_waiting())
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<ThreadGate>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hold of a thread on its gate; it dies with the thread. A thread's number would not do,
/// because a later thread may get the same number.
#[pyclass(frozen, module = "ssdtrain._core")]
struct OwnGate(Arc<ThreadGate>);

impl Drop for OwnGate {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Relaxed);
    }
}

fn waiting(record: &Bound<'_, Record>) -> PyResult<Waiting<RecordReference>> {
    let item = PyWeakrefReference::new(record)?.unbind();
    let (sequence, nbytes) = (record.get().sequence(), record.get().nbytes);
    Ok(Waiting { item, sequence, nbytes })
}

fn is_dead(py: Python<'_>, reference: &RecordReference) -> bool {
    reference.bind(py).upgrade().is_none()
}
