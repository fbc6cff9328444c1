//! Moments on the clock of a GPU, by which a session learns how long steps take there.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::stream::{Event, EventPool, is_capturing};

use crate::gpu::{Gpus, raised, user_stream};

/// Marks moments of the GPUs of a session.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct GpuClock {
    gpus: Py<Gpus>,
    pools: Mutex<Vec<(usize, Arc<EventPool>)>>,
}

/// The moment at which a stream comes to where it was filled up to.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct GpuMoment {
    #[pyo3(get)]
    gpu: usize,
    event: Event,
}

#[pymethods]
impl GpuClock {
    #[new]
    fn new(gpus: Py<Gpus>) -> Self {
        Self { gpus, pools: Mutex::default() }
    }

    /// Marks where the current stream of a GPU is; `None` while a CUDA graph is captured there.
    fn mark(&self, py: Python<'_>, gpu: usize) -> PyResult<Option<GpuMoment>> {
        let stream = user_stream(self.gpus.get().stream(py, gpu)?);
        let record = || -> core::Result<Option<Event>> {
            let opened = Gpu::get(gpu)?;
            if is_capturing(&opened, stream)? {
                return Ok(None);
            }
            self.pool(gpu, &opened).record(stream).map(Some)
        };
        let event = raised(py, record())?;
        Ok(event.map(|event| GpuMoment { gpu, event }))
    }
}

impl GpuClock {
    fn pool(&self, gpu: usize, opened: &Arc<Gpu>) -> Arc<EventPool> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(known, _)| *known == gpu) {
            return Arc::clone(pool);
        }
        let pool = EventPool::timed(opened);
        pools.push((gpu, Arc::clone(&pool)));
        pool
    }
}

#[pymethods]
impl GpuMoment {
    /// Whether the GPU has come to it.
    fn is_reached(&self, py: Python<'_>) -> PyResult<bool> {
        raised(py, self.event.is_reached())
    }

    /// The seconds from another moment of the same GPU; ask once both have been reached.
    fn seconds_since(&self, before: &Self) -> Option<f64> {
        self.event.since(&before.event).map(|took| took.as_secs_f64())
    }
}
