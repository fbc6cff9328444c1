//! One unnamed file per directory: opened, checked, grown, and shared out as extents.
//!
//! The file never has a name that survives: the kernel frees its blocks when the process is gone,
//! also after `kill -9`. Only its owner may read it (mode 0600), because widening a tensor to the
//! alignment of direct I/O writes up to one block of neighbouring heap bytes on either side.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::config::DirectIo;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::ExtentAllocator;

/// The file grows by at least this much, so that growing stays off the hot path.
const GROWTH_BYTES_MIN: u64 = 64 << 20;
const GROWTH_BYTES_MAX: u64 = 1 << 30;
/// A directory with less free space than this is refused at the start.
const FREE_BYTES_MIN: u64 = 64 << 20;
/// Without an answer of `statx` every known device takes this alignment.
const ALIGNMENT_DEFAULT: usize = 4096;

/// A bound on booked bytes that several files share.
#[derive(Debug)]
pub struct Quota {
    limit: Option<u64>,
    used: AtomicU64,
}

impl Quota {
    /// A bound of `limit` bytes, or none.
    pub fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    /// Bytes booked.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let fits = |used: u64| {
            used.checked_add(bytes).filter(|&total| self.limit.is_none_or(|limit| total <= limit))
        };
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The file behind one directory.
#[derive(Debug)]
pub struct SpillFile {
    file: File,
    dir: PathBuf,
    alignment: usize,
    direct: bool,
    quota: Arc<Quota>,
    space: Mutex<Space>,
    /// Bytes of the file that have blocks on the disk. Its lock is held while the file grows, which
    /// may take as long as the disk likes; so only workers take it.
    blocks: Mutex<u64>,
    process: u32,
}

#[derive(Debug)]
struct Space {
    extents: ExtentAllocator,
    /// Bytes of the file that are booked with the quota.
    booked: u64,
}

/// A range of the file; it goes back when the last holder drops it.
#[derive(Debug)]
pub struct Extent {
    file: Arc<SpillFile>,
    offset: u64,
    len: u64,
}

impl SpillFile {
    /// Opens an unnamed file in `dir`; the second value says what was given up, if anything.
    pub fn open(
        dir: &Path,
        direct: DirectIo,
        quota: &Arc<Quota>,
    ) -> Result<(Arc<Self>, Option<String>)> {
        check_directory(dir)?;
        let (file, is_direct, note) = match direct {
            DirectIo::Disabled => (create_unnamed(dir, OFlags::empty())?, false, None),
            DirectIo::Required => (create_direct(dir)?, true, None),
            DirectIo::Optional => match create_direct(dir) {
                Ok(file) => (file, true, None),
                Err(error) => {
                    let note = format!("buffered I/O in {}: {error}", dir.display());
                    (create_unnamed(dir, OFlags::empty())?, false, Some(note))
                }
            },
        };
        let alignment = if is_direct { direct_alignment(&file) } else { 512 };
        if alignment > rustix::param::page_size() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} needs direct I/O aligned to {alignment} bytes, more than a page; use \
                     another directory, or direct_io='disabled'",
                    dir.display()
                ),
            ));
        }
        let extents =
            ExtentAllocator::new(alignment as u64, i64::MAX as u64 & !(alignment as u64 - 1));
        let (space, blocks) = (Mutex::new(Space { extents, booked: 0 }), Mutex::new(0));
        let process = std::process::id();
        let (dir, quota, file) = (dir.to_owned(), Arc::clone(quota), File::from(file));
        Ok((
            Arc::new(Self {
                file,
                dir,
                alignment,
                direct: is_direct,
                quota,
                space,
                blocks,
                process,
            }),
            note,
        ))
    }

    /// The directory this file stands in.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Addresses, offsets and lengths of I/O are multiples of this many bytes.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// The descriptor, for the engines.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Bytes handed out as extents.
    pub fn used(&self) -> u64 {
        self.lock().extents.used()
    }

    /// Books `len` bytes; the disk is not touched, see [`Extent::prepare`].
    pub fn reserve(self: &Arc<Self>, len: u64) -> Result<Extent> {
        let mut space = self.lock();
        let offset = space.extents.allocate(len).ok_or_else(|| {
            let dir = self.dir.display();
            Error::new(ErrorKind::NoSpace, format!("{len} bytes do not fit in a file in {dir}"))
        })?;
        if let Err(error) = self.book(&mut space) {
            space.extents.free(offset, len);
            space.extents.shrink();
            return Err(error);
        }
        Ok(Extent { file: Arc::clone(self), offset, len })
    }

    /// Gives all blocks back to the disk; nothing may be in flight, and nothing is readable after.
    pub fn discard(&self) -> Result<()> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        *blocks = 0;
        rustix::fs::ftruncate(&self.file, 0).map_err(|errno| {
            let dir = self.dir.display();
            Error::from_io(format_args!("cannot give space back in {dir}"), &errno.into())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Books up to the end of the extents with the quota, and some more if it allows.
    fn book(&self, space: &mut Space) -> Result<()> {
        let end = space.extents.end();
        let Some(need) = end.checked_sub(space.booked).filter(|&need| need > 0) else {
            return Ok(());
        };
        let ahead = (space.booked / 2).clamp(GROWTH_BYTES_MIN, GROWTH_BYTES_MAX);
        for bytes in [need.max(ahead), need] {
            if self.quota.take(bytes) {
                space.booked += bytes;
                return Ok(());
            }
        }
        let dir = self.dir.display();
        let message = format!("{need} more bytes in {dir} would pass max_disk_bytes; raise it");
        Err(Error::new(ErrorKind::NoSpace, message))
    }

    /// Reserves blocks up to `end`, and as far as is booked if there is room.
    fn ensure_blocks(&self, end: u64) -> Result<()> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if end <= *blocks {
            return Ok(());
        }
        let booked = self.lock().booked;
        if self.allocate_blocks(*blocks, booked.max(end) - *blocks).is_ok() {
            *blocks = booked.max(end);
            return Ok(());
        }
        // No room for all that is booked, but perhaps for what is needed now.
        self.allocate_blocks(*blocks, end - *blocks).map_err(|errno| {
            let (need, dir) = (end - *blocks, self.dir.display());
            let what = format!("cannot reserve {need} bytes in {dir}; free some space there");
            Error::from_io(what, &errno.into())
        })?;
        *blocks = end;
        Ok(())
    }

    fn allocate_blocks(&self, offset: u64, bytes: u64) -> rustix::io::Result<()> {
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, bytes) {
                Err(Errno::INTR) => {}
                // No reservation on this file system: the writes themselves will find the room.
                Err(Errno::OPNOTSUPP) => return rustix::fs::ftruncate(&self.file, offset + bytes),
                other => return other,
            }
        }
    }
}

impl AsFd for SpillFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        let space = self.space.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.quota.give_back(space.booked);
    }
}

impl Extent {
    /// The file this range lies in.
    pub fn file(&self) -> &Arc<SpillFile> {
        &self.file
    }

    /// First byte in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sees to it that the range has blocks on the disk. For workers: it may wait for the disk.
    pub fn prepare(&self) -> Result<()> {
        self.file.ensure_blocks(self.offset + self.len)
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // In a forked process the lock may be held by a thread that is not there, and the
        // bookkeeping of the parent is not ours to change.
        if self.file.process == std::process::id() {
            self.file.lock().extents.free(self.offset, self.len);
        }
    }
}

fn check_directory(dir: &Path) -> Result<()> {
    let shown = dir.display();
    let config = |message: String| Err(Error::new(ErrorKind::Config, message));
    match std::fs::metadata(dir) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => {
            return config(format!("{shown} does not exist; create it, or pass another directory"));
        }
        Err(source) => {
            return config(format!(
                "cannot look at {shown}: {source}; make it reachable, or pass another directory"
            ));
        }
        Ok(found) if !found.is_dir() => {
            return config(format!("{shown} is not a directory; pass the directory it stands in"));
        }
        Ok(_) => {}
    }
    let facts = rustix::fs::statfs(dir)
        .map_err(|errno| Error::from_io(format_args!("cannot look at {shown}"), &errno.into()))?;
    if let Some((name, reason)) = refused_file_system(facts.f_type as u64) {
        return config(format!(
            "{shown} is on {name}, {reason}; use a directory on a local NVMe file system"
        ));
    }
    let free = facts.f_bavail.saturating_mul(facts.f_bsize as u64);
    if free < FREE_BYTES_MIN {
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "{shown} has {free} bytes free, {FREE_BYTES_MIN} are the least; free some space"
            ),
        ));
    }
    Ok(())
}

/// File systems on which an offload cannot help, by the magic numbers of `statfs(2)`.
fn refused_file_system(magic: u64) -> Option<(&'static str, &'static str)> {
    const MEMORY: &str = "which is memory itself, so nothing would be saved";
    const NETWORK: &str = "which is reached over a network";
    Some(match magic as u32 {
        0x0102_1994 => ("tmpfs", MEMORY),
        0x8584_58f6 => ("ramfs", MEMORY),
        0x6969 => ("NFS", NETWORK),
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => ("SMB", NETWORK),
        0x0102_1997 => ("9P", NETWORK),
        0x00c3_6400 => ("Ceph", NETWORK),
        0x5346_414f | 0x6b41_4653 => ("AFS", NETWORK),
        0x0bd0_0bd0 => ("Lustre", NETWORK),
        0x6573_5546 => ("FUSE", "which may be a network and cannot promise direct I/O"),
        _ => return None,
    })
}

fn create_direct(dir: &Path) -> Result<OwnedFd> {
    let file = create_unnamed(dir, OFlags::DIRECT)?;
    probe_direct(&file).map_err(|errno| {
        Error::from_io(
            format_args!(
                "direct I/O (O_DIRECT) does not work in {}; use a local file system such as ext4 \
                 or XFS, or direct_io='optional'",
                dir.display()
            ),
            &errno.into(),
        )
    })?;
    Ok(file)
}

/// Writes nothing, but lets the file system say whether it takes an aligned direct request: some
/// accept the flag at open and refuse every request.
fn probe_direct(file: &OwnedFd) -> rustix::io::Result<()> {
    #[repr(align(4096))]
    struct Block([u8; 4096]);
    let mut block = Block([0; 4096]);
    rustix::io::pread(file, &mut block.0, 0).map(drop)
}

/// An unnamed file: `O_TMPFILE`, or where the file system lacks it, created and unlinked.
fn create_unnamed(dir: &Path, extra: OFlags) -> Result<OwnedFd> {
    let base = OFlags::RDWR | OFlags::CLOEXEC | extra;
    let mode = Mode::RUSR | Mode::WUSR;
    let refused = |errno: Errno| {
        let shown = dir.display();
        let next = match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Error::new(
                ErrorKind::Config,
                format!(
                    "cannot create a file in {shown}: {}; make it writable, or pass \
                     another directory",
                    io::Error::from(errno)
                ),
            ),
            Errno::INVAL if extra.contains(OFlags::DIRECT) => Error::new(
                ErrorKind::Config,
                format!(
                    "{shown} refuses direct I/O (O_DIRECT); use a local file system such as ext4 \
                     or XFS, or direct_io='optional'"
                ),
            ),
            _ => Error::from_io(format_args!("cannot create a file in {shown}"), &errno.into()),
        };
        Err(next)
    };
    match rustix::fs::open(dir, base | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(file),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
        Err(errno) => return refused(errno),
    }
    for attempt in 0..100u32 {
        let path = dir.join(format!(".ssdtrain-{}-{attempt}", std::process::id()));
        match rustix::fs::open(&path, base | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode)
        {
            Ok(file) => {
                return match rustix::fs::unlink(&path) {
                    Ok(()) => Ok(file),
                    Err(errno) => refused(errno),
                };
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return refused(errno),
        }
    }
    refused(Errno::EXIST)
}

/// What `statx(STATX_DIOALIGN)` (Linux 6.1) answers, or a safe guess.
fn direct_alignment(file: &OwnedFd) -> usize {
    const STATX_DIOALIGN: u32 = 0x2000;
    let wanted = StatxFlags::from_bits_retain(STATX_DIOALIGN);
    match rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, wanted) {
        Ok(facts) if facts.stx_mask & STATX_DIOALIGN != 0 && facts.stx_dio_offset_align > 0 => {
            // One number for both keeps the widening of addresses and of lengths the same.
            facts.stx_dio_mem_align.max(facts.stx_dio_offset_align).max(512) as usize
        }
        _ => ALIGNMENT_DEFAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::{Quota, SpillFile, refused_file_system};
    use crate::config::DirectIo;
    use crate::error::ErrorKind;
    use std::sync::Arc;

    fn open(dir: &std::path::Path, quota: &Arc<Quota>) -> Arc<SpillFile> {
        SpillFile::open(dir, DirectIo::Optional, quota).unwrap().0
    }

    #[test]
    fn a_file_has_no_name_and_gives_its_space_back() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let quota = Quota::new(None);
        let file = open(dir.path(), &quota);
        let extent = file.reserve(10_000).unwrap();
        assert!(extent.len() >= 10_000);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(quota.used() >= 10_000);
        extent.prepare().unwrap();
        assert!(rustix::fs::fstat(&file).unwrap().st_blocks * 512 >= 10_000);
        drop(extent);
        assert_eq!(file.used(), 0);
        drop(file);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn the_quota_bounds_what_is_reserved() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let file = open(dir.path(), &Quota::new(Some(1 << 20)));
        let first = file.reserve(1 << 19).unwrap();
        assert_eq!(file.reserve(1 << 20).unwrap_err().kind(), ErrorKind::NoSpace);
        drop(first);
        file.reserve(1 << 20).unwrap();
    }

    #[test]
    fn a_bad_place_is_named() {
        let quota = Quota::new(None);
        let missing = SpillFile::open("/no/such/place".as_ref(), DirectIo::Required, &quota);
        let error = missing.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("/no/such/place"), "{error}");
        let memory = SpillFile::open("/dev/shm".as_ref(), DirectIo::Optional, &quota);
        if refused_file_system(rustix::fs::statfs("/dev/shm").unwrap().f_type as u64).is_some() {
            assert!(memory.unwrap_err().to_string().contains("tmpfs"));
        }
    }
}
