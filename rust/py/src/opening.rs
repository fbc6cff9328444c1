//! The copies from a GPU that begin together when a gate opens.

use pyo3::prelude::*;
use ssdtrain_core::gate::Waiting;

use crate::gate::RecordReference;
use crate::gpu::Gpus;
use crate::staged::GpuBytes;
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
    pub fn opens_for_bytes(&self) -> u64 {
        let leave_gpus = self.gpus().is_some_and(Gpus::are_in_use);
        if leave_gpus { GPU_BATCH_FACTOR * self.batch_bytes } else { self.batch_bytes }
    }

    /// Begins the copies of a gate's records before `sequence` from their GPU, together for those of
    /// the first record's stream. After that the write of each begins as all others do, which also
    /// tells why a copy did not begin.
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
        let saved = GpuBytes::save_all(&way, stream, group, py)?;
        let mut left = records.iter().zip(saved);
        left.try_for_each(|((record, address), bytes)| record.get().take_left(py, bytes, *address))
    }
}
