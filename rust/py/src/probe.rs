//! `Probe`: times one setting on one directory, with the GIL released.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ssdtrain_core::probe::{self, REQUEST_BYTES};
use ssdtrain_core::{Backend, Direction, Tuning};

use crate::error::to_python;

/// The time between two checks for Ctrl-C during a wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Probe(probe::Probe);

#[pymethods]
impl Probe {
    #[new]
    fn new(py: Python<'_>, directory: PathBuf, request_count: usize) -> PyResult<Self> {
        let opened = py.detach(move || probe::Probe::open(&directory, request_count));
        opened.map(Self).map_err(|error| to_python(py, &error))
    }

    #[classattr]
    #[pyo3(name = "REQUEST_BYTES")]
    const PY_REQUEST_BYTES: usize = REQUEST_BYTES;

    #[classattr]
    #[pyo3(name = "QUEUE_DEPTH_DEFAULT")]
    fn queue_depth_default() -> u32 {
        Tuning::default().queue_depth
    }

    #[classattr]
    #[pyo3(name = "PIECE_BYTES_DEFAULT")]
    fn piece_bytes_default() -> usize {
        Tuning::default().piece_bytes
    }

    #[getter]
    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    #[pyo3(signature = (direction, first, count, *, backend, queue_depth, piece_bytes))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn seconds(
        &self,
        py: Python<'_>,
        direction: &str,
        first: usize,
        count: usize,
        backend: &str,
        queue_depth: u32,
        piece_bytes: usize,
    ) -> PyResult<f64> {
        let backend = match backend {
            "io_uring" => Backend::IoUring,
            "psync" => Backend::Psync,
            other => return Err(PyValueError::new_err(format!("no engine is called {other:?}"))),
        };
        let direction = match direction {
            "write" => Direction::Write,
            "read" => Direction::Read,
            other => return Err(PyValueError::new_err(format!("no direction is {other:?}"))),
        };
        let tuning = Tuning { queue_depth, piece_bytes };
        let range = first..first.saturating_add(count);
        let mut run = py
            .detach(|| self.0.begin(&backend, tuning, direction, range))
            .map_err(|error| to_python(py, &error))?;
        let answer = loop {
            if let Some(answer) = py.detach(|| run.wait_for(SIGNAL_CHECK)) {
                break answer.map_err(|error| to_python(py, &error));
            }
            if let Err(interrupt) = py.check_signals() {
                break Err(interrupt);
            }
        };
        // The engine ends the transfers in flight before it goes.
        py.detach(|| drop(run));
        answer.map(|all| all.as_secs_f64())
    }
}
