//! Memory of a GPU that is let go while a copy still uses it, in the order of the streams.

use std::sync::Arc;

use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::staging::Ordered;

use crate::gpu::{Departure, GpuWay, Gpus, user_stream};
use crate::gpu_waits::Wait;

impl Gpus {
    /// How streams of a GPU have waited since this was asked last.
    pub fn take_waits(&self, gpu: usize) -> Vec<Wait> {
        self.known(gpu).map_or_else(Vec::new, |way| way.waits.take())
    }
}

impl GpuWay {
    /// Makes the stream wait for the copy, and tells the allocator of all streams that may use the
    /// memory; `false` if a CUDA graph is being captured, of which the wait would become a part.
    /// `is_planned`: the wait is noted, and whether by the plan there is none.
    pub fn order(
        &self,
        py: Python<'_>,
        one: &Departure,
        is_planned: Option<bool>,
    ) -> PyResult<core::Result<bool>> {
        let stream = user_stream(one.stream);
        let from = match self.staging.order(&one.after, stream, is_planned.is_some()) {
            Ok(Ordered::Captured) => return Ok(Ok(false)),
            Ok(Ordered::Waits(from)) => from,
            Err(error) => return Ok(Err(error)),
        };
        if let (Some(from), Some(is_planned)) = (from, is_planned) {
            let (from, copied) = (Arc::new(from), Arc::clone(&one.after));
            self.waits.add(Wait { from, copied, is_planned });
        }
        if one.is_shared {
            // defence: streams that use a source
            self.seen.record_all(one.memory.bind(py), self.gpu)?;
        }
        Ok(Ok(true))
    }

    /// Lets memory go now, or once no graph is captured any more.
    pub fn let_go(&self, py: Python<'_>, one: Departure) {
        // The interpreter drops graphs also while an exception is on its way.
        let under_way = PyErr::take(py);
        match self.order(py, &one, None) {
            Ok(Ok(true)) => drop(one),
            Ok(Ok(false)) => self.held().push(one),
            // The copy may use the memory for ever.
            Ok(Err(_)) | Err(_) => std::mem::forget(one.memory),
        }
        if let Some(error) = under_way {
            error.restore(py);
        }
    }

    /// Lets go of what a capture held back, if it has ended.
    pub fn let_held_go(&self, py: Python<'_>) {
        let held = std::mem::take(&mut *self.held());
        for one in held {
            self.let_go(py, one);
        }
    }
}

impl Drop for GpuWay {
    fn drop(&mut self) {
        let held = std::mem::take(&mut *self.held());
        // With nobody left who asks whether the capture has ended, it stays where it is.
        for one in held {
            std::mem::forget(one.memory);
        }
    }
}
