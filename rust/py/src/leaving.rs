//! `Leaving` takes a tensor out of memory, in one call during which no other thread runs Python.
//!
//! The tensor is a weight or a gradient; here it is called a weight in any case.
//!
//! While a weight is away, its class brings the bytes back for code that uses it. But between a
//! look at the class and the moment in which the bytes are gone, another thread could begin to use
//! them. So all of it happens here: nothing below runs Python code or releases the GIL.
#![expect(unsafe_code, reason = "takes the address of a tensor, and counts references")]

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySet, PyType};
use ssdtrain_core as core;

use crate::partners::AwayEntry;

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Leaving {
    given: Given,
    /// The users of a weight whose storage nobody else has.
    alone: Users,
}

/// Classes and functions of Python, by their names in a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Given {
    plain: Py<PyType>,
    away: Py<PyType>,
    count_users: Py<PyAny>,
    current_frames: Py<PyAny>,
    thread: Py<PyAny>,
    /// Code objects in which a thread waits for others, and calls nothing of torch.
    idle: Py<PySet>,
    /// Function: the number of a thread's clock, which contains the kernel's number of the thread.
    clock_of: Py<PyAny>,
    collector: Py<PyAny>,
}

/// The users of a storage: tensors, as C++ counts them, and references to its Python object.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Users {
    tensors: usize,
    references: isize,
}

#[pymethods]
impl Leaving {
    /// `alone` is a weight whose storage nobody else has.
    #[new]
    fn new(given: Given, alone: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = alone.getattr(intern!(alone.py(), "data"))?;
        let users = users_of(given.count_users.bind(alone.py()), alone)?;
        drop(memory);
        Ok(Self { given, alone: users })
    }

    /// Takes the bytes out of `weight` and gives them to `entry`. Returns `false` if somebody else
    /// may be using them or, without `shared`, has them.
    fn leave(
        &self,
        weight: &Bound<'_, PyAny>,
        entry: AwayEntry<'_, '_>,
        husk: &Bound<'_, PyAny>,
        attribute: &str,
        shared: bool,
    ) -> PyResult<bool> {
        let py = weight.py();
        if !weight.get_type().is(&self.given.plain) {
            return Ok(false);
        }
        // Calls that make objects come before the check: a collection of garbage would run
        // finalisers.
        let memory = weight.getattr(intern!(py, "data"))?;
        entry.attach(weight, attribute)?;
        let collector = self.given.collector.bind(py);
        let is_collecting = collector.call_method0(intern!(py, "isenabled"))?.is_truthy()?;
        if is_collecting {
            collector.call_method0(intern!(py, "disable"))?;
        }
        let left = self.leave_at_once(weight, entry, husk, &memory, shared);
        if is_collecting {
            collector.call_method0(intern!(py, "enable"))?;
        }
        if !matches!(left, Ok(true)) {
            weight.delattr(attribute)?;
        }
        left
    }
}

impl Leaving {
    fn leave_at_once(
        &self,
        weight: &Bound<'_, PyAny>,
        entry: AwayEntry<'_, '_>,
        husk: &Bound<'_, PyAny>,
        memory: &Bound<'_, PyAny>,
        shared: bool,
    ) -> PyResult<bool> {
        let py = weight.py();
        // defence: no weight leaves beside busy threads
        if self.is_a_thread_busy(py)? {
            return Ok(false);
        }
        // defence: no weight leaves that is used
        if entry.has_users()? {
            return Ok(false);
        }
        // defence: no weight leaves that others have
        if !shared && users_of(self.given.count_users.bind(py), weight)? != self.alone {
            return Ok(false);
        }
        entry.take_bytes(memory)?;
        weight.setattr(intern!(py, "data"), husk)?;
        if let Err(error) = weight.setattr(intern!(py, "__class__"), &self.given.away) {
            weight.setattr(intern!(py, "data"), memory)?;
            return Err(error);
        }
        Ok(true)
    }

    /// True if another thread may use a weight: any thread that is not known to wait.
    fn is_a_thread_busy(&self, py: Python<'_>) -> PyResult<bool> {
        let own: u64 = self.given.thread.bind(py).call0()?.extract()?;
        let frames = self.given.current_frames.bind(py).call0()?;
        for (thread, frame) in frames.cast::<PyDict>()? {
            if thread.extract::<u64>()? == own {
                continue;
            }
            let code = frame.getattr(intern!(py, "f_code"))?;
            if !self.given.idle.bind(py).contains(code)? && !self.is_waiting(&thread)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Leaving {
    /// True if the kernel holds a thread in a call in which it cannot be using a weight. After that
    /// call the thread needs the GIL before it can use a weight.
    fn is_waiting(&self, thread: &Bound<'_, PyAny>) -> PyResult<bool> {
        let clock: i64 = self.given.clock_of.bind(thread.py()).call1((thread,))?.extract()?;
        // The number of such a clock contains that of its thread: clock_getcpuclockid(3).
        Ok(u32::try_from(!(clock >> 3)).is_ok_and(core::threads::is_waiting))
    }
}

fn users_of(count_users: &Bound<'_, PyAny>, tensor: &Bound<'_, PyAny>) -> PyResult<Users> {
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let tensors = count_users.call1((storage.getattr(intern!(py, "_cdata"))?,))?.extract()?;
    // SAFETY: the object is alive, as `storage` is a reference to it, and the GIL is held.
    let references = unsafe { pyo3::ffi::Py_REFCNT(storage.as_ptr()) };
    Ok(Users { tensors, references })
}
