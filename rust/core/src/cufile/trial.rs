//! Tries GPUDirect Storage: writes bytes to a file in a directory and reads them back.
//!
//! [Note: in a child] Some versions of the library never return from `cuFileDriverOpen` if
//! `/proc/modules` is missing, and end the process if CUDA fails. So a child process that can be
//! ended tries first, with compatibility mode off. Its result holds for the parent.
#![expect(unsafe_code, reason = "names memory of a GPU")]

use std::path::Path;
use std::sync::Arc;

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{DeviceRange, Stream};
use crate::cufile::file::Registered;
use crate::cufile::library::{Facts, Library};
use crate::direction::Direction;
use crate::disk::spill_file::{Quota, SpillFile};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::{PinnedPool, PinnedSlot};

const LEN: usize = 1 << 20;

/// Opens the library, registers memory of a GPU and a file, and writes and reads 1 MiB.
///
/// Without `allows_compat` a success shows that bytes go directly. See [Note: in a child].
pub fn run(library: Option<&Path>, dir: &Path, gpu: usize, allows_compat: bool) -> Result<Facts> {
    let library = Library::find(library)?;
    let gpu = Gpu::get(gpu)?;
    library.open_driver(allows_compat)?;
    let facts = library.facts()?;
    if facts.allows_compat && !allows_compat {
        let message = "the compatibility mode of libcufile cannot be switched off";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let (file, registered) =
        SpillFile::open_named(dir, &Quota::new(None), |file| Registered::new(library, file))?;
    let extent = file.reserve(LEN as u64)?;
    extent.prepare()?;
    let (ring, host) = (PinnedPool::on_gpu(&gpu, library, 2 * LEN)?, PinnedPool::new(&gpu, LEN)?);
    let (from, to, host) = (slot(&ring)?, slot(&ring)?, slot(&host)?);
    let (written, stream): (Vec<u8>, _) = ((0..LEN).map(pattern).collect(), Stream::new(&gpu)?);
    host.target(LEN).copy_in(0, &written);
    stream.copy_up(&host, range(&from))?;
    stream.synchronize()?;
    move_whole(&registered, Direction::Write, &from, extent.offset())?;
    host.target(LEN).copy_in(0, &vec![0; LEN]);
    stream.copy_up(&host, range(&to))?;
    stream.synchronize()?;
    move_whole(&registered, Direction::Read, &to, extent.offset())?;
    stream.copy_down(range(&to), &host)?;
    stream.synchronize()?;
    let mut read = vec![0; LEN];
    host.source(LEN).copy_out(0, &mut read);
    if read != written {
        let message = "other bytes came back from the drive than were written";
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    Ok(facts)
}

/// A byte that differs from its neighbours and from the same byte of other pages.
fn pattern(index: usize) -> u8 {
    (index ^ (index >> 12)) as u8
}

fn slot(pool: &Arc<PinnedPool>) -> Result<Arc<PinnedSlot>> {
    let full = || Error::new(ErrorKind::Config, "a pool of two slots has no room for them");
    pool.slot(LEN).map(Arc::new).ok_or_else(full)
}

fn range(slot: &PinnedSlot) -> DeviceRange {
    let address = slot.gpu_address().expect("it was cut from a ring");
    // SAFETY: the slot, which is held until its copies have been waited for, is of this GPU.
    unsafe { DeviceRange::new(address, LEN) }
}

fn move_whole(file: &Registered, way: Direction, slot: &PinnedSlot, offset: u64) -> Result<()> {
    let address = slot.gpu_address().expect("it was cut from a ring");
    let moved = file
        .transfer(way, address, LEN, offset)
        .map_err(|error| Error::from_io("GPUDirect Storage moves no bytes", &error))?;
    if moved != LEN {
        let message = format!("GPUDirect Storage moved {moved} of {LEN} bytes");
        return Err(Error::new(ErrorKind::Io, message));
    }
    Ok(())
}
