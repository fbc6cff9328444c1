//! The functions of torch that the compiled part calls for tensors that may leave memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::store::Slot;

/// Functions of torch, which this crate does not import.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Torch {
    empties: Py<PyDict>,
    /// Empty tensors of GPUs that were needed so far; there are few types and few GPUs.
    empties_on_gpus: Mutex<Vec<EmptyOnGpu>>,
    make_empty: Py<PyAny>,
    frombuffer: Py<PyAny>,
    /// The keyword arguments of `frombuffer`: its items are bytes.
    as_bytes: Py<PyDict>,
    sequence_number: Py<PyAny>,
    current_backward: Py<PyAny>,
    current_node: Py<PyAny>,
    is_below_autograd: Py<PyAny>,
}

struct EmptyOnGpu {
    dtype: Py<PyAny>,
    gpu: usize,
    empty: Py<PyAny>,
}

#[pymethods]
impl Torch {
    #[new]
    #[pyo3(signature = (
        *, empties, make_empty, frombuffer, byte_type, sequence_number, current_backward,
        current_node, is_below_autograd
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        py: Python<'_>,
        empties: Py<PyDict>,
        make_empty: Py<PyAny>,
        frombuffer: Py<PyAny>,
        byte_type: Py<PyAny>,
        sequence_number: Py<PyAny>,
        current_backward: Py<PyAny>,
        current_node: Py<PyAny>,
        is_below_autograd: Py<PyAny>,
    ) -> PyResult<Self> {
        let as_bytes = PyDict::new(py);
        as_bytes.set_item("dtype", byte_type)?;
        Ok(Self {
            empties,
            empties_on_gpus: Mutex::default(),
            make_empty,
            frombuffer,
            as_bytes: as_bytes.unbind(),
            sequence_number,
            current_backward,
            current_node,
            is_below_autograd,
        })
    }

    pub fn storage_on<'py>(&self, slot: &Bound<'py, Slot>) -> PyResult<Bound<'py, PyAny>> {
        let py = slot.py();
        let bytes = self.frombuffer.bind(py).call((slot,), Some(self.as_bytes.bind(py)))?;
        bytes.call_method0(intern!(py, "untyped_storage"))
    }
}

impl Torch {
    /// A tensor without elements on the CPU or a GPU; it may be shared, so it is never changed.
    pub fn empty<'py>(
        &self,
        dtype: &Bound<'py, PyAny>,
        gpu: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = dtype.py();
        let known = match gpu {
            None => self.empties.bind(py).get_item(dtype)?,
            Some(gpu) => self.empty_on_gpu(dtype, gpu),
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let empty = self.make_empty.bind(py).call1((dtype, gpu))?;
        if let Some(gpu) = gpu {
            let (dtype, kept) = (dtype.clone().unbind(), empty.clone().unbind());
            self.empties_on_gpus().push(EmptyOnGpu { dtype, gpu, empty: kept });
        }
        Ok(empty)
    }

    fn empty_on_gpu<'py>(
        &self,
        dtype: &Bound<'py, PyAny>,
        gpu: usize,
    ) -> Option<Bound<'py, PyAny>> {
        let known = self.empties_on_gpus();
        let found = known.iter().find(|known| known.gpu == gpu && known.dtype.is(dtype))?;
        Some(found.empty.bind(dtype.py()).clone())
    }

    /// Locked for a look or a change that calls nothing.
    fn empties_on_gpus(&self) -> MutexGuard<'_, Vec<EmptyOnGpu>> {
        self.empties_on_gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number that the next node made in this thread will get.
    pub fn sequence_number(&self, py: Python<'_>) -> PyResult<i64> {
        self.sequence_number.bind(py).call0()?.extract()
    }

    /// The number of the backward that runs in this thread, or -1.
    pub fn current_backward(&self, py: Python<'_>) -> PyResult<i64> {
        self.current_backward.bind(py).call0()?.extract()
    }

    /// True inside an operation.
    pub fn is_below_autograd(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_below_autograd.bind(py).call0()?.is_truthy()
    }

    /// True while a reentrant checkpoint recomputes: tensors that are saved now are needed in a
    /// moment.
    pub fn is_recompute(&self, py: Python<'_>) -> PyResult<bool> {
        let node = self.current_node.bind(py).call0()?;
        if node.is_none() {
            return Ok(false);
        }
        let name = node.call_method0(intern!(py, "name"))?;
        name.contains(intern!(py, "CheckpointFunctionBackward"))
    }
}
