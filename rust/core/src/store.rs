//! The store. It writes bytes as [`Stored`], and reads them into a slot of its own memory or into
//! the caller's.
//!
//! It does not know the meaning of the bytes. Dropping a [`Stored`] releases it: a write that has
//! not begun is cancelled, and a write under way keeps its extent and its source until the kernel
//! is done.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::config::StoreConfig;
use crate::cufile::library::Library;
use crate::device::Device;
use crate::devices::{Devices, Rates};
use crate::direction::Direction;
use crate::disk::spill_file::{Extent, Quota};
use crate::disk::statistics::Traffic;
use crate::disk::stripe;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::{Arena, Slot};
use crate::memory::host::{HostSource, HostTarget};
use crate::memory::landing::Landing;
use crate::queue::OnSuccess;
use crate::stored::{Overwrite, Stored, Version};
use crate::transfer::{Abandoned, Transfer};

/// An asynchronous store of byte ranges on one or more directories.
pub struct TensorStore {
    devices: Arc<Devices>,
    arena: Arc<Arena>,
    abandoned: Arc<Abandoned>,
    /// True if another store opened the devices, and this store lies beside it.
    is_beside: bool,
    /// The store for memory of GPUs, once it was opened.
    for_gpus: OnceLock<Arc<Self>>,
}

/// A read on its way to memory of the store. Dropping it cancels the parts that have not begun.
#[derive(Debug)]
pub struct Pending {
    transfer: Transfer,
    slot: Arc<Slot>,
    head: usize,
    len: usize,
}

/// A read on its way to memory of the caller. Dropping it cancels the parts that have not begun. If
/// it has begun, the memory is in use until the store drops its owner.
#[derive(Debug)]
#[must_use = "a read that nobody holds is cancelled"]
pub struct PendingInto(Transfer);

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
    /// Bytes of the files that have blocks on the disk.
    pub disk_reserved_bytes: u64,
    /// Bytes of writes that stores beside the first have queued so far.
    pub beside_written_bytes: u64,
    /// Bytes of reads that stores beside the first have queued so far.
    pub beside_read_bytes: u64,
    /// Bytes of slots in use.
    pub arena_live_bytes: u64,
    /// Engine of each directory.
    pub engines: Vec<(PathBuf, &'static str)>,
}

impl TensorStore {
    /// Opens one unnamed file and one engine per directory. Without a directory the store has no
    /// file and no thread, and refuses every write.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        let quota = Quota::new(config.max_disk_bytes);
        let (mut devices, mut fallbacks) = (Vec::new(), Vec::<String>::new());
        for dir in &config.dirs {
            let (device, taken) = Device::open(dir, config, &quota)?;
            for fallback in taken {
                if !fallbacks.contains(&fallback) {
                    fallbacks.push(fallback);
                }
            }
            devices.push(device);
        }
        let arena = Arena::new(config.arena_retain_bytes)?;
        Ok(Self::over(Arc::new(Devices::new(devices, config.verify, fallbacks)), arena, false))
    }

    fn over(devices: Arc<Devices>, arena: Arc<Arena>, is_beside: bool) -> Self {
        let (abandoned, for_gpus) = (Arc::default(), OnceLock::new());
        Self { devices, arena, abandoned, is_beside, for_gpus }
    }

    /// Another store on the same files, queues and quota, whose transfers hold memory of their own.
    ///
    /// Each store can read the tensors that the other has written. They are closed together.
    pub fn beside(&self, arena_retain_bytes: usize) -> Result<Self> {
        self.devices.refuse_if_down()?;
        Ok(Self::over(Arc::clone(&self.devices), Arena::new(arena_retain_bytes)?, true))
    }

    /// The store beside this store for memory of GPUs, which cuFile moves without memory of the
    /// CPU.
    ///
    /// It has a file of its own in each directory, and the same quota. This store counts its bytes.
    pub fn for_gpus(&self, library: &'static Library) -> Result<Arc<Self>> {
        self.devices.refuse_if_down()?;
        if self.verifies() {
            let message = "verify needs the bytes in the CPU's memory; leave out verify, or gds";
            return Err(Error::new(ErrorKind::Config, message));
        }
        if let Some(store) = self.for_gpus.get() {
            return Ok(Arc::clone(store));
        }
        let devices: Result<Vec<_>> =
            self.devices.iter().map(|device| device.open_for_gpus(library)).collect();
        let devices = Arc::new(Devices::new(devices?, false, Vec::new()));
        let store = Self::over(devices, Arena::new(0)?, false);
        // Another thread may have opened it meanwhile.
        Ok(Arc::clone(self.for_gpus.get_or_init(|| Arc::new(store))))
    }

    /// Notes for users, one sentence each: the fallbacks that were taken while opening, and the
    /// directories that are out of use.
    pub fn notes(&self) -> Vec<String> {
        let out_of_use = self.all_devices().filter_map(Device::out_of_use);
        self.devices.fallbacks().iter().cloned().chain(out_of_use).collect()
    }

    /// Queues a write of `source` and returns at once.
    ///
    /// The source needs no alignment: the write is widened to the blocks around it. If the source
    /// changes before the write has ended, the stored bytes are unspecified.
    pub fn write(&self, source: HostSource) -> Result<Stored> {
        self.devices.refuse_if_down()?;
        if source.is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                "a tensor without bytes has nothing to store",
            ));
        }
        let len = source.len();
        let (source, head) = source.widened(self.devices.alignment());
        let version = self.reserve(source.len(), head, len)?;
        let transfer = self.begin_write(&source, len, &version.extents, std::iter::empty())?;
        Ok(Stored::new(transfer, version, len))
    }

    /// Queues a write of `source` that replaces the bytes of `stored`, and returns at once.
    ///
    /// The old bytes stay on the disk, and reads give them, until all new bytes are there; for a
    /// while both take space. If the overwrite fails or is cancelled, the old bytes stay. A tensor
    /// has one overwrite at a time: a second is refused with `Busy`.
    pub fn overwrite(&self, stored: &Stored, source: HostSource) -> Result<Overwrite> {
        self.devices.refuse_if_down()?;
        self.own_version(stored)?;
        refuse_other_len("an overwrite", source.len(), stored.len())?;
        let replacement = stored.replace()?;
        let len = source.len();
        let (source, head) = source.widened(self.devices.alignment());
        let version = self.reserve(source.len(), head, len)?;
        let extents = version.extents.clone();
        let is_wanted = replacement.is_wanted();
        let on_success = replacement.on_success(version, extents.len());
        let transfer = self.begin_write(&source, len, &extents, on_success)?;
        Ok(Overwrite::new(transfer, is_wanted))
    }

    /// Queues a read of the bytes of `stored` and returns at once.
    ///
    /// Its write must have succeeded. Before that the caller still has the bytes in memory.
    pub fn read(&self, stored: &Stored) -> Result<Pending> {
        self.devices.refuse_if_down()?;
        let version = self.own_version(stored)?;
        let slot = Arc::new(self.arena.slot(version.len())?);
        let transfer = self.begin_read(&version, &Landing::from(Arc::clone(&slot)), 0)?;
        Ok(Pending { transfer, slot, head: version.head, len: stored.len() })
    }

    /// Queues a read of the bytes of `stored` into `target`, which has the same length, and returns
    /// at once.
    ///
    /// The bytes go straight there, except the blocks at the ends, if the target begins at the same
    /// offset within a block of the disk as the source did. Otherwise they go through a slot. No
    /// byte around the target changes. The bytes of the target are unspecified until the read has
    /// succeeded.
    pub fn read_into(&self, stored: &Stored, target: HostTarget) -> Result<PendingInto> {
        self.devices.refuse_if_down()?;
        let version = self.own_version(stored)?;
        let len = target.len();
        refuse_other_len("a read", len, stored.len())?;
        let Version { head, .. } = *version;
        let landing =
            Landing::into_lent(target, head, version.len(), self.devices.alignment(), &self.arena)?;
        self.begin_read(&version, &landing, len).map(PendingInto)
    }

    /// Reserves the extents for a write of `whole_len` bytes. The caller's `len` bytes begin at
    /// `head`.
    fn reserve(&self, whole_len: usize, head: usize, len: usize) -> Result<Version> {
        let (mut extents, mut start) = (Vec::new(), 0);
        for (device, part_len) in stripe::shares(whole_len, &self.devices.candidates()?) {
            let own = |position: usize| position.clamp(start, start + part_len) - start;
            let own = self.verifies().then(|| own(head)..own(head + len));
            extents.push((device, self.devices[device].reserve(part_len, own)?));
            start += part_len;
        }
        Ok(Version { extents, head })
    }

    /// Queues the write of each part. If a part is refused, the parts before it are cancelled.
    fn begin_write(
        &self,
        source: &HostSource,
        lent_bytes: usize,
        extents: &[(usize, Arc<Extent>)],
        mut on_success: impl Iterator<Item = OnSuccess>,
    ) -> Result<Transfer> {
        let mut transfer = Transfer::new(Direction::Write, lent_bytes, &self.abandoned);
        let mut start = 0;
        for (device, extent) in extents {
            let part = source.part(start, extent.len() as usize);
            transfer.push(self.devices[*device].write(extent, part, on_success.next())?);
            start += extent.len() as usize;
        }
        self.note_queued(Direction::Write, start);
        Ok(transfer)
    }

    /// Queues the read of each part. If a part is refused, the parts before it are cancelled.
    fn begin_read(
        &self,
        version: &Version,
        landing: &Landing,
        lent_bytes: usize,
    ) -> Result<Transfer> {
        let mut transfer = Transfer::new(Direction::Read, lent_bytes, &self.abandoned);
        let mut start = 0;
        for (device, extent) in &version.extents {
            let part = landing.part(start, extent.len() as usize);
            transfer.push(self.devices[*device].read(extent, part)?);
            start += extent.len() as usize;
        }
        self.note_queued(Direction::Read, start);
        Ok(transfer)
    }

    fn note_queued(&self, direction: Direction, bytes: usize) {
        if self.is_beside {
            self.devices.note_queued_beside(direction, bytes as u64);
        }
    }

    /// The version of a tensor that is on the disks of this store.
    fn own_version(&self, stored: &Stored) -> Result<Arc<Version>> {
        let version = stored.version()?;
        let is_ours = |(device, extent): &(usize, Arc<Extent>)| {
            let device = self.devices.get(*device);
            device.is_some_and(|device| Arc::ptr_eq(device.file(), extent.file()))
        };
        if version.extents.iter().all(is_ours) {
            Ok(version)
        } else {
            let message = "this was written by another store; use it there";
            Err(Error::new(ErrorKind::Config, message))
        }
    }

    /// Gives the space of `stored` back; the same as dropping it.
    pub fn release(&self, stored: Stored) {
        drop(stored);
    }

    /// Gives the free space of the files back to the disks; returns the number of bytes.
    pub fn trim(&self) -> Result<u64> {
        self.devices.refuse_if_down()?;
        self.all_devices().map(|device| device.file().trim()).sum()
    }

    /// The devices of this store and of its store for memory of GPUs.
    fn all_devices(&self) -> impl Iterator<Item = &Device> {
        let for_gpus = self.for_gpus.get().map_or(&[][..], |store| &store.devices[..]);
        self.devices.iter().chain(for_gpus)
    }

    /// Bytes of memory that transfers use and callers do not hold: the slots, and the memory lent
    /// to abandoned transfers that have not ended.
    pub fn resident_bytes(&self) -> usize {
        // In a forked process a thread that does not exist may hold the lock of `abandoned`.
        if self.abandoned.lent_bytes() > 0 && !self.devices.is_forked() {
            self.abandoned.look();
        }
        self.arena.live_bytes() + self.abandoned.lent_bytes()
    }

    /// Returns true if checksums are taken of writes when they are queued, and compared with reads.
    pub fn verifies(&self) -> bool {
        self.devices.verifies()
    }

    /// Returns true if the address lies in a slot of this store.
    pub fn owns(&self, address: usize) -> bool {
        self.arena.contains(address)
    }

    /// Waits at most `limit` until an abandoned transfer has ended and released its memory. Returns
    /// `false` if there is none, `None` if the time is over.
    pub fn wait_for_abandoned(&self, limit: Duration) -> Option<bool> {
        if self.devices.is_forked() { Some(false) } else { self.abandoned.wait_for_one(limit) }
    }

    /// Returns true if the store has a directory; otherwise it refuses every write.
    pub fn has_directory(&self) -> bool {
        !self.devices.is_empty()
    }

    /// Returns `Unsupported` if the store has no directory.
    pub fn refuse_without_directory(&self) -> Result<()> {
        self.devices.refuse_without_directory()
    }

    /// The recent rates of the disks.
    pub fn rates(&self) -> Result<Rates> {
        self.devices.rates()
    }

    /// The counts of this store so far; `Closed` in a forked process, where the counts stand still.
    pub fn stats(&self) -> Result<Stats> {
        self.devices.refuse_if_forked()?;
        let sum = |direction| {
            let traffic = self.devices.iter().map(|device| device.statistics().traffic(direction));
            traffic.fold(Traffic::default(), Traffic::plus)
        };
        let engine = |device: &Device| (device.file().dir().to_owned(), device.engine_name());
        Ok(Stats {
            written: sum(Direction::Write),
            read: sum(Direction::Read),
            cancelled_count: self.abandoned.cancelled_count()
                + self.for_gpus.get().map_or(0, |store| store.abandoned.cancelled_count()),
            disk_used_bytes: self.all_devices().map(|device| device.file().used()).sum(),
            disk_reserved_bytes: self.all_devices().map(|device| device.file().reserved()).sum(),
            beside_written_bytes: self.devices.queued_beside_bytes(Direction::Write),
            beside_read_bytes: self.devices.queued_beside_bytes(Direction::Read),
            arena_live_bytes: self.arena.live_bytes() as u64,
            engines: self.devices.iter().map(engine).collect(),
        })
    }

    /// Refuses new work, ends the work that has begun, answers the rest with `Closed`. Idempotent.
    ///
    /// Slots that tensors use stay valid; the blocks on the disk are free.
    pub fn close(&self) {
        // After a fork the threads and rings are the parent's: the child must not wait for them.
        if self.devices.is_forked() {
            return;
        }
        if let Some(store) = self.for_gpus.get() {
            store.close();
        }
        self.devices.close();
    }
}

/// Refuses memory whose length differs from the stored length.
fn refuse_other_len(operation: &str, len: usize, stored_len: usize) -> Result<()> {
    if len == stored_len {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Config,
        format!("{operation} needs {stored_len} bytes, as many as are stored, not {len}"),
    ))
}

impl Drop for TensorStore {
    fn drop(&mut self) {
        if !self.devices.is_forked() {
            drop(self.for_gpus.take()); // A staging holds it too, so it may live longer.
        }
    }
}

impl Pending {
    /// The answer of the read.
    pub fn ticket(&self) -> &Transfer {
        &self.transfer
    }

    /// Cancels the read. Returns true if it had not begun. If it had begun, its slot is held until
    /// the last piece has ended and the ticket is answered.
    pub fn cancel(&self) -> bool {
        self.transfer.cancel()
    }

    /// The bytes, once the ticket has answered.
    pub fn restored(&self) -> Result<Restored> {
        match self.transfer.answer() {
            Some(answer) => answer?,
            None => {
                return Err(Error::new(ErrorKind::Config, "the read has not ended; wait for it"));
            }
        }
        Ok(Restored { slot: Arc::clone(&self.slot), head: self.head, len: self.len })
    }
}

impl PendingInto {
    /// The answer of the read. If it succeeded, the bytes are in the caller's memory.
    pub fn ticket(&self) -> &Transfer {
        &self.0
    }

    /// Cancels the read. Returns true if it had not begun, so that the memory is free now. If it
    /// had begun, the ticket is answered after the last piece has ended.
    pub fn cancel(&self) -> bool {
        self.0.cancel()
    }
}

impl Restored {
    /// Address of the first byte. Modulo the alignment it equals the address of the source.
    pub fn address(&self) -> *mut u8 {
        self.slot.address().wrapping_add(self.head)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        HostSource::from(Arc::clone(&self.slot)).copy_out(self.head, &mut bytes);
        bytes
    }
}
