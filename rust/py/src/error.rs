//! From kinds of errors to Python exceptions.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ssdtrain_core::{Error, ErrorKind, Result};

pyo3::import_exception!(ssdtrain.errors, BusyError);
pyo3::import_exception!(ssdtrain.errors, CancelledError);
pyo3::import_exception!(ssdtrain.errors, ClosedError);
pyo3::import_exception!(ssdtrain.errors, ConfigError);
pyo3::import_exception!(ssdtrain.errors, DiskBoundError);
pyo3::import_exception!(ssdtrain.errors, CorruptError);
pyo3::import_exception!(ssdtrain.errors, CudaError);
pyo3::import_exception!(ssdtrain.errors, NoSpaceError);
pyo3::import_exception!(ssdtrain.errors, PoisonedError);
pyo3::import_exception!(ssdtrain.errors, SsdtrainError);
pyo3::import_exception!(ssdtrain.errors, StorageError);
pyo3::import_exception!(ssdtrain.errors, UnsupportedError);

/// One Python exception per kind; an errno becomes its attribute.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let raised = match error.kind() {
        ErrorKind::Config => ConfigError::new_err(message),
        ErrorKind::Io => StorageError::new_err(message),
        ErrorKind::NoSpace => NoSpaceError::new_err(message),
        ErrorKind::OverBound => DiskBoundError::new_err(message),
        ErrorKind::Corrupt => CorruptError::new_err(message),
        ErrorKind::Unsupported => UnsupportedError::new_err(message),
        ErrorKind::Closed => ClosedError::new_err(message),
        ErrorKind::Poisoned => PoisonedError::new_err(message),
        ErrorKind::Cancelled => CancelledError::new_err(message),
        ErrorKind::Busy => BusyError::new_err(message),
        ErrorKind::Cuda => CudaError::new_err(message),
    };
    match raised.value(py).setattr("errno", error.errno()) {
        Ok(()) => raised,
        Err(second) => PyRuntimeError::new_err(format!("{error} (and then: {second})")),
    }
}

/// Turns an error into an exception.
pub fn raised<T>(py: Python<'_>, answer: Result<T>) -> PyResult<T> {
    answer.map_err(|error| to_python(py, &error))
}
