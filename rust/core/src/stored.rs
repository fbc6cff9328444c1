//! The bytes of a tensor on the disk, and the way in which new bytes replace them.
//!
//! An overwrite never touches the extents of the current bytes. It writes to new extents. The
//! worker that ends the last part puts the new *version* in the place of the old version, in one
//! step:
//!
//! ```text
//! Stored ──► Current ──► Version (extents A)      a read takes it, and holds its extents
//!                   ╲
//!    Replacement ────► Version (extents B)        takes the place of A when all of B is written
//! ```
//!
//! A read takes one version and holds its extents. It gives the old bytes or the new bytes, never
//! some of each. The old extents are free when the last read of them has ended.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::disk::spill_file::Extent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::round_to_page;
use crate::queue::OnSuccess;
use crate::transfer::Transfer;

/// All bytes of a tensor that one write brought to the disk.
#[derive(Debug)]
pub struct Version {
    /// The parts, in the order of the tensor: device and extent.
    pub extents: Vec<(usize, Arc<Extent>)>,
    /// Offset of the caller's first byte in the first extent, which begins on an aligned address.
    pub head: usize,
}

impl Version {
    /// Bytes on the disk: those of the tensor and of the blocks around it.
    pub fn len(&self) -> usize {
        self.extents.iter().map(|(_, extent)| extent.len() as usize).sum()
    }

    /// Always false: a tensor without bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }
}

/// Bytes on their way to the disk, or there. Dropping it gives the space back.
pub struct Stored {
    transfer: Transfer,
    current: Arc<Current>,
    len: usize,
}

/// The version that reads take. A thread that holds the lock only looks or exchanges. A forked
/// process, in which the lock may be held for ever, never takes it.
struct Current {
    state: Mutex<State>,
    process: u32,
}

struct State {
    version: Arc<Version>,
    is_overwriting: bool,
}

impl Current {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stored {
    /// `len` bytes of a caller that `transfer` brings to the disk as `version`.
    pub(crate) fn new(transfer: Transfer, version: Version, len: usize) -> Self {
        let state = Mutex::new(State { version: Arc::new(version), is_overwriting: false });
        Self { transfer, current: Arc::new(Current { state, process: std::process::id() }), len }
    }

    /// The answer of the first write. Overwrites have tickets of their own.
    pub fn ticket(&self) -> &Transfer {
        &self.transfer
    }

    /// Number of the caller's bytes, without the widening.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a tensor without bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that a read into a slot takes: those of the blocks on the disk, in pages.
    pub fn slot_bytes(&self) -> usize {
        round_to_page(self.current.lock().version.len())
    }

    /// Cancels the write. Returns true if it had not begun, so that its source is free now. If it
    /// had begun, its remaining pieces are not sent, and the ticket is answered after the last
    /// piece has ended.
    pub fn cancel(&self) -> bool {
        self.transfer.cancel()
    }

    /// The current version, once its write has succeeded.
    pub(crate) fn version(&self) -> Result<Arc<Version>> {
        match self.transfer.answer() {
            Some(Ok(())) => Ok(Arc::clone(&self.current.lock().version)),
            Some(Err(error)) => Err(error),
            None => Err(Error::new(
                ErrorKind::Config,
                "the write of this tensor has not ended; wait for it first",
            )),
        }
    }

    /// Begins to replace the current version. A tensor has one overwrite at a time.
    pub(crate) fn replace(&self) -> Result<Replacement> {
        let mut state = self.current.lock();
        if state.is_overwriting {
            return Err(Error::new(
                ErrorKind::Busy,
                "an overwrite of this tensor has not ended; wait for it first",
            ));
        }
        state.is_overwriting = true;
        let (current, is_wanted) = (Arc::downgrade(&self.current), Arc::new(AtomicBool::new(true)));
        Ok(Replacement { current, is_wanted })
    }
}

impl fmt::Debug for Stored {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Stored").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The right to replace a version. Only one exists at a time for a tensor.
pub(crate) struct Replacement {
    current: Weak<Current>,
    /// Shared with the overwrite. After the overwrite is dropped nobody can learn when it ends.
    is_wanted: Arc<AtomicBool>,
}

impl Replacement {
    /// The flag that the overwrite clears when it is dropped.
    pub(crate) fn is_wanted(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_wanted)
    }

    /// The action of each of `part_count` parts after it is written. The last part makes `version`
    /// the version that reads take, and gives the old version up. If any part fails, or its job is
    /// dropped, that never happens.
    pub(crate) fn on_success(
        self,
        version: Version,
        part_count: usize,
    ) -> impl Iterator<Item = OnSuccess> {
        let version = Mutex::new(Some(Arc::new(version)));
        let shared = Arc::new((self, version, AtomicUsize::new(part_count)));
        std::iter::repeat_n(shared, part_count).map(|shared| {
            let on_success: OnSuccess = Box::new(move || {
                let (replacement, version, left_count) = &*shared;
                if left_count.fetch_sub(1, Ordering::AcqRel) == 1 {
                    let version = version.lock().unwrap_or_else(PoisonError::into_inner).take();
                    replacement.install(version.expect("there is one last part"));
                }
            });
            on_success
        })
    }

    fn install(&self, version: Arc<Version>) {
        // The tensor was released meanwhile, so nobody wants the new version either.
        let Some(current) = self.current.upgrade() else { return };
        let mut state = current.lock();
        let is_wanted = self.is_wanted.load(Ordering::SeqCst);
        let rest = if is_wanted { std::mem::replace(&mut state.version, version) } else { version };
        drop(state);
        // Dropped without the lock, because the last holder gives extents back.
        drop(rest);
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if let Some(current) = self.current.upgrade()
            && current.process == std::process::id()
        {
            current.lock().is_overwriting = false;
        }
    }
}

/// An overwrite on its way. The old bytes stay until it has succeeded, and for ever if it fails.
/// Dropping it leaves the old bytes there, even if the new bytes are under way.
#[derive(Debug)]
#[must_use = "an overwrite that nobody holds is cancelled"]
pub struct Overwrite {
    transfer: Transfer,
    is_wanted: Arc<AtomicBool>,
}

impl Overwrite {
    pub(crate) fn new(transfer: Transfer, is_wanted: Arc<AtomicBool>) -> Self {
        Self { transfer, is_wanted }
    }

    /// The answer of the overwrite. An error says why the old bytes are still there.
    pub fn ticket(&self) -> &Transfer {
        &self.transfer
    }

    /// Cancels. Returns true if the overwrite had not begun, so that its source is free now. If it
    /// had begun, the ticket tells when it has ended, and how.
    pub fn cancel(&self) -> bool {
        self.transfer.cancel()
    }
}

impl Drop for Overwrite {
    fn drop(&mut self) {
        self.is_wanted.store(false, Ordering::SeqCst);
    }
}
