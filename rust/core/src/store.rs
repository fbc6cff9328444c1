//! The store: bytes go down as [`Stored`], come up as [`Pending`] and then a slot of memory.
//!
//! It does not know what it keeps. Dropping a [`Stored`] is the release: a write that has not begun
//! is cancelled, one that is under way keeps its extent and its source until the kernel is done.

use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::config::StoreConfig;
use crate::device::Device;
use crate::direction::Direction;
use crate::disk::spill_file::{Extent, Quota};
use crate::disk::statistics::Traffic;
use crate::disk::stripe::{self, Lane};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::{Arena, Slot};
use crate::memory::buffer::{HostRegion, IoBuf, slot_checksum};
use crate::transfer::{Flight, GivenUp};

/// An asynchronous store of byte ranges on one or more directories.
pub struct TensorStore {
    devices: Vec<Device>,
    arena: Arc<Arena>,
    quota: Arc<Quota>,
    /// Of every device: a tensor may lie on all of them.
    alignment: usize,
    verify: bool,
    given_up: Arc<GivenUp>,
    closed: AtomicBool,
    process: u32,
    notes: Vec<String>,
}

/// Bytes on their way to the disk, or there. Dropping it gives the space back.
#[derive(Debug)]
pub struct Stored {
    flight: Flight,
    /// Where the parts lie, in the order of the tensor: device and extent.
    extents: Vec<(usize, Arc<Extent>)>,
    /// Where the caller's first byte lies in the first extent, which begins on an aligned address.
    head: usize,
    len: usize,
    checksum: Option<u64>,
    given_up: Arc<GivenUp>,
}

/// A read on its way. Dropping it gives up the read.
#[derive(Debug)]
pub struct Pending {
    flight: Flight,
    slot: Arc<Slot>,
    head: usize,
    len: usize,
    checksum: Option<u64>,
    place: String,
    given_up: Arc<GivenUp>,
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
        let (mut devices, mut notes) = (Vec::new(), Vec::<String>::new());
        for dir in &config.dirs {
            let (device, given_up) = Device::open(dir, config, &quota)?;
            let is_new = |note: &String| !notes.contains(note);
            let given_up: Vec<_> = given_up.into_iter().filter(is_new).collect();
            notes.extend(given_up);
            devices.push(device);
        }
        let alignments = devices.iter().map(|device| device.file().alignment());
        Ok(Self {
            alignment: alignments.max().unwrap_or(1),
            devices,
            arena: Arena::new(config.arena_retain_bytes)?,
            quota,
            verify: config.verify,
            given_up: Arc::default(),
            closed: AtomicBool::new(false),
            process: std::process::id(),
            notes,
        })
    }

    /// What was given up, while opening and since, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let since = self.devices.iter().filter_map(Device::out_of_use);
        self.notes.iter().cloned().chain(since).collect()
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
        let lanes = self.lanes()?;
        let (len, checksum) = (source.len(), self.verify.then(|| source.checksum()));
        let (region, head) = source.widened(self.alignment);
        let buffer = IoBuf::from(region);
        let (flight, extents) = (Flight::default(), Vec::new());
        let given_up = Arc::clone(&self.given_up);
        // If a part is refused, dropping this gives up the parts before it.
        let mut stored = Stored { flight, extents, head, len, checksum, given_up };
        let mut start = 0;
        for (device, len) in stripe::shares(buffer.len(), &lanes) {
            let (extent, part) = self.devices[device].write(buffer.part(start, len))?;
            stored.flight.push(part);
            stored.extents.push((device, extent));
            start += len;
        }
        Ok(stored)
    }

    /// Queues a read of what `stored` holds and returns at once.
    ///
    /// Its write must have ended well: before that the bytes are in memory anyway.
    pub fn read(&self, stored: &Stored) -> Result<Pending> {
        self.refuse_if_down()?;
        match stored.flight.answer() {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(error),
            None => {
                let message = "read before its write has ended; wait for the write first";
                return Err(Error::new(ErrorKind::Config, message));
            }
        }
        let is_ours = |(device, extent): &(usize, Arc<Extent>)| {
            let device = self.devices.get(*device);
            device.is_some_and(|device| Arc::ptr_eq(device.file(), extent.file()))
        };
        if !stored.extents.iter().all(is_ours) {
            let message = "this was written by another store; read it there";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let total: u64 = stored.extents.iter().map(|(_, extent)| extent.len()).sum();
        let slot = Arc::new(self.arena.slot(total as usize)?);
        let buffer = IoBuf::from(Arc::clone(&slot));
        let (head, len, checksum) = (stored.head, stored.len, stored.checksum);
        let (flight, place, given_up) =
            (Flight::default(), stored.place(), Arc::clone(&self.given_up));
        let mut pending = Pending { flight, slot, head, len, checksum, place, given_up };
        let mut start = 0;
        for (device, extent) in &stored.extents {
            let len = extent.len() as usize;
            pending.flight.push(self.devices[*device].read(extent, buffer.part(start, len))?);
            start += len;
        }
        Ok(pending)
    }

    /// Gives the space of `stored` back; the same as dropping it.
    pub fn release(&self, stored: Stored) {
        drop(stored);
    }

    /// Gives the space beyond what is stored back to the disks; returns how many bytes that was.
    pub fn trim(&self) -> Result<u64> {
        self.refuse_if_down()?;
        self.devices.iter().map(|device| device.file().trim()).sum()
    }

    /// Bytes of memory in use for transfers beyond what callers hold on to: of slots, and of the
    /// sources of writes that were given up and have not ended.
    pub fn resident_bytes(&self) -> usize {
        self.arena.live_bytes() + self.given_up.lent_bytes()
    }

    /// Whether the memory at an address is a slot's of this store.
    pub fn owns(&self, address: usize) -> bool {
        self.arena.contains(address)
    }

    /// Waits at most `limit` until a transfer that was given up has ended, and holds no memory any
    /// more: `false` if there is none, `None` if the time is over.
    pub fn wait_for_given_up(&self, limit: Duration) -> Option<bool> {
        if self.is_foreign() { Some(false) } else { self.given_up.wait_for_one(limit) }
    }

    /// What the store did so far; `Closed` in a forked process, where the counts stand still.
    pub fn stats(&self) -> Result<Stats> {
        self.refuse_if_foreign()?;
        let sum = |direction| {
            let traffic = self.devices.iter().map(|device| device.meter().traffic(direction));
            traffic.fold(Traffic::default(), Traffic::plus)
        };
        let engine = |device: &Device| (device.file().dir().to_owned(), device.engine_name());
        Ok(Stats {
            written: sum(Direction::Write),
            read: sum(Direction::Read),
            cancelled_count: self.given_up.never_begun_count(),
            disk_used_bytes: self.devices.iter().map(|device| device.file().used()).sum(),
            disk_reserved_bytes: self.quota.used(),
            arena_live_bytes: self.arena.live_bytes() as u64,
            engines: self.devices.iter().map(engine).collect(),
        })
    }

    /// Stops a simulated disk until [`TensorStore::resume`].
    pub fn pause(&self) {
        self.devices.iter().for_each(Device::pause);
    }

    /// Lets a paused simulated disk move.
    pub fn resume(&self) {
        self.devices.iter().for_each(Device::resume);
    }

    /// Refuses new work, ends what has begun, answers the rest with `Closed`. Idempotent.
    ///
    /// Slots that are tensors by now stay valid; the blocks on the disk are free.
    pub fn close(&self) {
        // After a fork the threads and rings are the parent's: the child must not wait for them.
        if self.is_foreign() || self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.devices.iter().for_each(Device::close);
    }

    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    fn refuse_if_foreign(&self) -> Result<()> {
        if self.is_foreign() {
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "this store belongs to process {}; a forked process must open its own",
                    self.process
                ),
            ));
        }
        Ok(())
    }

    fn refuse_if_down(&self) -> Result<()> {
        self.refuse_if_foreign()?;
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed; open a new one"));
        }
        Ok(())
    }

    /// The devices that may be written to; those without space only if there are no others.
    fn lanes(&self) -> Result<Vec<Lane>> {
        let numbered = || self.devices.iter().enumerate();
        if let [device] = &self.devices[..]
            && device.out_of_use().is_none()
        {
            return Ok(vec![device.lane(0)]);
        }
        let trusted: Vec<_> =
            numbered().filter(|(_, device)| device.meter().distrust().is_none()).collect();
        if trusted.is_empty() {
            let reasons: Vec<_> =
                numbered().filter_map(|(_, device)| device.out_of_use()).collect();
            return Err(Error::new(ErrorKind::Io, reasons.join("; ")));
        }
        let lane = |&(index, device): &(usize, &Device)| device.lane(index);
        let roomy: Vec<_> =
            trusted.iter().filter(|(_, device)| !device.meter().passes_by()).map(lane).collect();
        Ok(if roomy.is_empty() { trusted.iter().map(lane).collect() } else { roomy })
    }
}

impl Drop for TensorStore {
    fn drop(&mut self) {
        if self.is_foreign() {
            self.devices.drain(..).for_each(Device::leave_to_parent);
        } else {
            self.close();
        }
    }
}

impl Stored {
    /// Is the write done?
    pub fn ticket(&self) -> &Flight {
        &self.flight
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
        let cancelled = self.flight.cancel();
        if cancelled {
            self.given_up.note_never_begun();
        }
        cancelled
    }

    /// Where the bytes lie, for messages.
    fn place(&self) -> String {
        let one = |(_, extent): &(usize, Arc<Extent>)| {
            format!("file offset {} in {}", extent.offset(), extent.file().dir().display())
        };
        self.extents.iter().map(one).collect::<Vec<_>>().join(" and ")
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if !self.flight.is_done() && !self.flight.is_foreign() && !self.cancel() {
            self.given_up.watch(mem::take(&mut self.flight), self.len);
        }
    }
}

impl Pending {
    /// Is the read done?
    pub fn ticket(&self) -> &Flight {
        &self.flight
    }

    /// Gives the read up: `true` if it had not begun. If it had, its slot is held until the
    /// ticket tells that the last piece has ended.
    pub fn cancel(&self) -> bool {
        self.flight.cancel()
    }

    /// The bytes, once the ticket says that they are there.
    ///
    /// Checks them against the checksum of the write where the store was opened with `verify`.
    pub fn restored(&self) -> Result<Restored> {
        match self.flight.answer() {
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
        if !self.flight.is_done() && !self.flight.is_foreign() && !self.cancel() {
            // Its slot is counted by the arena.
            self.given_up.watch(mem::take(&mut self.flight), 0);
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
        IoBuf::from(Arc::clone(&self.slot)).copy_out(self.head, &mut bytes);
        bytes
    }
}
