//! What a store is opened with.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Freed arena memory that stays resident: four times what is read ahead at once, so that a
/// backward finds its pages resident.
pub const ARENA_RETAIN_BYTES: usize = 128 << 20;

/// Which engine moves the bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Backend {
    /// `io_uring` where the kernel allows it, else a thread pool; the reason is noted once.
    #[default]
    Auto,
    /// `io_uring` or an error.
    IoUring,
    /// A pool of threads that call `pread` and `pwrite`.
    Psync,
    /// A disk in memory that fails by a seeded plan, for tests.
    Simulated(Faults),
}

/// Whether the file bypasses the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectIo {
    /// `O_DIRECT`, or an error that names the file system.
    #[default]
    Required,
    /// `O_DIRECT` where the file system takes it, else buffered; noted once.
    Optional,
    /// Buffered I/O. The page cache holds the bytes a second time until the kernel drops them.
    Disabled,
}

/// The seeded plan of a simulated disk. Rates are per piece of I/O, from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Equal seeds give equal faults for equal requests.
    pub seed: u64,
    /// How often a piece moves fewer bytes than asked, but some.
    pub short_rate: f64,
    /// How often a piece moves no bytes and does not fail, as at the end of a file.
    pub zero_rate: f64,
    /// How often a piece fails with `EIO`.
    pub io_error_rate: f64,
    /// How often a write fails with `ENOSPC`, `EDQUOT` or `EFBIG`.
    pub space_error_rate: f64,
    /// How often a piece is told to try again (`EINTR`, `EAGAIN`).
    pub retry_rate: f64,
    /// How often a read flips one bit of what was written.
    pub bit_flip_rate: f64,
    /// How often a piece is held back until others have overtaken it.
    pub late_rate: f64,
    /// Writes beyond this offset in bytes fail with `ENOSPC`.
    pub capacity_bytes: Option<u64>,
    /// After so many pieces the device is gone: all others fail with `ENODEV`.
    pub gone_after_count: Option<u64>,
    /// Stops the disk and lets it go on; whoever made the plan keeps a clone of it.
    pub pause: PauseSwitch,
}

/// Stops simulated disks before their next piece: then they are infinitely slow. Clones are one and
/// the same switch. A store that is closed waits for no switch.
#[derive(Clone, Debug, Default)]
pub struct PauseSwitch(Arc<(Mutex<bool>, Condvar)>);

impl PauseSwitch {
    /// A switch by which nothing moves until [`PauseSwitch::resume`].
    pub fn paused() -> Self {
        let switch = Self::default();
        switch.pause();
        switch
    }

    /// Nothing moves from now on.
    pub fn pause(&self) {
        *self.lock() = true;
    }

    /// Everything may move again.
    pub fn resume(&self) {
        *self.lock() = false;
        self.0.1.notify_all();
    }

    /// Waits until things may move, or `is_over` says that it does not matter any more.
    pub fn wait_unless(&self, is_over: impl Fn() -> bool) {
        let still = |paused: &mut bool| *paused && !is_over();
        let _guard =
            self.0.1.wait_while(self.lock(), still).unwrap_or_else(PoisonError::into_inner);
    }

    /// Has those who wait ask again whether it is over.
    pub fn ask_again(&self) {
        // Under the lock, so that nobody is between the question and the wait.
        let _guard = self.lock();
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for PauseSwitch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// How the engine of one directory splits and overlaps its I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Pieces in flight.
    pub queue_depth: u32,
    /// A request is split into pieces of this size, and smaller neighbours are joined up to it.
    pub piece_bytes: usize,
}

impl Default for Tuning {
    /// 16 pieces of 4 MiB keep one NVMe drive as busy as 32 of 1 MiB, and wake the worker a quarter
    /// as often, which matters where it takes turns with compute; much larger ones would make a
    /// demand read wait longer behind the writes that are in flight.
    fn default() -> Self {
        Self { queue_depth: 16, piece_bytes: 4 << 20 }
    }
}

/// A directory for one spill file, which has an engine of its own.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Where; on a local file system.
    pub path: PathBuf,
    /// What suits the drive behind it.
    pub tuning: Tuning,
    /// An engine for this directory alone.
    pub backend: Option<Backend>,
}

impl From<PathBuf> for Directory {
    fn from(path: PathBuf) -> Self {
        Self { path, tuning: Tuning::default(), backend: None }
    }
}

/// How a store is opened. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// One spill file and one engine per directory.
    pub dirs: Vec<Directory>,
    /// Which engine moves the bytes.
    pub backend: Backend,
    /// Whether the page cache is bypassed.
    pub direct_io: DirectIo,
    /// Upper bound on the bytes reserved over all directories.
    pub max_disk_bytes: Option<u64>,
    /// Sum up what is written, and compare what is read with it.
    pub verify: bool,
    /// Requests that may wait in the submission queue of one engine, per direction.
    pub queue_capacity: usize,
    /// Freed arena memory that stays resident for the next reads.
    pub arena_retain_bytes: usize,
}

impl StoreConfig {
    /// The defaults, for files in `dirs`.
    pub fn new(dirs: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self {
            dirs: dirs.into_iter().map(|path| Directory::from(path.into())).collect(),
            backend: Backend::Auto,
            direct_io: DirectIo::Required,
            max_disk_bytes: None,
            verify: false,
            // More than the tensors of any step that is worth its writes: a queue that is full
            // keeps tensors in memory, and an entry of it costs 16 bytes.
            queue_capacity: 1 << 14,
            arena_retain_bytes: ARENA_RETAIN_BYTES,
        }
    }
    /// The same with `tuning` for every directory.
    #[must_use]
    pub fn tuned(mut self, tuning: Tuning) -> Self {
        for dir in &mut self.dirs {
            dir.tuning = tuning;
        }
        self
    }
}
