//! Calls of torch for tensors of GPUs, and the streams that were current in hooks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;

/// The stream of a GPU that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuStream {
    /// The number of the GPU, as torch counts.
    pub gpu: usize,
    /// Its handle. It was current when the tensor was packed: autograd runs its node's backward
    /// under the same stream.
    pub handle: usize,
}

/// The streams that were current in a hook, also before their GPU's way was opened.
#[derive(Default)]
pub struct SeenStreams(Mutex<Vec<(GpuStream, Arc<Py<PyAny>>)>>);

impl SeenStreams {
    /// Notes that a stream uses tensors.
    pub fn note(&self, py: Python<'_>, stream: GpuStream, calls: &TorchCalls) -> PyResult<()> {
        if !self.locked().iter().any(|(seen, _)| *seen == stream) {
            let made = calls.stream_object.bind(py).call1((stream.gpu, stream.handle))?;
            let object = Arc::new(made.unbind());
            self.locked().push((stream, object));
        }
        Ok(())
    }

    /// Tells the allocator that a stream uses the memory of a tensor, too; the allocator ignores
    /// the stream for which it allocated the memory.
    pub fn record(&self, tensor: &Bound<'_, PyAny>, stream: GpuStream) -> PyResult<()> {
        let objects = self.objects(|seen| seen == stream);
        assert!(!objects.is_empty(), "a stream is noted before it is recorded");
        record(tensor, &objects)
    }

    /// Tells the allocator that all noted streams of a GPU use the memory of a tensor.
    pub fn record_all(&self, tensor: &Bound<'_, PyAny>, gpu: usize) -> PyResult<()> {
        record(tensor, &self.objects(|seen| seen.gpu == gpu))
    }

    fn objects(&self, is_meant: impl Fn(GpuStream) -> bool) -> Vec<Arc<Py<PyAny>>> {
        let seen = self.locked();
        let meant = seen.iter().filter(|(stream, _)| is_meant(*stream));
        meant.map(|(_, object)| Arc::clone(object)).collect()
    }

    fn locked(&self) -> MutexGuard<'_, Vec<(GpuStream, Arc<Py<PyAny>>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn record(tensor: &Bound<'_, PyAny>, streams: &[Arc<Py<PyAny>>]) -> PyResult<()> {
    let name = intern!(tensor.py(), "record_stream");
    streams.iter().try_for_each(|stream| tensor.call_method1(name, (&**stream,)).map(drop))
}

/// Functions of torch for tensors of GPUs; see `transfer/staged.py`.
pub struct TorchCalls {
    pub current_stream: Py<PyAny>,
    pub stream_object: Py<PyAny>,
    pub allocate: Py<PyAny>,
    pub out_of_memory: Py<PyAny>,
    /// Function: true if memory may be pinned within a step.
    pub may_pin_now: Py<PyAny>,
}

impl TorchCalls {
    /// The handle of the stream that is current in this thread.
    pub fn current_stream(&self, py: Python<'_>, gpu: usize) -> PyResult<usize> {
        self.current_stream.bind(py).call1((gpu,))?.extract()
    }

    /// True if an error says that torch has no memory of a GPU left.
    pub fn is_out_of_memory(&self, py: Python<'_>, error: &PyErr) -> bool {
        error.matches(py, self.out_of_memory.bind(py)).unwrap_or(false)
    }

    /// A storage that is allocated for a stream.
    pub fn allocate<'py>(
        &self,
        py: Python<'py>,
        stream: GpuStream,
        nbytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.allocate.bind(py).call1((stream.gpu, stream.handle, nbytes))
    }
}
