//! The Python boundary. The store gets addresses and lengths; the hooks get tensors, and call their
//! methods by name. Nothing is linked against torch, so one wheel serves every torch.
//!
//! Signatures and docstrings stand in `python/ssdtrain/_core.pyi`.

mod account;
mod ahead;
mod books;
mod by_plan;
mod checksum;
mod cufile;
mod departure;
mod error;
mod gate;
mod geometry;
mod gpu;
mod gpu_calls;
mod gpu_clock;
mod gpu_waits;
mod guides;
mod held;
mod hidden;
mod hook_pair;
mod kept;
mod leaving;
mod masters;
mod offloading;
mod opening;
mod owner;
mod partners;
mod passing;
mod plan;
mod planning;
mod probe;
mod record;
mod remaking;
mod reserve;
mod room;
mod round;
mod rounds;
mod rules;
mod saved_tensor;
mod session_lock;
mod simulated;
mod skim;
mod staged;
mod store;
mod tally;
mod timeline;
mod torch;
mod transfer;
mod writeback;
mod writing;

use pyo3::prelude::*;

/// The compiled part of `ssdtrain`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::account::{Account, Holding, Reservation};
    #[pymodule_export]
    use super::checksum::checksum;
    #[pymodule_export]
    use super::cufile::try_cufile;
    #[pymodule_export]
    use super::geometry::Geometry;
    #[pymodule_export]
    use super::gpu::Gpus;
    #[pymodule_export]
    use super::hidden::hidden;
    #[pymodule_export]
    use super::hook_pair::HookPair;
    #[pymodule_export]
    use super::kept::Kept;
    #[pymodule_export]
    use super::leaving::Leaving;
    #[pymodule_export]
    use super::masters::MasterCode;
    #[pymodule_export]
    use super::offloading::Offloading;
    #[pymodule_export]
    use super::plan::{PlanMachine, Planner, StepPlan};
    #[pymodule_export]
    use super::probe::Probe;
    #[pymodule_export]
    use super::record::Record;
    #[pymodule_export]
    use super::round::{Learned, Round};
    #[pymodule_export]
    use super::rounds::Rounds;
    #[pymodule_export]
    use super::rules::Rules;
    #[pymodule_export]
    use super::saved_tensor::SavedTensor;
    #[pymodule_export]
    use super::session_lock::run_if_free;
    #[pymodule_export]
    use super::simulated::SimulatedDisk;
    #[pymodule_export]
    use super::store::{Overwrite, Pending, PendingInto, Slot, Store, Stored};
    #[pymodule_export]
    use super::tally::Tally;
    #[pymodule_export]
    use super::timeline::Timeline;
    #[pymodule_export]
    use super::torch::Torch;
    #[pymodule_export]
    use super::transfer::{Handle, Loading};
    #[pymodule_export]
    use super::writeback::Records;
}
