//! The reserve: records that are written only if room is short.
//!
//! Under `max_device_bytes` it has the tensors that no plan lets leave their GPU. So a step whose
//! plan is wrong, or that has none, still keeps the bound as far as copies can.

use pyo3::prelude::*;

use crate::by_plan::ByPlan;
use crate::gate::ThreadGate;
use crate::gpu::Gpus;
use crate::partners::Writing;
use crate::record::Record;
use crate::writeback::Records;
use crate::writing::upgraded;

/// The bytes of a reserve that are written when room is short: the next wait then finds writes
/// under way, and not much more is written than must be.
const RESERVE_BATCH_BYTES: u64 = 8 << 20;

impl Records {
    /// True if the memory of the GPU is bounded, and a record there has a place to go to.
    pub fn may_spare(&self, record: &Bound<'_, Record>) -> bool {
        let has_place = || self.store().has_directory() || self.gpus().is_some_and(Gpus::may_pin);
        let is_limited = self.account().soft_limit_bytes() < u64::MAX;
        is_limited && record.get().is_on_gpu() && has_place()
    }

    /// Begins the writes of the oldest records of a reserve whose nodes have been passed.
    pub fn write_reserve(
        &self,
        py: Python<'_>,
        gate: &ThreadGate,
        writing: Writing<'_, '_>,
    ) -> PyResult<()> {
        let by_plan = (!self.is_bounded()).then(ByPlan::spare);
        let (passed, reserve) = (gate.passed(), gate.gate().take_reserve());
        let (mut rest, mut nbytes, mut outcome) = (Vec::new(), 0, Ok(()));
        for waiting_record in reserve {
            let Some(record) = upgraded(py, &waiting_record.item)? else { continue };
            if !record.get().has_source() || record.get().has_handle() {
                continue;
            }
            if outcome.is_ok() && nbytes < RESERVE_BATCH_BYTES && record.get().sequence() < passed {
                match self.begin_write(&record, writing, by_plan) {
                    Ok(true) => {
                        nbytes += waiting_record.nbytes;
                        continue;
                    }
                    Ok(false) => {}
                    Err(error) => outcome = Err(error),
                }
            }
            rest.push(waiting_record);
        }
        gate.gate().put_back_reserve(rest);
        outcome
    }
}
