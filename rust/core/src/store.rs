//! The store: bytes go down as [`Stored`], come up as [`Pending`] and then a slot of memory.
//!
//! It does not know what it keeps. Dropping a [`Stored`] is the release: a write that has not begun
//! is cancelled, one that is under way keeps its extent and its source until the kernel is done.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::buffer::{Arena, HostRegion, IoBuf, Slot, slot_checksum};
use crate::config::StoreConfig;
use crate::engine;
use crate::engine::contract::IoEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::file::{Extent, Quota, SpillFile};
use crate::meter::{Direction, Meter, Traffic};
use crate::queue::{Job, Request, SubmitQueue};
use crate::ticket::{Ticket, ticket};

/// An asynchronous store of byte ranges on one or more directories.
pub struct TensorStore {
    devices: Vec<Device>,
    arena: Arc<Arena>,
    quota: Arc<Quota>,
    verify: bool,
    /// Rotates the choice among equally busy devices.
    turn: AtomicUsize,
    cancelled_count: Arc<AtomicU64>,
    closed: AtomicBool,
    process: u32,
    notes: Vec<String>,
}

struct Device {
    file: Arc<SpillFile>,
    queue: Arc<SubmitQueue>,
    meter: Arc<Meter>,
    engine: Mutex<Box<dyn IoEngine>>,
    engine_name: &'static str,
    /// Bytes of writes that have not ended: the measure of how busy the device is.
    backlog: Arc<AtomicU64>,
}

/// Bytes on their way to the disk, or there. Dropping it gives the space back.
#[derive(Debug)]
pub struct Stored {
    extent: Arc<Extent>,
    ticket: Ticket,
    request: Request,
    device: usize,
    /// Where the caller's first byte lies in the extent, which begins on an aligned address.
    head: usize,
    len: usize,
    checksum: Option<u64>,
    cancelled_count: Arc<AtomicU64>,
}

/// A read on its way. Dropping it gives up the read.
#[derive(Debug)]
pub struct Pending {
    slot: Arc<Slot>,
    ticket: Ticket,
    request: Request,
    head: usize,
    len: usize,
    checksum: Option<u64>,
    place: String,
}

/// Bytes that came back: `len` bytes at `head` of a slot.
#[derive(Clone, Debug)]
pub struct Restored {
    slot: Arc<Slot>,
    head: usize,
    len: usize,
}

/// A snapshot of what a store did. Sizes in bytes.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Writes, summed over the devices.
    pub written: Traffic,
    /// Reads, summed over the devices.
    pub read: Traffic,
    /// Writes cancelled before they began.
    pub cancelled_count: u64,
    /// Bytes of live extents.
    pub disk_used_bytes: u64,
    /// Bytes reserved on disk.
    pub disk_reserved_bytes: u64,
    /// Bytes of slots in use.
    pub arena_live_bytes: u64,
    /// Engine of each directory.
    pub engines: Vec<(PathBuf, &'static str)>,
}

impl TensorStore {
    /// Opens one unnamed file and one engine per directory.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        if config.dirs.is_empty() {
            return Err(Error::new(ErrorKind::Config, "no directory given; pass at least one"));
        }
        let quota = Quota::new(config.max_disk_bytes);
        let mut notes = Vec::new();
        let mut devices = Vec::new();
        for dir in &config.dirs {
            let (file, note) = SpillFile::open(&dir.path, config.direct_io, &quota)?;
            notes.extend(note);
            let (queue, meter) =
                (SubmitQueue::new(config.queue_capacity)?, Arc::new(Meter::default()));
            let (engine, note) =
                engine::open(&config.backend, dir.tuning, file.alignment(), &queue, &meter)?;
            notes.extend(note.filter(|note| !notes.contains(note)));
            let (engine_name, engine) = (engine.name(), Mutex::new(engine));
            let backlog = Arc::new(AtomicU64::new(0));
            devices.push(Device { file, queue, meter, engine, engine_name, backlog });
        }
        Ok(Self {
            devices,
            arena: Arena::new(config.arena_retain_bytes)?,
            quota,
            verify: config.verify,
            turn: AtomicUsize::new(0),
            cancelled_count: Arc::new(AtomicU64::new(0)),
            closed: AtomicBool::new(false),
            process: std::process::id(),
            notes,
        })
    }

    /// What was given up while opening, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Queues a write of `source` and returns at once.
    ///
    /// The source needs no alignment: the write is widened to the blocks around it. What is stored
    /// is unspecified if its bytes change before the write has ended.
    pub fn write(&self, source: HostRegion) -> Result<Stored> {
        self.refuse_if_down()?;
        if source.is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                "a tensor without bytes has nothing to store",
            ));
        }
        let device_index = self.least_busy();
        let device = &self.devices[device_index];
        let (len, checksum) = (source.len(), self.verify.then(|| source.checksum()));
        let backlog = Backlog::new(&device.backlog, len as u64);
        let (region, head) = source.widened(device.file.alignment(), backlog);
        let extent = Arc::new(device.file.reserve(region.len() as u64)?);
        let (completer, ticket) = ticket();
        let (direction, buffer) = (Direction::Write, IoBuf::Host(region));
        let request =
            Request::new(Job { direction, extent: Arc::clone(&extent), buffer, completer });
        device.queue.push(&request)?;
        let cancelled_count = Arc::clone(&self.cancelled_count);
        Ok(Stored {
            extent,
            ticket,
            request,
            device: device_index,
            head,
            len,
            checksum,
            cancelled_count,
        })
    }

    /// Queues a read of what `stored` holds and returns at once.
    ///
    /// Its write must have ended well: before that the bytes are in memory anyway.
    pub fn read(&self, stored: &Stored) -> Result<Pending> {
        self.refuse_if_down()?;
        match stored.ticket.answer() {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(error),
            None => {
                let message = "read before its write has ended; wait for the write first";
                return Err(Error::new(ErrorKind::Config, message));
            }
        }
        let device = self
            .devices
            .get(stored.device)
            .filter(|device| Arc::ptr_eq(&device.file, stored.extent.file()))
            .ok_or_else(|| {
                let message = "this was written by another store; read it there";
                Error::new(ErrorKind::Config, message)
            })?;
        let slot = Arc::new(self.arena.slot(stored.extent.len() as usize)?);
        let (completer, ticket) = ticket();
        let request = Request::new(Job {
            direction: Direction::Read,
            extent: Arc::clone(&stored.extent),
            buffer: IoBuf::Slot(Arc::clone(&slot)),
            completer,
        });
        device.queue.push(&request)?;
        let place = format!("offset {} in {}", stored.extent.offset(), device.file.dir().display());
        let (head, len, checksum) = (stored.head, stored.len, stored.checksum);
        Ok(Pending { slot, ticket, request, head, len, checksum, place })
    }

    /// Gives the space of `stored` back; the same as dropping it.
    pub fn release(&self, stored: Stored) {
        drop(stored);
    }

    /// Gives the space beyond what is stored back to the disks; returns how many bytes that was.
    pub fn trim(&self) -> Result<u64> {
        self.refuse_if_down()?;
        self.devices.iter().map(|device| device.file.trim()).sum()
    }

    /// Bytes of slots in use.
    pub fn arena_live_bytes(&self) -> usize {
        self.arena.live_bytes()
    }

    /// What the store did so far.
    pub fn stats(&self) -> Stats {
        let sum = |direction| {
            self.devices.iter().map(|device| device.meter.traffic(direction)).fold(
                Traffic::default(),
                |sum, one| Traffic {
                    bytes: sum.bytes + one.bytes,
                    count: sum.count + one.count,
                    failed_count: sum.failed_count + one.failed_count,
                    busy_ns: sum.busy_ns + one.busy_ns,
                },
            )
        };
        let engine = |device: &Device| (device.file.dir().to_owned(), device.engine_name);
        Stats {
            written: sum(Direction::Write),
            read: sum(Direction::Read),
            cancelled_count: self.cancelled_count.load(Ordering::Relaxed),
            disk_used_bytes: self.devices.iter().map(|device| device.file.used()).sum(),
            disk_reserved_bytes: self.quota.used(),
            arena_live_bytes: self.arena.live_bytes() as u64,
            engines: self.devices.iter().map(engine).collect(),
        }
    }

    /// Lets a paused simulated disk move.
    pub fn resume(&self) {
        for device in &self.devices {
            device.engine.lock().unwrap_or_else(PoisonError::into_inner).resume();
        }
    }

    /// Refuses new work, ends what has begun, answers the rest with `Closed`. Idempotent.
    ///
    /// Slots that are tensors by now stay valid; the blocks on the disk are free.
    pub fn close(&self) {
        // After a fork the threads and rings are the parent's: the child must not wait for them.
        if self.is_foreign() || self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        for device in &self.devices {
            device.engine.lock().unwrap_or_else(PoisonError::into_inner).close();
            // Refused truncation leaves the blocks until the last handle is dropped.
            let _kept = device.file.discard();
        }
    }

    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    fn refuse_if_down(&self) -> Result<()> {
        if self.is_foreign() {
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "this store belongs to process {}; a forked process must open its own",
                    self.process
                ),
            ));
        }
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed; open a new one"));
        }
        Ok(())
    }

    fn least_busy(&self) -> usize {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = self.devices.len();
        let backlog = |&index: &usize| self.devices[index].backlog.load(Ordering::Relaxed);
        (0..count).map(|step| (turn + step) % count).min_by_key(backlog).unwrap_or(0)
    }
}

impl Drop for TensorStore {
    fn drop(&mut self) {
        if self.is_foreign() {
            // Joining the parent's threads would wait for ever: leave them alone.
            for device in self.devices.drain(..) {
                std::mem::forget(device.engine);
            }
        } else {
            self.close();
        }
    }
}

/// Counts bytes into a device's backlog for as long as the request lives.
struct Backlog(Arc<AtomicU64>, u64);

impl Backlog {
    fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self(Arc::clone(total), bytes)
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Stored {
    /// Is the write done?
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// The caller's bytes, without the widening.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a tensor without bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Gives the write up: `true` if it had not begun, so that its source is free now. If it had,
    /// pieces that were not sent yet never are, and the ticket tells when the last has ended.
    pub fn cancel(&self) -> bool {
        let cancelled = self.request.cancel();
        if cancelled {
            self.cancelled_count.fetch_add(1, Ordering::Relaxed);
        }
        cancelled
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if !self.ticket.is_done() && !self.ticket.is_foreign() {
            self.cancel();
        }
    }
}

impl Pending {
    /// Is the read done?
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Gives the read up: `true` if it had not begun. If it had, its slot is held until the
    /// ticket tells that the last piece has ended.
    pub fn cancel(&self) -> bool {
        self.request.cancel()
    }

    /// The bytes, once the ticket says that they are there.
    ///
    /// Checks them against the checksum of the write where the store was opened with `verify`.
    pub fn restored(&self) -> Result<Restored> {
        match self.ticket.answer() {
            Some(answer) => answer?,
            None => {
                return Err(Error::new(ErrorKind::Config, "the read has not ended; wait for it"));
            }
        }
        if let Some(expected) = self.checksum {
            let found = slot_checksum(&self.slot, self.head, self.len);
            if found != expected {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "{} bytes at {} came back changed (checksum {found:016x}, written with \
                         {expected:016x}); the disk, or memory written behind autograd's back, is \
                         at fault",
                        self.len, self.place
                    ),
                ));
            }
        }
        Ok(Restored { slot: Arc::clone(&self.slot), head: self.head, len: self.len })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.ticket.is_done() && !self.ticket.is_foreign() {
            self.cancel();
        }
    }
}

impl Restored {
    /// Address of the first byte; its remainder modulo the alignment is the source's.
    pub fn address(&self) -> *mut u8 {
        self.slot.address().wrapping_add(self.head)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        IoBuf::Slot(Arc::clone(&self.slot)).copy_out(self.head, &mut bytes);
        bytes
    }
}
