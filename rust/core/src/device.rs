//! One directory of a store: its file, its queue, its engine, and its health.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::{Directory, StoreConfig, Tuning};
use crate::cufile::file::Registered;
use crate::cufile::library::Library;
use crate::direction::Direction;
use crate::disk::checksums::Checksums;
use crate::disk::spill_file::{Extent, Quota, SpillFile};
use crate::disk::statistics::Statistics;
use crate::disk::stripe::Candidate;
use crate::engine;
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::cufile::CuFile;
use crate::engine::psync::Psync;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::host::{Checksum, HostSource};
use crate::memory::landing::Landing;
use crate::queue::{Backlog, Job, JobMemory, OnSuccess, Request};
use crate::ticket::{Ticket, ticket};

/// A spill file with the engine that serves it.
pub struct Device {
    file: Arc<SpillFile>,
    setup: Setup,
    engine: Mutex<Box<dyn IoEngine>>,
    engine_name: &'static str,
    /// True if the engine moves memory of GPUs only.
    is_for_gpus: bool,
    /// Bytes of writes that have not ended.
    backlog: Arc<AtomicU64>,
}

/// The tuning for cuFile. It splits large pieces itself, and each call costs some microseconds.
const ON_GPUS: Tuning = Tuning { queue_depth: 4, piece_bytes: 16 << 20 };

impl Device {
    /// Opens the file and starts the engine. The returned sentences name the fallbacks that were
    /// taken.
    pub fn open(
        dir: &Directory,
        config: &StoreConfig,
        quota: &Arc<Quota>,
    ) -> Result<(Self, Vec<String>)> {
        let (file, file_fallback) = SpillFile::open(&dir.path, config.direct_io, quota)?;
        let setup = Setup::new(dir.tuning, file.alignment(), config.queue_capacity)?;
        let backend = dir.backend.as_ref().unwrap_or(&config.backend);
        let (engine, fallback) = engine::open(backend, setup.clone())?;
        let (engine_name, engine) = (engine.name(), Mutex::new(engine));
        let (is_for_gpus, backlog) = (false, Arc::default());
        let device = Self { file, setup, engine, engine_name, is_for_gpus, backlog };
        Ok((device, file_fallback.into_iter().chain(fallback).collect()))
    }

    /// Opens another file in the same directory, for cuFile to move memory of GPUs.
    ///
    /// Both files count as one disk, with one quota and one rate; but each can be out of use alone.
    pub fn open_for_gpus(&self, library: &'static Library) -> Result<Self> {
        let (dir, quota) = (self.file.dir(), self.file.quota());
        let (file, registered) =
            SpillFile::open_named(dir, quota, |file| Registered::new(library, file))?;
        let mut setup = Setup::new(ON_GPUS, file.alignment(), self.setup.queue.capacity())?;
        setup.statistics = Arc::clone(&self.setup.statistics);
        let engine = Psync::start(setup.clone(), CuFile::new(registered, &file))?;
        let (engine_name, is_for_gpus) = (engine.name(), true);
        let (engine, backlog) = (Mutex::new(Box::new(engine) as Box<dyn IoEngine>), Arc::default());
        Ok(Self { file, setup, engine, engine_name, is_for_gpus, backlog })
    }

    /// The file.
    pub fn file(&self) -> &Arc<SpillFile> {
        &self.file
    }

    /// The traffic and the rates.
    pub fn statistics(&self) -> &Statistics {
        &self.setup.statistics
    }

    /// The name of the engine that users see.
    pub fn engine_name(&self) -> &'static str {
        self.engine_name
    }

    /// The backlog and the cost of this device, to share a tensor out.
    pub fn candidate(&self, device: usize) -> Candidate {
        let backlog_bytes = self.backlog.load(Ordering::Relaxed);
        let cost = |direction| self.setup.statistics.ns_per_byte(direction);
        // Each written byte is read once, so a device that is slow at either is slow.
        let with_read = |write: f64| write + cost(Direction::Read).unwrap_or(0.0);
        Candidate { device, backlog_bytes, ns_per_byte: cost(Direction::Write).map(with_read) }
    }

    /// Recent bytes per second of busy time; `None` before enough has moved to tell.
    pub fn rate(&self, direction: Direction) -> Option<f64> {
        self.setup.statistics.ns_per_byte(direction).map(|ns_per_byte| 1e9 / ns_per_byte)
    }

    /// Returns true if the next write should leave this device out because it had no space.
    pub fn leaves_out_next(&self) -> bool {
        self.setup.health.leaves_out_next()
    }

    /// The reason that the device is out of use; `None` if it is in use.
    pub fn out_of_use(&self) -> Option<String> {
        let failure = self.setup.health.out_of_use()?;
        let dir = self.file.dir().display();
        Some(format!(
            "{dir} is out of use after several failed writes in a row; the last said: {failure}; \
             look at the disk (dmesg), then open a new store"
        ))
    }

    /// Reserves space for `len` bytes. With `own`, the range of the caller's bytes, they get
    /// checksums.
    pub fn reserve(&self, len: usize, own: Option<Range<usize>>) -> Result<Arc<Extent>> {
        let extent = self.file.reserve(len as u64)?;
        Ok(Arc::new(match own {
            Some(own) => extent.with_checksums(Checksums::new(own, len, self.setup.piece_len)),
            None => extent,
        }))
    }

    /// Queues a write of `source` to `extent`; `on_success` runs after it succeeded.
    pub fn write(
        &self,
        extent: &Arc<Extent>,
        source: HostSource,
        on_success: Option<OnSuccess>,
    ) -> Result<(Request, Ticket)> {
        if let Some(checksums) = extent.checksums() {
            sum_up(&source, checksums);
        }
        let backlog = Backlog::new(&self.backlog, extent.len());
        self.push(extent, JobMemory::From(source), |job| {
            let job = job.counted(backlog);
            match on_success {
                Some(on_success) => job.then(on_success),
                None => job,
            }
        })
    }

    /// Queues a read of `extent` into `landing`.
    pub fn read(&self, extent: &Arc<Extent>, landing: Landing) -> Result<(Request, Ticket)> {
        self.push(extent, JobMemory::Into(landing), |job| job)
    }

    fn push(
        &self,
        extent: &Arc<Extent>,
        memory: JobMemory,
        complete: impl FnOnce(Job) -> Job,
    ) -> Result<(Request, Ticket)> {
        if memory.is_on_gpu() != self.is_for_gpus {
            let message = "a store for memory of GPUs takes no other, and others take none of it";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let (completer, ticket) = ticket();
        let request = Request::new(complete(Job::new(Arc::clone(extent), memory, completer)));
        self.setup.queue.push(&request)?;
        Ok((request, ticket))
    }

    /// Ends the work that has begun and gives the blocks back.
    pub fn close(&self) {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).close();
        // If truncation is refused, the blocks stay until the last handle is dropped.
        let _kept = self.file.discard();
    }

    /// For a forked process: forgets the engine. Its threads are the parent's, and joining them
    /// would wait for ever.
    pub fn leave_to_parent(self) {
        std::mem::forget(self.engine);
    }
}

/// Sums up bytes before they are queued; `disk/checksums.rs` says why not later.
fn sum_up(source: &HostSource, checksums: &Checksums) {
    for start in (0..source.len()).step_by(checksums.block_bytes()) {
        let len = checksums.block_bytes().min(source.len() - start);
        let mut sum = Checksum::default();
        source.hash(checksums.own_bytes(start, len), &mut sum);
        checksums.set(start, sum.value());
    }
}
