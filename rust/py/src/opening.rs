//! The copies from a GPU that begin together when a gate opens.

use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core::gate::Waiting;

use crate::gate::RecordReference;
use crate::gpu::Gpus;
use crate::gpu_calls::GpuStream;
use crate::record::Record;
use crate::staged::{GpuBytes, Leaving};
use crate::transfer::Handle;
use crate::writeback::Records;
use crate::writing::upgraded;

/// Copies from a GPU begin in larger batches than writes: half of the calls of its driver are made
/// once for all tensors that an opened gate lets out.
const GPU_BATCH_FACTOR: u64 = 4;

impl Records {
    /// True if writes are under way, or records wait at a gate.
    pub fn has_leaving(&self) -> bool {
        self.has_writes() || self.has_waiting_gate()
    }

    /// The bytes for which a gate opens.
    pub fn opens_for_bytes(&self, py: Python<'_>) -> u64 {
        if self.account().soft_room_bytes(self.transfer_bytes(py)) == 0 {
            return 0; // The tensors have to leave at once.
        }
        let leave_gpus = self.gpus().is_some_and(Gpus::are_in_use);
        if leave_gpus { GPU_BATCH_FACTOR * self.batch_bytes } else { self.batch_bytes }
    }

    /// Begins the copies of a gate's records before `sequence` from their GPU, together for those
    /// of the first record's stream. After that the write of each begins as all others do, which
    /// also tells why a copy did not begin.
    pub fn begin_copies(
        &self,
        py: Python<'_>,
        taken: &[Waiting<RecordReference>],
        sequence: Option<i64>,
    ) -> PyResult<()> {
        // Under a bound each waits for its own room.
        let Some(gpus) = self.gpus().filter(|_| !self.is_bounded()) else { return Ok(()) };
        let (mut records, mut group, mut common) = (Vec::new(), Vec::new(), None);
        for waiting_record in taken {
            let Some(record) = upgraded(py, &waiting_record.item)? else { continue };
            if sequence.is_some_and(|passed| record.get().sequence() >= passed) {
                continue;
            }
            let Some((stream, leaving)) = record.get().leaving(py)? else { continue };
            if *common.get_or_insert(stream) == stream {
                records.push((record, leaving.address));
                group.push(leaving);
            }
        }
        let Some(stream) = common else { return Ok(()) };
        let Ok(way) = gpus.way(py, stream.gpu)? else { return Ok(()) };
        let saved = GpuBytes::save_all(&way, stream, group, py);
        let mut left = records.iter().zip(saved);
        left.try_for_each(|((record, address), bytes)| record.get().take_left(py, bytes, *address))
    }
}

impl Record {
    /// Its stream, and what leaves with others of that, if it is on a GPU and all of it is there;
    /// `None` as well if its write has begun.
    fn leaving<'py>(&self, py: Python<'py>) -> PyResult<Option<(GpuStream, Leaving<'py>)>> {
        let (Some(stream), Some(source), false) = (self.stream, self.source(py), self.has_handle())
        else {
            return Ok(None);
        };
        let storage = source.call_method0(intern!(py, "untyped_storage"))?;
        if !self.is_whole(&storage)? {
            return Ok(None);
        }
        let memory: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let (address, nbytes) = (memory + self.start as usize, self.nbytes);
        let by_plan = self.by_plan.get().copied().unwrap_or_default();
        Ok(Some((stream, Leaving { source, address, nbytes, by_plan })))
    }

    /// Takes the handle of a copy from its GPU that has begun, unless another thread has begun one
    /// as well.
    fn take_left(&self, py: Python<'_>, bytes: GpuBytes, address: usize) -> PyResult<()> {
        let handle = Handle::of_gpu(py, bytes, address, self.start)?;
        if !self.has_handle() {
            self.set_handle(Some(handle));
        }
        Ok(())
    }
}
