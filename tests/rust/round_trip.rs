//! Down into a store and up again: what tests of whole stores share.

use std::sync::Arc;

use ssdtrain_core::{Result, Stored, TensorStore};

use crate::memory::{Memory, lend};

/// A scratch directory on the file system of the build: direct I/O works there or is given up.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the build directory is writable")
}

/// As the heap places tensors: not at the start of a block.
pub fn pattern(seed: u64, len: usize) -> Arc<Memory> {
    Memory::new(seed, len, 64)
}

pub fn write(store: &TensorStore, bytes: &Arc<Memory>) -> Result<Stored> {
    store.write(lend(bytes, 0))
}

pub fn read_back(store: &TensorStore, stored: &Stored) -> Result<Vec<u8>> {
    stored.ticket().wait()?;
    let pending = store.read(stored)?;
    pending.ticket().wait()?;
    Ok(pending.restored()?.to_vec())
}
