//! What is stored: which bytes a tensor has on the disk, and how others take their place.
//!
//! An overwrite never touches the extents of the bytes that are there. It goes to new ones, and the
//! worker that ends its last part puts the new *version* in the place of the old, at once and
//! whole:
//!
//! ```text
//! Stored ──► Current ──► Version (extents A)      what a read takes, with its hold on the extents
//!                   ╲
//!    Replacement ────► Version (extents B)        takes the place of A when all of B is written
//! ```
//!
//! A read takes one version and holds its extents, so it gives the old bytes or the new ones, never
//! some of each; and the old extents are free when the last read of them has ended.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::disk::spill_file::Extent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::round_to_page;
use crate::queue::OnSuccess;
use crate::transfer::Transfer;

/// All bytes of a tensor as they were written at once.
#[derive(Debug)]
pub struct Version {
    /// Where the parts lie, in the order of the tensor: device and extent.
    pub extents: Vec<(usize, Arc<Extent>)>,
    /// Where the caller's first byte lies in the first extent, which begins on an aligned address.
    pub head: usize,
}

impl Version {
    /// Bytes on the disk: those of the tensor and of the blocks around it.
    pub fn len(&self) -> usize {
        self.extents.iter().map(|(_, extent)| extent.len() as usize).sum()
    }

    /// Never: a tensor without bytes is refused.
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

/// The version that reads take. Who holds the lock does nothing but look or exchange; a forked
/// process, in which it may be held for ever, does not come here.
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

    /// Is the write done? Overwrites have tickets of their own.
    pub fn ticket(&self) -> &Transfer {
        &self.transfer
    }

    /// The caller's bytes, without the widening.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a tensor without bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that a read into a slot takes: those of the blocks on the disk, in pages.
    pub fn slot_bytes(&self) -> usize {
        round_to_page(self.current.lock().version.len())
    }

    /// Cancels the write: `true` if it had not begun, so that its source is free now. If it had,
    /// pieces that were not sent yet never are, and the ticket tells when the last has ended.
    pub fn cancel(&self) -> bool {
        self.transfer.cancel()
    }

    /// The version that is there, once its write has ended well.
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

    /// Begins to replace the version that is there; one overwrite at a time.
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

/// The right to replace a version; while it lives, nobody else has it.
pub(crate) struct Replacement {
    current: Weak<Current>,
    /// Shared with the overwrite: whoever dropped that has no way to learn when it ends.
    is_wanted: Arc<AtomicBool>,
}

impl Replacement {
    /// What the overwrite takes back when it is dropped.
    pub(crate) fn is_wanted(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_wanted)
    }

    /// What each of `part_count` parts does when it is written. The last one makes `version` the
    /// one that reads take, and gives the old one up. If any part fails, or its job is dropped,
    /// that never happens.
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
        // Released meanwhile: then nobody wants the new version either.
        let Some(current) = self.current.upgrade() else { return };
        let mut state = current.lock();
        let is_wanted = self.is_wanted.load(Ordering::SeqCst);
        let rest = if is_wanted { std::mem::replace(&mut state.version, version) } else { version };
        drop(state);
        // Not under the lock: the last holder gives extents back.
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

/// An overwrite on its way. Until it has ended well, and if it never does, the old bytes are there.
/// Dropping it leaves the old bytes there, also where the new ones are under way.
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

    /// Have the new bytes replaced the old ones? An error says why the old ones are still there.
    pub fn ticket(&self) -> &Transfer {
        &self.transfer
    }

    /// Cancels: `true` if it had not begun, so that its source is free now. If it had, the ticket
    /// tells when it has ended, and how.
    pub fn cancel(&self) -> bool {
        self.transfer.cancel()
    }
}

impl Drop for Overwrite {
    fn drop(&mut self) {
        self.is_wanted.store(false, Ordering::SeqCst);
    }
}
