//! `Store` and its handles: argument checks, waiting off the GIL, and nothing else.
#![expect(unsafe_code, reason = "takes addresses of tensors and exports slots as buffers")]

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ssdtrain_core as core;

use crate::error::to_python;
use crate::owner::{LetGo, Owner, let_go};
use crate::simulated::SimulatedDisk;

/// The time between two checks for Ctrl-C during a wait.
pub const SIGNAL_CHECK: Duration = Duration::from_millis(100);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Store(Arc<core::TensorStore>, LetGo);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Stored(core::Stored, LetGo);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Overwrite(core::Overwrite, LetGo);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Pending(core::Pending);

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct PendingInto(core::PendingInto, LetGo);

#[pyclass(frozen, weakref, module = "ssdtrain._core")]
pub struct Slot(pub Arc<core::Restored>);

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        dirs, *, backend, direct_io, max_disk_bytes, verify, retain_bytes=None,
        simulated_disk=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        py: Python<'_>,
        dirs: Vec<(PathBuf, Option<(u32, usize)>)>,
        backend: &str,
        direct_io: &str,
        max_disk_bytes: Option<u64>,
        verify: bool,
        retain_bytes: Option<usize>,
        simulated_disk: Option<&Bound<'_, SimulatedDisk>>,
    ) -> PyResult<Self> {
        let (paths, tunings): (Vec<_>, Vec<_>) = dirs.into_iter().unzip();
        let mut config = core::StoreConfig::new(paths);
        for (dir, tuning) in config.dirs.iter_mut().zip(tunings) {
            if let Some((queue_depth, piece_bytes)) = tuning {
                dir.tuning = core::Tuning { queue_depth, piece_bytes };
            }
        }
        config.backend = match backend {
            "auto" => core::Backend::Auto,
            "io_uring" => core::Backend::IoUring,
            "psync" => core::Backend::Psync,
            "simulated" => {
                let faults = simulated_disk.map(|disk| disk.get().faults());
                core::Backend::Simulated(faults.unwrap_or_default())
            }
            other => return Err(PyValueError::new_err(format!("no backend is called {other:?}"))),
        };
        config.direct_io = match direct_io {
            "required" => core::DirectIo::Required,
            "optional" => core::DirectIo::Optional,
            "disabled" => core::DirectIo::Disabled,
            other => return Err(PyValueError::new_err(format!("direct_io cannot be {other:?}"))),
        };
        config.max_disk_bytes = max_disk_bytes;
        config.verify = verify;
        config.arena_retain_bytes = retain_bytes.unwrap_or(config.arena_retain_bytes);
        let opened = py.detach(|| core::TensorStore::open(&config));
        opened.map(|store| Self(Arc::new(store), LetGo)).map_err(|error| to_python(py, &error))
    }

    #[pyo3(signature = (*, retain_bytes=None))]
    fn beside(&self, py: Python<'_>, retain_bytes: Option<usize>) -> PyResult<Self> {
        let retain_bytes = retain_bytes.unwrap_or(core::config::ARENA_RETAIN_BYTES);
        let store = self.0.beside(retain_bytes).map_err(|error| to_python(py, &error))?;
        Ok(Self(Arc::new(store), LetGo))
    }

    fn write(
        &self,
        py: Python<'_>,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Stored> {
        let begun = self.begin_write(py, address, nbytes, owner)?;
        begun.map(|stored| Stored(stored, LetGo)).map_err(|error| to_python(py, &error))
    }

    fn overwrite(
        &self,
        py: Python<'_>,
        stored: &Stored,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Overwrite> {
        let source = source(address, nbytes, owner)?;
        let begun = py.detach(|| self.0.overwrite(&stored.0, source));
        let_go(py);
        begun.map(|begun| Overwrite(begun, LetGo)).map_err(|error| to_python(py, &error))
    }

    fn read(&self, py: Python<'_>, stored: &Stored) -> PyResult<Pending> {
        self.0.read(&stored.0).map(Pending).map_err(|error| to_python(py, &error))
    }

    fn read_into(
        &self,
        py: Python<'_>,
        stored: &Stored,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<PendingInto> {
        let (address, owner) = (address_of(address)?, Box::new(Owner::new(owner)));
        // SAFETY: the caller passes the address and size of writable memory that `owner` keeps
        // alive, and uses it for nothing else before the read has ended.
        let target = unsafe { core::HostTarget::new(address, nbytes, owner) };
        let pending = py.detach(|| self.0.read_into(&stored.0, target));
        let_go(py);
        pending.map(|pending| PendingInto(pending, LetGo)).map_err(|error| to_python(py, &error))
    }

    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.0.trim()).map_err(|error| to_python(py, &error))
    }

    pub fn resident_bytes(&self, py: Python<'_>) -> usize {
        loop {
            let resident_bytes = self.0.resident_bytes();
            // Owners that were given back before the count are dropped before it is returned. A
            // drop may run code that changes the count, so the bytes are then counted again.
            if !let_go(py) {
                return resident_bytes;
            }
        }
    }

    fn owns(&self, address: usize) -> bool {
        self.0.owns(address)
    }

    #[pyo3(signature = (*, limit_s=None))]
    pub fn wait_for_abandoned(&self, py: Python<'_>, limit_s: Option<f64>) -> PyResult<bool> {
        let until = limit_s.map(|limit_s| Instant::now() + Duration::from_secs_f64(limit_s));
        loop {
            let left =
                until.map_or(SIGNAL_CHECK, |until| until.saturating_duration_since(Instant::now()));
            let ended = py.detach(|| self.0.wait_for_abandoned(left.min(SIGNAL_CHECK)));
            let_go(py);
            match ended {
                Some(ended) => return Ok(ended),
                None if left.is_zero() => return Ok(false),
                None => py.check_signals()?,
            }
        }
    }

    pub fn has_directory(&self) -> bool {
        self.0.has_directory()
    }

    fn rates(&self, py: Python<'_>) -> PyResult<(Option<f64>, Option<f64>)> {
        let rates = self.0.rates().map_err(|error| to_python(py, &error))?;
        Ok((rates.write, rates.read))
    }

    fn notes(&self) -> Vec<String> {
        self.0.notes()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let_go(py);
        let stats = self.0.stats().map_err(|error| to_python(py, &error))?;
        let dict = PyDict::new(py);
        dict.set_item("bytes_written", stats.written.bytes)?;
        dict.set_item("bytes_read", stats.read.bytes)?;
        dict.set_item("write_count", stats.written.count)?;
        dict.set_item("read_count", stats.read.count)?;
        dict.set_item("write_failed_count", stats.written.failed_count)?;
        dict.set_item("read_failed_count", stats.read.failed_count)?;
        dict.set_item("write_operation_count", stats.written.operation_count)?;
        dict.set_item("read_operation_count", stats.read.operation_count)?;
        dict.set_item("write_busy_ns", stats.written.busy_ns)?;
        dict.set_item("read_busy_ns", stats.read.busy_ns)?;
        dict.set_item("cancelled_count", stats.cancelled_count)?;
        dict.set_item("disk_used_bytes", stats.disk_used_bytes)?;
        dict.set_item("disk_reserved_bytes", stats.disk_reserved_bytes)?;
        dict.set_item("beside_written_bytes", stats.beside_written_bytes)?;
        dict.set_item("beside_read_bytes", stats.beside_read_bytes)?;
        dict.set_item("arena_live_bytes", stats.arena_live_bytes)?;
        dict.set_item("engines", stats.engines)?;
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
        let_go(py);
    }
}

impl Store {
    /// The store itself, for the ways of GPUs.
    pub fn shared(&self) -> Arc<core::TensorStore> {
        Arc::clone(&self.0)
    }

    /// Queues a write of memory that `owner` keeps alive.
    pub fn begin_write(
        &self,
        py: Python<'_>,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<core::Result<core::Stored>> {
        let source = source(address, nbytes, owner)?;
        // Queueing takes a moment. The checksum for `verify` takes longer, and other threads run
        // meanwhile.
        let begun = if self.0.verifies() {
            py.detach(|| self.0.write(source))
        } else {
            self.0.write(source)
        };
        let_go(py);
        Ok(begun)
    }

    /// Queues a read of stored bytes.
    pub fn begin_read(&self, stored: &core::Stored) -> core::Result<core::Pending> {
        self.0.read(stored)
    }

    /// The bytes of memory that transfers hold.
    pub fn transfer_bytes(&self, py: Python<'_>) -> u64 {
        self.resident_bytes(py) as u64
    }

    pub fn has_given_out(&self, address: usize) -> bool {
        self.0.owns(address)
    }
}

#[pymethods]
impl Stored {
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.0.slot_bytes()
    }

    fn done(&self, py: Python<'_>) -> bool {
        let done = self.0.ticket().is_done();
        // A caller that sees a write done sees its source dropped.
        let_go(py);
        done
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let answer = wait(py, self.0.ticket());
        let_go(py);
        answer?.map_err(|error| to_python(py, &error))
    }

    fn cancel(&self, py: Python<'_>) -> bool {
        let cancelled = self.0.cancel();
        let_go(py);
        cancelled
    }
}

#[pymethods]
impl Overwrite {
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.0.ticket().is_done();
        let_go(py);
        done
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let answer = wait(py, self.0.ticket());
        let_go(py);
        answer?.map_err(|error| to_python(py, &error))
    }

    fn cancel(&self, py: Python<'_>) -> bool {
        let cancelled = self.0.cancel();
        let_go(py);
        cancelled
    }
}

#[pymethods]
impl PendingInto {
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.0.ticket().is_done();
        let_go(py);
        done
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let answer = wait(py, self.0.ticket());
        let_go(py);
        answer?.map_err(|error| to_python(py, &error))
    }
}

#[pymethods]
impl Pending {
    fn done(&self) -> bool {
        self.0.ticket().is_done()
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Slot> {
        let answer = wait(py, self.0.ticket())?;
        let restored = answer.and_then(|()| self.0.restored());
        restored.map(|restored| Slot(Arc::new(restored))).map_err(|error| to_python(py, &error))
    }
}

#[pymethods]
impl Slot {
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    #[expect(clippy::needless_pass_by_value, reason = "the signature is PyO3's")]
    /// A writable view: the tensor made of it may be changed in place like any other.
    ///
    /// # Safety
    /// Called by the interpreter with a valid `view`, as the buffer protocol says.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let (address, len) = (slf.get().0.address(), slf.get().0.len());
        // SAFETY: the slot's memory lives as long as this object, to which the view takes a
        // reference; the interpreter passes a valid view.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                address.cast::<c_void>(),
                len as ffi::Py_ssize_t,
                0,
                flags,
            )
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Waits with the GIL released; Ctrl-C is the outer error.
pub fn wait(py: Python<'_>, ticket: &core::Transfer) -> PyResult<core::Result<()>> {
    // A transfer that has ended is not worth a change of threads.
    if ticket.is_done()
        && let Some(answer) = ticket.wait_for(Duration::ZERO)
    {
        return Ok(answer);
    }
    loop {
        if let Some(answer) = py.detach(|| ticket.wait_for(SIGNAL_CHECK)) {
            return Ok(answer);
        }
        py.check_signals()?;
    }
}

/// Memory that a write reads from.
fn source(address: usize, nbytes: usize, owner: Py<PyAny>) -> PyResult<core::HostSource> {
    let (address, owner) = (address_of(address)?, Box::new(Owner::new(owner)));
    // SAFETY: the caller passes the address and size of memory that `owner` keeps alive.
    Ok(unsafe { core::HostSource::new(address, nbytes, owner) })
}

fn address_of(address: usize) -> PyResult<NonNull<u8>> {
    NonNull::new(address as *mut u8)
        .ok_or_else(|| PyValueError::new_err("the address of a tensor with bytes is not 0"))
}
