//! The lock of a session; a thread releases it while it waits for a GPU.
//!
//! A GPU may wait for work that another thread of the program submits next, and that thread may
//! come to a hook before. So a thread that waits for a GPU holds neither this lock nor the GIL, and
//! looks again at all state after the wait.

use pyo3::intern;
use pyo3::prelude::*;

/// A `threading.RLock`.
pub struct SessionLock {
    acquire: Py<PyAny>,
    release: Py<PyAny>,
    is_owned: Py<PyAny>,
    /// Release the lock however often this thread has taken it, and take it as often again;
    /// `threading.Condition` calls these when it waits.
    release_all: Py<PyAny>,
    acquire_all: Py<PyAny>,
}

impl SessionLock {
    pub fn new(lock: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = lock.py();
        Ok(Self {
            acquire: lock.getattr(intern!(py, "acquire"))?.unbind(),
            release: lock.getattr(intern!(py, "release"))?.unbind(),
            is_owned: lock.getattr(intern!(py, "_is_owned"))?.unbind(),
            release_all: lock.getattr(intern!(py, "_release_save"))?.unbind(),
            acquire_all: lock.getattr(intern!(py, "_acquire_restore"))?.unbind(),
        })
    }

    /// Runs `change` under the lock.
    pub fn locked<T>(&self, py: Python<'_>, change: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        self.acquire.bind(py).call0()?;
        let _locked = Locked(self.release.bind(py));
        change()
    }

    /// Waits with neither this lock nor the GIL.
    pub fn without<T: Send>(&self, py: Python<'_>, wait: impl FnOnce() -> T + Send) -> PyResult<T> {
        // defence: no lock while waiting for a GPU
        if !self.is_owned.bind(py).call0()?.is_truthy()? {
            return Ok(py.detach(wait));
        }
        let state = self.release_all.bind(py).call0()?;
        let waited = py.detach(wait);
        self.acquire_all.bind(py).call1((state,))?;
        Ok(waited)
    }
}

/// Calls a function under a `threading.RLock` and returns `true`, unless another thread has it.
///
/// In Python an interrupt may come between a lock that was taken and the block that lets it go.
#[pyfunction]
pub fn run_if_free(lock: &Bound<'_, PyAny>, function: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = lock.py();
    let release = lock.getattr(intern!(py, "release"))?;
    if !lock.call_method1(intern!(py, "acquire"), (false,))?.is_truthy()? {
        return Ok(false);
    }
    let _locked = Locked(&release);
    function.call0()?;
    Ok(true)
}

/// Holds the lock of a session, and releases it also after a panic.
struct Locked<'a, 'py>(&'a Bound<'py, PyAny>);

impl Drop for Locked<'_, '_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.call0() {
            error.write_unraisable(self.0.py(), Some(self.0));
        }
    }
}
