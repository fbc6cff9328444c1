//! Memory of a GPU that is let go while a copy still uses it, in the order of the streams.

use std::sync::Arc;

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::staging::Ordered;

use crate::gpu::{Departure, GpuWay, Gpus, user_stream};
use crate::gpu_waits::{Noted, Wait};

impl Gpus {
    /// True if tensors of a GPU have left it.
    pub fn are_in_use(&self) -> bool {
        !self.ways().is_empty()
    }

    /// Takes the copies from a GPU and the waits of its streams since the last call.
    pub fn take_waits(&self, gpu: usize) -> Noted {
        self.known(gpu).map_or_else(Noted::default, |way| way.waits.take())
    }
}

impl GpuWay {
    /// Makes the stream wait for the copy, and tells the allocator of all streams that may use the
    /// memory. Returns `false` while a CUDA graph is being captured, because the wait would become
    /// a part of the graph. `is_planned` has the wait noted, and is `true` if the copy should have
    /// ended by the plan.
    pub fn order(
        &self,
        py: Python<'_>,
        departure: &Departure,
        is_planned: Option<bool>,
    ) -> PyResult<core::Result<bool>> {
        let stream = user_stream(departure.stream);
        let from = match self.staging.order(&departure.after, stream, is_planned.is_some()) {
            Ok(Ordered::Captured) => return Ok(Ok(false)),
            Ok(Ordered::Waits(from)) => from,
            Err(error) => return Ok(Err(error)),
        };
        if let (Some(from), Some(is_planned)) = (from, is_planned) {
            self.waits.add(Wait { from, copied: Arc::clone(&departure.after), is_planned });
        }
        if departure.is_shared {
            // defence: streams that use a source
            self.seen.record_all(departure.memory.bind(py), self.gpu)?;
        }
        Ok(Ok(true))
    }

    /// Lets memory go now, or at the end of the capture of a CUDA graph.
    pub fn let_go(&self, py: Python<'_>, departure: Departure) {
        // The interpreter drops graphs also while an exception is on its way.
        let under_way = PyErr::take(py);
        match self.order(py, &departure, None) {
            Ok(Ok(true)) => drop(departure),
            Ok(Ok(false)) => self.held().push(departure),
            // The copy may use the memory for ever, so it is never freed.
            Ok(Err(_)) | Err(_) => std::mem::forget(departure.memory),
        }
        if let Some(error) = under_way {
            error.restore(py);
        }
    }

    /// Lets go of memory that a capture held back, if the capture has ended.
    pub fn let_held_go(&self, py: Python<'_>) {
        let held = std::mem::take(&mut *self.held());
        for departure in held {
            self.let_go(py, departure);
        }
    }
}

impl Drop for GpuWay {
    fn drop(&mut self) {
        let held = std::mem::take(&mut *self.held());
        // Nobody is left to notice the end of the capture, so this memory is never freed.
        for departure in held {
            std::mem::forget(departure.memory);
        }
    }
}
