//! The options of a store.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Freed arena memory that stays resident. It is four times the window that is read ahead, so that
/// a backward finds its pages resident.
pub const ARENA_RETAIN_BYTES: usize = 128 << 20;

/// The engine that moves the bytes.
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

/// The choice between direct I/O (`O_DIRECT`) and the page cache.
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
    /// Seed of the plan. Equal seeds give equal faults for equal requests.
    pub seed: u64,
    /// Rate of pieces that move fewer bytes than asked, but some.
    pub short_rate: f64,
    /// Rate of pieces that move no bytes and do not fail, as at the end of a file.
    pub zero_rate: f64,
    /// Rate of pieces that fail with `EIO`.
    pub io_error_rate: f64,
    /// Rate of writes that fail with `ENOSPC`, `EDQUOT` or `EFBIG`.
    pub space_error_rate: f64,
    /// Rate of pieces that fail with `EINTR` or `EAGAIN`, which ask for another try.
    pub retry_rate: f64,
    /// Rate of reads that flip one bit.
    pub bit_flip_rate: f64,
    /// Rate of pieces that are held back until others have overtaken them.
    pub late_rate: f64,
    /// Writes beyond this offset in bytes fail with `ENOSPC`.
    pub capacity_bytes: Option<u64>,
    /// After so many pieces the device is gone: all later pieces fail with `ENODEV`.
    pub gone_after_count: Option<u64>,
    /// Stops the disk and resumes it; the test keeps a clone.
    pub pause: PauseSwitch,
}

/// Stops simulated disks before their next piece. Clones share one switch. A store that is closed
/// waits for no switch.
#[derive(Clone, Debug, Default)]
pub struct PauseSwitch(Arc<(Mutex<bool>, Condvar)>);

impl PauseSwitch {
    /// A switch that stops the disks until [`PauseSwitch::resume`].
    pub fn paused() -> Self {
        let switch = Self::default();
        switch.pause();
        switch
    }

    /// Stops the disks.
    pub fn pause(&self) {
        *self.lock() = true;
    }

    /// Lets the disks go on.
    pub fn resume(&self) {
        *self.lock() = false;
        self.0.1.notify_all();
    }

    /// Waits until the switch is resumed or `is_over` returns true.
    pub fn wait_unless(&self, is_over: impl Fn() -> bool) {
        let still = |paused: &mut bool| *paused && !is_over();
        let _guard =
            self.0.1.wait_while(self.lock(), still).unwrap_or_else(PoisonError::into_inner);
    }

    /// Wakes the threads in `wait_unless`, so that they call `is_over` again.
    pub fn ask_again(&self) {
        // Under the lock, so that no thread is between its check and its wait.
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

/// The division and the overlap of I/O in the engine of one directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Pieces in flight.
    pub queue_depth: u32,
    /// A request is split into pieces of this size, and smaller neighbours are joined up to it.
    pub piece_bytes: usize,
}

impl Default for Tuning {
    /// 16 pieces of 4 MiB keep one NVMe drive as busy as 32 of 1 MiB, and wake the worker a quarter
    /// as often, which matters if it takes turns with compute. Much larger pieces would make a
    /// demand read wait longer behind the writes in flight.
    fn default() -> Self {
        Self { queue_depth: 16, piece_bytes: 4 << 20 }
    }
}

/// A directory for one spill file, which has an engine of its own.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Its path, on a local file system.
    pub path: PathBuf,
    /// The tuning for its drive.
    pub tuning: Tuning,
    /// An engine for this directory alone.
    pub backend: Option<Backend>,
}

impl From<PathBuf> for Directory {
    fn from(path: PathBuf) -> Self {
        Self { path, tuning: Tuning::default(), backend: None }
    }
}

/// The options of a store. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// One spill file and one engine per directory.
    pub dirs: Vec<Directory>,
    /// The engine that moves the bytes.
    pub backend: Backend,
    /// The choice between direct I/O and the page cache.
    pub direct_io: DirectIo,
    /// Upper bound on the bytes reserved over all directories.
    pub max_disk_bytes: Option<u64>,
    /// Takes checksums of writes and compares reads with them.
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
            // More than the tensors of any step that is worth its writes. A full queue keeps
            // tensors in memory, and an entry costs 16 bytes.
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
