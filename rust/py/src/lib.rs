//! The Python boundary. The store gets addresses and lengths; the hooks get tensors, and ask them
//! by the names of Python. Nothing is linked against torch, so one wheel serves every torch.
//!
//! Signatures and docstrings stand in `python/ssdtrain/_core.pyi`.

mod account;
mod error;
mod hook_pair;
mod kept;
mod owner;
mod probe;
mod rules;
mod simulated;
mod store;

use pyo3::prelude::*;

/// The compiled part of `ssdtrain`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::account::{Account, Holding};
    #[pymodule_export]
    use super::hook_pair::HookPair;
    #[pymodule_export]
    use super::kept::Kept;
    #[pymodule_export]
    use super::probe::Probe;
    #[pymodule_export]
    use super::rules::Rules;
    #[pymodule_export]
    use super::simulated::SimulatedDisk;
    #[pymodule_export]
    use super::store::{Overwrite, Pending, PendingInto, Slot, Store, Stored};
}
