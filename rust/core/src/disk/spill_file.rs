//! One unnamed file per directory: grown, trimmed, and shared out as extents.
//!
//! [Note: blocks] Two locks, taken in this order. `blocks` is the end of the file's blocks on the
//! disk. It is held while that changes, which may take as long as the disk needs; so only workers
//! and `trim` take it. `books` is the bookkeeping and is held for moments. Each piece in flight
//! lies in a live extent, a live extent lies below the end of the allocator, and a write begins
//! only after `ensure_blocks` found its extent below `blocks`. So a thread that holds `blocks` may
//! cut the file at the allocator's end: no piece in flight lies beyond it. An extent reserved there
//! meanwhile waits in `ensure_blocks` for the lock and then sees the lower mark.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::allocator::ExtentAllocator;
use crate::config::DirectIo;
use crate::disk::checksums::Checksums;
use crate::disk::directory::{Opened, SpillDirectory};
use crate::error::{Error, ErrorKind, Result, shown_bytes};

/// Least growth of the file: blocks for 16 writes of the usual piece cost one call.
const GROWTH_BYTES_MIN: u64 = 64 << 20;
/// Largest growth beyond the need, so that the file takes little from others on a nearly full disk.
const GROWTH_BYTES_MAX: u64 = 1 << 30;

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
    is_direct: bool,
    quota: Arc<Quota>,
    books: Mutex<Books>,
    /// Bytes of the file that have blocks on the disk; see [Note: blocks].
    blocks: Mutex<u64>,
    /// A copy of `blocks` for reports, because the lock may be held for long.
    blocks_shown: AtomicU64,
    process: u32,
}

#[derive(Debug)]
struct Books {
    extents: ExtentAllocator,
    /// Bytes of the file that are booked with the quota.
    booked: u64,
}

/// A range of the file. It is freed when the last holder drops it.
#[derive(Debug)]
pub struct Extent {
    file: Arc<SpillFile>,
    offset: u64,
    len: u64,
    /// Checksums, if the store verifies.
    checksums: Option<Checksums>,
}

impl SpillFile {
    /// Opens an unnamed file in `dir`. The second value names the fallback that was taken.
    pub fn open(
        dir: &Path,
        direct: DirectIo,
        quota: &Arc<Quota>,
    ) -> Result<(Arc<Self>, Option<String>)> {
        let mut opened = SpillDirectory::open(dir)?.create(direct)?;
        let fallback = opened.fallback.take();
        Ok((Self::of(opened, dir, quota), fallback))
    }

    /// Opens a file in `dir` that bypasses the page cache; its name goes after `meanwhile` returns.
    pub fn open_named<T>(
        dir: &Path,
        quota: &Arc<Quota>,
        meanwhile: impl FnOnce(BorrowedFd<'_>) -> Result<T>,
    ) -> Result<(Arc<Self>, T)> {
        let directory = SpillDirectory::open(dir)?;
        let (opened, done) = directory.create_named(|file| meanwhile(file.as_fd()))?;
        Ok((Self::of(opened, dir, quota), done))
    }

    fn of(opened: Opened, dir: &Path, quota: &Arc<Quota>) -> Arc<Self> {
        let Opened { file, alignment, is_direct, .. } = opened;
        let extents =
            ExtentAllocator::new(alignment as u64, i64::MAX as u64 & !(alignment as u64 - 1));
        let (books, blocks) = (Mutex::new(Books { extents, booked: 0 }), Mutex::new(0));
        let (blocks_shown, process) = (AtomicU64::new(0), std::process::id());
        let (dir, quota, file) = (dir.to_owned(), Arc::clone(quota), File::from(file));
        Arc::new(Self {
            file,
            dir,
            alignment,
            is_direct,
            quota,
            books,
            blocks,
            blocks_shown,
            process,
        })
    }

    /// The bound that this file shares with other files.
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The directory of this file.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Addresses, offsets and lengths of I/O are multiples of this many bytes.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Returns true if the file bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// The descriptor, for the engines.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Bytes handed out as extents.
    pub fn used(&self) -> u64 {
        self.lock().extents.used()
    }

    /// Bytes of the file that have blocks on the disk; nobody else can use them meanwhile.
    pub fn reserved(&self) -> u64 {
        self.blocks_shown.load(Ordering::Relaxed)
    }

    /// Books `len` bytes. It does not touch the disk; see [`Extent::prepare`].
    pub fn reserve(self: &Arc<Self>, len: u64) -> Result<Extent> {
        let mut books = self.lock();
        let offset = books.extents.allocate(len).ok_or_else(|| {
            let dir = self.dir.display();
            let len = shown_bytes(len);
            Error::new(ErrorKind::NoSpace, format!("{len} do not fit in a file in {dir}"))
        })?;
        if let Err(error) = self.book(&mut books) {
            books.extents.free(offset, len);
            books.extents.shrink();
            return Err(error);
        }
        Ok(Extent { file: Arc::clone(self), offset, len, checksums: None })
    }

    /// Gives all blocks back to the disk. Nothing may be in flight, and nothing is readable
    /// afterwards.
    pub fn discard(&self) -> Result<()> {
        let mut blocks = self.lock_blocks();
        self.set_blocks(&mut blocks, 0);
        self.cut(0)
    }

    /// Gives the blocks beyond the last extent back to the disk; returns their bytes. Live extents
    /// stay, and writes may go on meanwhile; see [Note: blocks].
    pub fn trim(&self) -> Result<u64> {
        let mut blocks = self.lock_blocks();
        let end = self.lock().extents.shrink();
        let surplus = blocks.saturating_sub(end);
        if surplus > 0 {
            self.cut(end)?;
            self.set_blocks(&mut blocks, end);
        }
        // Only now, so that files together never pass the shared quota; and only down to the
        // current end of the extents, which may have moved since.
        let mut books = self.lock();
        let unbooked = books.booked - books.extents.end();
        books.booked -= unbooked;
        self.quota.give_back(unbooked);
        Ok(surplus)
    }

    fn cut(&self, end: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.file, end).map_err(|errno| {
            let dir = self.dir.display();
            let message = format!("cannot give space back in {dir}; closing the store does");
            Error::from_io(message, &errno.into())
        })
    }

    fn set_blocks(&self, blocks: &mut u64, end: u64) {
        *blocks = end;
        self.blocks_shown.store(end, Ordering::Relaxed);
    }

    fn lock_blocks(&self) -> MutexGuard<'_, u64> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Books bytes up to the end of the extents with the quota, and some more if it allows.
    fn book(&self, books: &mut Books) -> Result<()> {
        let end = books.extents.end();
        let Some(need) = end.checked_sub(books.booked).filter(|&need| need > 0) else {
            return Ok(());
        };
        let ahead = (books.booked / 2).clamp(GROWTH_BYTES_MIN, GROWTH_BYTES_MAX);
        for bytes in [need.max(ahead), need] {
            if self.quota.take(bytes) {
                books.booked += bytes;
                return Ok(());
            }
        }
        let dir = self.dir.display();
        let (need, used) = (shown_bytes(need), shown_bytes(self.quota.used()));
        let limit = shown_bytes(self.quota.limit.unwrap_or(u64::MAX));
        let message = format!(
            "{need} more in {dir} would pass max_disk_bytes ({limit}, of which {used} are \
             reserved); raise it"
        );
        Err(Error::new(ErrorKind::OverBound, message))
    }

    /// Reserves blocks up to `end`, or up to the booked bytes if there is room.
    fn ensure_blocks(&self, end: u64) -> Result<()> {
        let mut blocks = self.lock_blocks();
        if end <= *blocks {
            return Ok(());
        }
        let booked = self.lock().booked.max(end);
        // If there is no room for all booked bytes, there may be room for the needed bytes.
        let grown = self.grow(*blocks, booked).or_else(|_| self.grow(*blocks, end));
        let grown = grown.map_err(|errno| {
            let (need, dir) = (shown_bytes(end - *blocks), self.dir.display());
            let next =
                if errno == Errno::FBIG { "raise `ulimit -f`" } else { "free some space there" };
            let message = format!("cannot reserve {need} in {dir}; {next}");
            Error::from_io(message, &errno.into())
        })?;
        self.set_blocks(&mut blocks, grown);
        Ok(())
    }

    /// Gives the file blocks from `start` to `end`; on failure the file stays as it was.
    fn grow(&self, start: u64, end: u64) -> rustix::io::Result<u64> {
        // Passing this limit raises SIGXFSZ, which ends a process that does not ignore it. So
        // growth beyond it is refused here.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| end > most) {
            return Err(Errno::FBIG);
        }
        self.allocate_blocks(start, end - start).map_err(|errno| {
            // A failed reservation has taken all the free room; others need it more.
            match rustix::fs::ftruncate(&self.file, start) {
                Ok(()) => errno,
                Err(second) => second,
            }
        })?;
        Ok(end)
    }

    fn allocate_blocks(&self, offset: u64, bytes: u64) -> rustix::io::Result<()> {
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, bytes) {
                Err(Errno::INTR) => {}
                // This file system has no reservation: the writes themselves will find the room.
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
        let books = self.books.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.quota.give_back(books.booked);
    }
}

impl Extent {
    /// The file of this range.
    pub fn file(&self) -> &Arc<SpillFile> {
        &self.file
    }

    /// Offset of the first byte in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same range, with checksums for its bytes.
    #[must_use]
    pub fn with_checksums(mut self, checksums: Checksums) -> Self {
        self.checksums = Some(checksums);
        self
    }

    /// The checksums of the bytes written here, if the store verifies.
    pub fn checksums(&self) -> Option<&Checksums> {
        self.checksums.as_ref()
    }

    /// Reserves blocks on the disk for the range. Only workers call it: it may wait for the disk.
    pub fn prepare(&self) -> Result<()> {
        self.file.ensure_blocks(self.offset + self.len)
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // In a forked process a thread that does not exist may hold the lock, and the parent's
        // bookkeeping must not change.
        if self.file.process == std::process::id() {
            self.file.lock().extents.free(self.offset, self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Quota, SpillFile};
    use crate::config::DirectIo;
    use crate::error::ErrorKind;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    fn open(dir: &std::path::Path, quota: &Arc<Quota>) -> Arc<SpillFile> {
        SpillFile::open(dir, DirectIo::Disabled, quota).unwrap().0
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
        assert_eq!(file.reserve(1 << 20).unwrap_err().kind(), ErrorKind::OverBound);
        drop(first);
        file.reserve(1 << 20).unwrap();
    }

    #[test]
    fn a_trimmed_file_keeps_what_is_live_and_grows_again() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let quota = Quota::new(Some(128 << 20));
        let file = open(dir.path(), &quota);
        let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks as u64 * 512;
        let (live, tail) = (file.reserve(1 << 20).unwrap(), file.reserve(80 << 20).unwrap());
        tail.prepare().unwrap();
        assert!(blocks() >= 81 << 20);
        drop(tail);
        assert!(file.trim().unwrap() >= 80 << 20);
        assert_eq!(quota.used(), 1 << 20);
        assert!(blocks() < 2 << 20);
        assert_eq!(file.trim().unwrap(), 0);
        let again = file.reserve(100 << 20).unwrap();
        assert_eq!(again.offset(), live.len());
        again.prepare().unwrap();
        assert!(blocks() >= 101 << 20);
        drop((live, again));
        file.trim().unwrap();
        assert_eq!((quota.used(), file.used()), (0, 0));
    }

    #[test]
    fn trimming_while_others_reserve_takes_nothing_from_them() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let quota = Quota::new(None);
        let file = open(dir.path(), &quota);
        let work = &|thread: u64| {
            for round in 0..20_000 {
                let extent = file.reserve(4096 * (1 + round % 7)).unwrap();
                extent.prepare().unwrap();
                let bytes = vec![(thread ^ round) as u8; extent.len() as usize];
                let mut back = vec![0; bytes.len()];
                file.file.write_all_at(&bytes, extent.offset()).unwrap();
                file.file.read_exact_at(&mut back, extent.offset()).unwrap();
                assert!(bytes == back, "a trim cut off a live extent");
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|thread| scope.spawn(move || work(thread))).collect();
            while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                file.trim().unwrap();
            }
        });
        file.trim().unwrap();
        assert_eq!((quota.used(), file.used()), (0, 0));
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks, 0);
    }
}
