//! The Python boundary: addresses and lengths cross it, tensors do not, so one wheel serves every
//! torch. Signatures and docstrings stand in `python/ssdtrain/_core.pyi`.

mod error;
mod owner;
mod probe;
mod simulated;
mod store;

use pyo3::prelude::*;

/// The compiled part of `ssdtrain`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::probe::Probe;
    #[pymodule_export]
    use super::simulated::SimulatedDisk;
    #[pymodule_export]
    use super::store::{Overwrite, Pending, PendingInto, Slot, Store, Stored};
}
