//! The layout of a tensor in its storage, and the part of the storage that holds it.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::torch::Torch;

/// Parts begin on a multiple of the largest item of any dtype, so that tensors of every dtype that
/// lie in a part can be put back on it: their offsets are whole numbers of items.
const PART_ALIGNMENT_BYTES: u64 = 16;

/// Dtype, size, strides and offset of a tensor; strides too, because kernels choose by them.
pub struct Layout {
    pub dtype: Py<PyAny>,
    /// Length and stride of each dimension, the stride in items. No tuples: the collector of
    /// garbage would look at them again and again.
    dimensions: Box<[(i64, i64)]>,
    item_bytes: u64,
    /// Bytes from the start of the storage.
    pub offset: u64,
    /// The number of its GPU; `None` for the CPU.
    pub gpu: Option<usize>,
}

impl Layout {
    pub fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let item_bytes = item_bytes(tensor)?;
        Ok(Self {
            dtype: tensor.getattr(intern!(py, "dtype"))?.unbind(),
            dimensions: dimensions(tensor)?,
            item_bytes,
            offset: storage_offset(tensor)? * item_bytes, // defence: storage offset
            gpu: gpu_of(tensor)?,
        })
    }

    /// Start and length, in bytes, of the part of its storage that is managed for the tensor.
    ///
    /// The part is the whole storage if the tensor spans half of it or more: the slices of a fused
    /// projection are saved one after the other, and one write serves them all. A small view of
    /// something large (a batch of a data set in memory) takes its own part only.
    pub fn part(&self, tensor: &Bound<'_, PyAny>, storage_bytes: u64) -> PyResult<(u64, u64)> {
        let py = tensor.py();
        let nbytes: u64 = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
        if nbytes == 0 {
            return Ok((0, 0));
        }
        let is_contiguous = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
        let span = if is_contiguous { nbytes } else { self.span_bytes() };
        if 2 * span >= storage_bytes {
            return Ok((0, storage_bytes));
        }
        let start = self.offset - self.offset % PART_ALIGNMENT_BYTES;
        Ok((start, self.offset + span - start))
    }

    /// The bytes from the first element to the end of the last, if there are elements.
    fn span_bytes(&self) -> u64 {
        let reach: i64 = self.dimensions.iter().map(|(count, step)| (count - 1) * step).sum();
        (reach as u64 + 1) * self.item_bytes
    }

    pub fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.dimensions.iter().map(|(count, _)| count))
    }

    pub fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.dimensions.iter().map(|(_, step)| step))
    }

    /// True if a tensor has this layout.
    pub fn is_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        Ok(tensor.getattr(intern!(py, "dtype"))?.is(&self.dtype)
            && dimensions(tensor)? == self.dimensions
            && storage_offset(tensor)? * item_bytes(tensor)? == self.offset)
    }

    /// A tensor on `storage`, whose first byte was at `start` of the original.
    pub fn build<'py>(
        &self,
        torch: &Torch,
        storage: &Bound<'py, PyAny>,
        start: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = storage.py();
        let offset = (self.offset - start) / self.item_bytes;
        let empty = torch.empty(self.dtype.bind(py), self.gpu)?.getattr(intern!(py, "data"))?;
        let size = self.size(py)?;
        let stride = self.stride(py)?; // defence: strides
        empty.call_method1(intern!(py, "set_"), (storage, offset, size, stride))
    }
}

/// The layout of a tensor, as a class of Python.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Geometry {
    torch: Py<Torch>,
    layout: Layout,
}

#[pymethods]
impl Geometry {
    #[new]
    fn new(torch: Py<Torch>, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { torch, layout: Layout::of(tensor)? })
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> Py<PyAny> {
        self.layout.dtype.clone_ref(py)
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.layout.size(py)
    }

    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.layout.stride(py)
    }

    #[getter]
    fn offset(&self) -> u64 {
        self.layout.offset
    }

    fn span_bytes(&self) -> u64 {
        self.layout.span_bytes()
    }

    fn build<'py>(&self, storage: &Bound<'py, PyAny>, start: u64) -> PyResult<Bound<'py, PyAny>> {
        self.layout.build(self.torch.get(), storage, start)
    }
}

/// The tensor whose version counter this tensor shares: its base if it is a view, else itself.
///
/// Tensors on one storage may have several counters: `.data` has its own, and so has each part that
/// `unsafe_chunk` returns. Torch's LSTM cells fill such parts one after the other.
pub fn root_of<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let base = tensor.getattr(intern!(tensor.py(), "_base"))?;
    Ok(if base.is_none() { tensor.clone() } else { base })
}

/// True if other tensors on its storage may be changed without the version counter of this tensor.
///
/// Such a tensor stays in memory: the counter of a record would not show changes of the other bytes
/// that the record covers.
pub fn shares_no_counter(tensor: &Bound<'_, PyAny>, storage_bytes: u64) -> PyResult<bool> {
    let root_bytes: u64 = root_of(tensor)?.getattr(intern!(tensor.py(), "nbytes"))?.extract()?;
    Ok(root_bytes < storage_bytes) // defence: parts that count apart stay
}

/// True if the memory of a storage belongs to an array or a mapped file, not to torch or the store.
///
/// The owner keeps that memory anyway, and may change it after torch's storage is gone. `owns` is
/// true for an address in memory that the store gave out.
pub fn is_memory_of_others(
    storage: &Bound<'_, PyAny>,
    owns: impl FnOnce(usize) -> bool,
) -> PyResult<bool> {
    let py = storage.py();
    if storage.call_method0(intern!(py, "resizable"))?.is_truthy()? {
        return Ok(false);
    }
    let address = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(!owns(address)) // defence: memory of others stays
}

/// The number of a plain tensor's GPU; `None` for the CPU.
fn gpu_of(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let number: i64 = tensor.call_method0(intern!(tensor.py(), "get_device"))?.extract()?;
    Ok(usize::try_from(number).ok())
}

fn dimensions(tensor: &Bound<'_, PyAny>) -> PyResult<Box<[(i64, i64)]>> {
    let py = tensor.py();
    let shape = tensor.getattr(intern!(py, "shape"))?.cast_into::<PyTuple>()?;
    let stride = tensor.call_method0(intern!(py, "stride"))?.cast_into::<PyTuple>()?;
    shape
        .iter()
        .zip(stride.iter())
        .map(|(count, step)| Ok((count.extract()?, step.extract()?)))
        .collect()
}

fn storage_offset(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.call_method0(intern!(tensor.py(), "storage_offset"))?.extract()
}

fn item_bytes(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.getattr(intern!(tensor.py(), "itemsize"))?.extract()
}
