//! Engines move bytes; one trait, one conformance suite (`tests/rust/store.rs`).
//!
//! [`open`] walks the ladder: `io_uring`, or where the kernel forbids it (containers often do) a
//! pool of threads. What was given up is said once, with its reason.

pub mod batch;
pub mod contract;
pub mod progress;
pub mod psync;
pub mod simulated;
pub mod uring;

use std::sync::Arc;

use crate::config::{Backend, Tuning};
use crate::disk::statistics::Meter;
use crate::engine::contract::{IoEngine, Setup};
use crate::error::Result;
use crate::queue::SubmitQueue;

/// More entries than this a ring need not have, and the kernel would refuse eight times as many.
const DEPTH_MAX: u32 = 4096;
/// A single system call moves less than 2 GiB.
const PIECE_BYTES_MAX: usize = 1 << 30;

/// Starts the engine that `backend` asks for on `queue`; the second value says what was given up.
pub fn open(
    backend: &Backend,
    tuning: Tuning,
    alignment: usize,
    queue: &Arc<SubmitQueue>,
    meter: &Arc<Meter>,
) -> Result<(Box<dyn IoEngine>, Option<String>)> {
    let setup = Setup {
        queue: Arc::clone(queue),
        meter: Arc::clone(meter),
        alignment,
        depth: tuning.queue_depth.clamp(1, DEPTH_MAX),
        piece_len: tuning
            .piece_bytes
            .min(PIECE_BYTES_MAX)
            .next_multiple_of(alignment)
            .max(alignment),
    };
    match backend {
        Backend::IoUring => match uring::Uring::start(setup) {
            Ok(engine) => Ok((Box::new(engine), None)),
            Err(error) => Err(error.with_note("; use backend='auto' or 'psync'")),
        },
        Backend::Psync => Ok((Box::new(psync::Psync::start(setup, psync::Kernel)?), None)),
        Backend::Simulated(faults) => {
            let disk = simulated::SimulatedDisk::new(faults.clone());
            Ok((Box::new(psync::Psync::start(setup, disk)?), None))
        }
        Backend::Auto => match uring::Uring::start(setup.clone()) {
            Ok(engine) => Ok((Box::new(engine), None)),
            Err(error) => {
                let note = format!("using pread/pwrite threads instead of io_uring: {error}");
                Ok((Box::new(psync::Psync::start(setup, psync::Kernel)?), Some(note)))
            }
        },
    }
}
