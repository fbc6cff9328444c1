//! `Kept`: autograd holds it in the place of a tensor that stays in memory.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyWeakrefReference};
use ssdtrain_core as core;

use crate::saved_tensor::SharedRound;

/// The version of a tensor that has none: it was made in inference mode.
pub const NO_VERSION: i64 = -1;

/// The place of a tensor in a partial round, in which it is not followed because it stays.
pub struct Passed {
    pub round: SharedRound,
    /// The policy's name for the tensor.
    pub key: i64,
    pub gpu: Option<usize>,
}

/// A tensor that stays in memory.
///
/// Dead objects are used again, up to 2 MB of them: each new object would count for Python's
/// garbage collector, which would run more often and find no garbage.
#[pyclass(frozen, freelist = 16_384, module = "ssdtrain._core")]
pub struct Kept {
    /// Its entry in the account; a weight has none. The field stands before `tensor`, so that the
    /// entry ends before the storage, whose address another storage may get.
    _holding: Option<core::SharedHolding>,
    #[pyo3(get)]
    tensor: Py<PyAny>,
    /// A weak reference to a leaf, because `torch.utils.swap_tensors` refuses a tensor that has
    /// one. Without hooks it refuses a saved leaf because of autograd's own reference; it does not
    /// count ours, which is of Python.
    _unswappable: Option<Py<PyWeakrefReference>>,
    #[pyo3(get)]
    version: i64,
    /// True if it was packed inside an operation, and is needed there: it might become the result
    /// of the operation, which is changed then.
    pub is_from_below: bool,
    pub passed: Option<Passed>,
}

#[pymethods]
impl Kept {
    #[new]
    fn new(tensor: Py<PyAny>, version: i64) -> Self {
        let (holding, unswappable, passed) = (None, None, None);
        Self {
            _holding: holding,
            tensor,
            _unswappable: unswappable,
            version,
            is_from_below: true,
            passed,
        }
    }
}

impl Kept {
    /// Packs a tensor.
    ///
    /// A leaf is held itself, as autograd holds it. The result of a node is not, because it holds
    /// the node.
    pub fn hold(
        tensor: &Bound<'_, PyAny>,
        is_leaf: bool,
        is_from_below: bool,
        holding: Option<core::SharedHolding>,
    ) -> PyResult<Py<Self>> {
        Py::new(tensor.py(), Self::of(tensor, is_leaf, is_from_below, holding)?)
    }

    /// Packs a tensor that is not followed.
    pub fn hold_passed(
        tensor: &Bound<'_, PyAny>,
        is_leaf: bool,
        holding: core::SharedHolding,
        passed: Option<Passed>,
    ) -> PyResult<Py<Self>> {
        let kept = Self::of(tensor, is_leaf, false, Some(holding))?;
        Py::new(tensor.py(), Self { passed, ..kept })
    }

    fn of(
        tensor: &Bound<'_, PyAny>,
        is_leaf: bool,
        is_from_below: bool,
        holding: Option<core::SharedHolding>,
    ) -> PyResult<Self> {
        let py = tensor.py();
        let version = version_of(tensor)?;
        // defence: a leaf that is kept is held itself
        let held = if is_leaf {
            tensor.clone()
        } else {
            tensor.call_method0(intern!(py, "detach"))? // defence: never the tensor itself
        };
        // defence: a leaf that is kept cannot be swapped
        let unswappable = is_leaf.then(|| PyWeakrefReference::new(&held)).transpose()?;
        Ok(Self {
            _holding: holding,
            tensor: held.unbind(),
            _unswappable: unswappable.map(Bound::unbind),
            version,
            is_from_below,
            passed: None,
        })
    }

    /// The tensor, if its version is that of the pack.
    pub fn unchanged<'py>(&self, py: Python<'py>) -> PyResult<Option<&Bound<'py, PyAny>>> {
        let tensor = self.tensor.bind(py);
        // defence: version of what is kept
        let is_same = self.version == NO_VERSION || self.version == version_of(tensor)?;
        Ok(is_same.then_some(tensor))
    }
}

/// The address of a tensor's storage, which is its identity for as long as the tensor lives, and
/// its size in bytes.
pub fn storage_of(tensor: &Bound<'_, PyAny>) -> PyResult<(usize, u64)> {
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let address = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok((address, storage.call_method0(intern!(py, "nbytes"))?.extract()?))
}

pub fn is_true(object: &Bound<'_, PyAny>, name: &Bound<'_, PyString>) -> PyResult<bool> {
    object.getattr(name)?.is_truthy()
}

pub fn version_of(tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}
