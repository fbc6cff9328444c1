//! Tells weights, plain tensors and kinds that are not managed apart.

use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyFrozenSet, PyType};

use crate::kept::{is_true, storage_of};

/// Views and casts of a weight are a few nodes away from it; this bounds the work of a pack.
const DERIVATION_DEPTH_MAX: usize = 8;
/// The users of a storage that the program does not hold: the result of an operation, the detached
/// tensor that a selective checkpoint packs, and the Python object of the storage.
const FRESH_USERS_MAX: usize = 3;

/// Classes and functions of torch, which this crate does not import.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Rules {
    tensor_type: Py<PyType>,
    parameter_type: Py<PyType>,
    dispatch_keys: Py<PyAny>,
    plain_keys: Py<PyAny>,
    /// Function: the dispatch keys of a plain tensor on the GPU of the tensor that it gets.
    find_gpu_keys: Py<PyAny>,
    /// The dispatch keys of a plain tensor on any GPU, found at the first tensor on a GPU.
    gpu_keys: OnceLock<Py<PyAny>>,
    passes_weights_on: Py<PyFrozenSet>,
    is_below_autograd: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    storage_users: Py<PyAny>,
    pub tracer: Py<PyAny>,
    float32: Py<PyAny>,
}

/// The kind of a saved tensor.
pub enum Verdict {
    /// Of a class, layout or device that is not managed.
    Unusual,
    /// A parameter, a leaf that requires a gradient, or a tensor made of a parameter.
    Weight,
    /// All others.
    Plain,
}

/// The first look at a tensor.
#[derive(Clone, Copy)]
pub enum Outline {
    /// A parameter, or another leaf that requires a gradient.
    Weight,
    /// Any other.
    Other(OwnSize),
}

/// Facts of a tensor that need no look at its storage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OwnSize {
    pub is_leaf: bool,
    pub nbytes: u64,
}

/// The second look at a saved tensor.
#[derive(Clone, Copy)]
pub enum Glance {
    /// It is a view of a weight, or cast from a weight.
    Weight,
    /// It is too small to be worth a write; its storage is at the address `identity`.
    Small { identity: usize, nbytes: u64 },
    /// It is on the CPU or a GPU, and it or its base is large.
    Large,
}

/// True if a large tensor is of a kind that is managed, found at the least cost. If not,
/// [`judge`](Rules::judge) tells.
///
/// Of the kinds that the dispatch keys exclude, quantised tensors and lazy conjugates are not of
/// floating point, and the rest has no memory on the CPU or a GPU, or is never given to the hooks.
pub fn is_managed_at_a_glance(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    Ok(is_on_cpu_or_gpu(tensor)?
        && tensor.call_method0(intern!(py, "is_floating_point"))?.is_truthy()?
        && !is_true(tensor, intern!(py, "is_nested"))?
        && !tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?)
}

fn is_on_cpu_or_gpu(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    Ok(is_true(tensor, intern!(py, "is_cpu"))? || is_true(tensor, intern!(py, "is_cuda"))?)
}

#[pymethods]
impl Rules {
    #[new]
    #[pyo3(signature = (
        *, tensor_type, parameter_type, dispatch_keys, plain_keys, find_gpu_keys,
        passes_weights_on, is_below_autograd, is_grad_enabled, storage_users, tracer, float32
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        tensor_type: Py<PyType>,
        parameter_type: Py<PyType>,
        dispatch_keys: Py<PyAny>,
        plain_keys: Py<PyAny>,
        find_gpu_keys: Py<PyAny>,
        passes_weights_on: Py<PyFrozenSet>,
        is_below_autograd: Py<PyAny>,
        is_grad_enabled: Py<PyAny>,
        storage_users: Py<PyAny>,
        tracer: Py<PyAny>,
        float32: Py<PyAny>,
    ) -> Self {
        Self {
            tensor_type,
            parameter_type,
            dispatch_keys,
            plain_keys,
            find_gpu_keys,
            gpu_keys: OnceLock::new(),
            passes_weights_on,
            is_below_autograd,
            is_grad_enabled,
            storage_users,
            tracer,
            float32,
        }
    }
}

impl Rules {
    /// True inside an operation.
    pub fn is_below_autograd(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_below_autograd.bind(py).call0()?.is_truthy()
    }

    /// Tells weights that are leaves from others; `None` if [`judge`](Self::judge) has to tell.
    pub fn outline(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Outline>> {
        let py = tensor.py();
        let kind = tensor.get_type();
        let is_parameter = kind.is(&self.parameter_type);
        if !is_parameter && !kind.is(&self.tensor_type) {
            return Ok(None);
        }
        let is_leaf = is_true(tensor, intern!(py, "is_leaf"))?;
        if is_leaf && (is_parameter || is_true(tensor, intern!(py, "requires_grad"))?) {
            return Ok(Some(Outline::Weight));
        }
        // Sparse tensors, and others without memory of their own, raise.
        let Ok(nbytes) = tensor.getattr(intern!(py, "nbytes")) else { return Ok(None) };
        Ok(Some(Outline::Other(OwnSize { is_leaf, nbytes: nbytes.extract()? })))
    }

    /// Tells other weights and small tensors at the least cost; [`judge`](Self::judge) tells the
    /// rest.
    ///
    /// It makes hardly an object that torch has not made already: the node and the storage of a
    /// tensor cost more to wrap than all that is done here. So the nodes behind a tensor are looked
    /// at only if it may be cast from a weight, which is mostly of the widest type.
    ///
    /// With `is_exact` the storage counts also for a tensor that is no view: it may be a detached
    /// part.
    pub fn glance(
        &self,
        tensor: &Bound<'_, PyAny>,
        own: OwnSize,
        small_bytes: u64,
        is_exact: bool,
    ) -> PyResult<Option<Glance>> {
        let py = tensor.py();
        if !is_on_cpu_or_gpu(tensor)? {
            return Ok(None);
        }
        let base = tensor.getattr(intern!(py, "_base"))?;
        let is_view = !base.is_none();
        let (identity, nbytes) = if !is_view && !is_exact {
            if own.nbytes >= small_bytes {
                return Ok(Some(Glance::Large));
            }
            let Ok(address) = tensor.call_method0(intern!(py, "data_ptr")) else {
                return Ok(None);
            };
            (address.extract()?, own.nbytes)
        } else {
            // defence: provenance: the base of a view
            if is_view && self.is_weight_itself(&base)? {
                return Ok(Some(Glance::Weight));
            }
            // Views of tensors of zeros that have no memory at all raise.
            let Ok(storage) = storage_of(tensor) else { return Ok(None) };
            storage
        };
        if nbytes >= small_bytes {
            return Ok(Some(Glance::Large));
        }
        if !own.is_leaf && !tensor.getattr(intern!(py, "dtype"))?.is(&self.float32) {
            let node = tensor.getattr(intern!(py, "grad_fn"))?;
            if self.is_made_of_weight(tensor, node)? {
                return Ok(Some(Glance::Weight));
            }
        }
        Ok(Some(Glance::Small { identity, nbytes }))
    }

    /// The kind of a tensor that [`glance`](Self::glance) could not tell.
    pub fn judge(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Verdict> {
        let py = tensor.py();
        let kind = tensor.get_type();
        // Of a subclass (DTensor, fake tensors) nothing but the type may be touched.
        if !kind.is(&self.parameter_type) && !kind.is(&self.tensor_type) {
            return Ok(Verdict::Unusual);
        }
        // Dense, strided tensors whose bytes say everything about them, on the CPU or a GPU.
        // Torch's dispatch keys tell: sparse, nested and quantised tensors, lazy conjugates,
        // tensors without bytes, of inference mode, of function transforms and of other devices
        // each have a key more, or one less, than a plain tensor.
        let keys = self.dispatch_keys.bind(py).call1((tensor,))?;
        let plain_keys = if is_true(tensor, intern!(py, "is_cuda"))? {
            self.gpu_keys(tensor)?
        } else {
            &self.plain_keys
        };
        if !keys.eq(plain_keys)? {
            return Ok(Verdict::Unusual); // defence: what a plain tensor is
        }
        Ok(if self.is_weight(tensor)? { Verdict::Weight } else { Verdict::Plain })
    }

    /// True if a tensor has its bytes: `offload_parameters` gives a weight that is away another
    /// class.
    pub fn is_in_memory(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (py, class) = (tensor.py(), tensor.get_type());
        let is_plain = class.is(&self.tensor_type) || class.is(&self.parameter_type);
        let holder = intern!(py, "_ssdtrain_holder");
        // defence: a weight that was saved is brought back
        let is_away = !is_plain && tensor.hasattr(holder)?;
        Ok(!is_away)
    }

    /// True if a tensor that is no weight by its [`outline`](Self::outline) was made of a weight.
    pub fn is_weight(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let base = tensor.getattr(intern!(tensor.py(), "_base"))?;
        // defence: provenance: the base of a view
        if !base.is_none() && self.is_weight_itself(&base)? {
            return Ok(true);
        }
        let node = tensor.getattr(intern!(tensor.py(), "grad_fn"))?;
        if node.is_none() {
            self.is_used_by_others(tensor)
        } else {
            self.is_made_of_weight(tensor, node)
        }
    }

    /// The dispatch keys of a plain tensor on the GPU of `tensor`.
    fn gpu_keys(&self, tensor: &Bound<'_, PyAny>) -> PyResult<&Py<PyAny>> {
        if let Some(known) = self.gpu_keys.get() {
            return Ok(known);
        }
        // Called before the cell is locked: torch may let other threads run, which come here as
        // well.
        let found = self.find_gpu_keys.bind(tensor.py()).call1((tensor,))?.unbind();
        Ok(self.gpu_keys.get_or_init(|| found))
    }

    fn is_weight_itself(&self, base: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = base.py();
        if !base.get_type().is(&self.tensor_type)
            && base.is_instance(self.parameter_type.bind(py))?
        {
            return Ok(true);
        }
        Ok(is_true(base, intern!(py, "is_leaf"))? && is_true(base, intern!(py, "requires_grad"))?)
    }

    /// True if others use the storage of a tensor without history. Autograd calls pack with grad
    /// mode off. If it is on, a selective checkpoint hands over a tensor of its cache, which has no
    /// history to look at. It may be a view of a weight, and FSDP2 empties its weights after their
    /// forward, even while they are being written. The other users of its storage show such a view.
    fn is_used_by_others(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        if !self.is_grad_enabled.bind(py).call0()?.is_truthy()? {
            return Ok(false);
        }
        let users: usize = self.storage_users.bind(py).call1((tensor,))?.extract()?;
        Ok(users > FRESH_USERS_MAX) // defence: weights without history
    }

    /// True if only nodes that pass a weight on, with another shape or type, lie between the tensor
    /// and a parameter.
    fn is_made_of_weight<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        mut node: Bound<'py, PyAny>,
    ) -> PyResult<bool> {
        let py = tensor.py();
        // defence: provenance: the walk to the parameter
        for _ in 0..DERIVATION_DEPTH_MAX {
            let name = node.call_method0(intern!(py, "name"))?;
            if !self.passes_weights_on.bind(py).as_any().contains(&name)? {
                return Ok(false);
            }
            let next = node.getattr(intern!(py, "next_functions"))?;
            if next.len()? == 0 {
                return Ok(false);
            }
            node = next.get_item(0)?.get_item(0)?;
            if node.is_none() {
                return Ok(false);
            }
            let name = node.call_method0(intern!(py, "name"))?;
            if name.eq(intern!(py, "torch::autograd::AccumulateGrad"))? {
                let leaf = node.getattr_opt(intern!(py, "variable"))?;
                return leaf.map_or(Ok(false), |leaf| self.is_no_larger(tensor, &leaf));
            }
        }
        Ok(false)
    }

    /// True if this was made of a parameter, and is not a row of it repeated for a whole batch.
    fn is_no_larger(&self, tensor: &Bound<'_, PyAny>, leaf: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        if !leaf.is_instance(self.parameter_type.bind(py))? {
            return Ok(false);
        }
        let leaf_count: u64 = leaf.call_method0(intern!(py, "numel"))?.extract()?;
        let item_bytes: u64 = tensor.getattr(intern!(py, "itemsize"))?.extract()?;
        let (_, storage_bytes) = storage_of(tensor)?;
        Ok(storage_bytes <= leaf_count * item_bytes) // defence: what is larger than its parameter
    }
}
