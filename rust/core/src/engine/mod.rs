//! Engines move bytes; one trait, one conformance suite (`tests/rust/store.rs`).
//!
//! [`open`] tries `io_uring` first. If the kernel forbids it (containers often do), it starts a
//! pool of threads. The fallback is reported once, with its reason.

pub mod batch;
pub mod contract;
pub mod cufile;
pub mod progress;
pub mod psync;
pub mod simulated;
pub mod uring;
mod write_depth;

use crate::config::Backend;
use crate::engine::contract::{IoEngine, Setup};
use crate::error::Result;

/// Starts the engine that `backend` names. The second value names the fallback that was taken.
pub fn open(backend: &Backend, setup: Setup) -> Result<(Box<dyn IoEngine>, Option<String>)> {
    match backend {
        Backend::IoUring => match uring::Uring::start(setup) {
            Ok(engine) => Ok((Box::new(engine), None)),
            Err(error) => Err(error.with_note("; use backend='auto' or 'psync'")),
        },
        Backend::Psync => Ok((Box::new(psync::Psync::start(setup, psync::Kernel)?), None)),
        Backend::Simulated(faults) => {
            Ok((Box::new(simulated::Simulated::start(setup, faults.clone())?), None))
        }
        Backend::Auto => match uring::Uring::start(setup.clone()) {
            Ok(engine) => Ok((Box::new(engine), None)),
            Err(error) => {
                let fallback = format!("using pread/pwrite threads instead of io_uring: {error}");
                Ok((Box::new(psync::Psync::start(setup, psync::Kernel)?), Some(fallback)))
            }
        },
    }
}
