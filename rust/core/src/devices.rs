//! The devices of a store. Stores beside each other share them.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::device::Device;
use crate::direction::Direction;
use crate::disk::stripe::Candidate;
use crate::error::{Error, ErrorKind, Result};

/// One device for each directory. They close with the last store on them, if not before.
pub struct Devices {
    all: Vec<Device>,
    /// The largest alignment of all devices: a tensor may lie on all of them.
    alignment: usize,
    verify: bool,
    closed: AtomicBool,
    process: u32,
    fallbacks: Vec<String>,
    /// Bytes of writes and of reads that other stores than the first have queued.
    queued_beside_bytes: [AtomicU64; 2],
}

/// The recent rates of the disks, in bytes per second of the time in which they were busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Rate of writes; `None` before enough was written to tell, 0 without a directory.
    pub write: Option<f64>,
    /// Rate of reads; `None` before enough was read to tell, 0 without a directory.
    pub read: Option<f64>,
}

impl Devices {
    /// Devices that were opened, with the fallbacks taken while opening.
    pub fn new(devices: Vec<Device>, verify: bool, fallbacks: Vec<String>) -> Self {
        let alignments = devices.iter().map(|device| device.file().alignment());
        Self {
            alignment: alignments.max().unwrap_or(1),
            all: devices,
            verify,
            closed: AtomicBool::new(false),
            process: std::process::id(),
            fallbacks,
            queued_beside_bytes: Default::default(),
        }
    }

    /// The offset and the length of each extent are multiples of this.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Returns true if checksums are taken of writes and compared with reads.
    pub fn verifies(&self) -> bool {
        self.verify
    }

    /// The fallbacks that were taken while opening, one sentence each.
    pub fn fallbacks(&self) -> &[String] {
        &self.fallbacks
    }

    /// Counts bytes that another store than the first has queued.
    pub fn note_queued_beside(&self, direction: Direction, bytes: u64) {
        self.queued_beside_bytes[direction as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// The sum of the bytes that [`note_queued_beside`](Self::note_queued_beside) counted.
    pub fn queued_beside_bytes(&self, direction: Direction) -> u64 {
        self.queued_beside_bytes[direction as usize].load(Ordering::Relaxed)
    }

    /// Refuses new work and ends the work that has begun. Idempotent; not for a forked process.
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.all.iter().for_each(Device::close);
        }
    }

    /// The recent rates of the disks. Directories work in parallel, so their rates are added.
    /// Devices that are out of use, or moved too little to tell, add nothing.
    pub fn rates(&self) -> Result<Rates> {
        self.refuse_if_forked()?;
        if self.all.is_empty() {
            return Ok(Rates { write: Some(0.0), read: Some(0.0) });
        }
        let sum = |direction| {
            let in_use = self.all.iter().filter(|device| device.out_of_use().is_none());
            in_use.filter_map(|device| device.rate(direction)).reduce(|sum, rate| sum + rate)
        };
        Ok(Rates { write: sum(Direction::Write), read: sum(Direction::Read) })
    }

    /// Returns true if this process was forked from the process that opened the devices.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Returns `Closed` in a forked process, which has copies of the devices but not their threads.
    pub fn refuse_if_forked(&self) -> Result<()> {
        if self.is_forked() {
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

    /// Returns `Closed` if the devices take no new work.
    pub fn refuse_if_down(&self) -> Result<()> {
        self.refuse_if_forked()?;
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed; open a new one"));
        }
        Ok(())
    }

    /// Returns `Unsupported` if there is no device.
    pub fn refuse_without_directory(&self) -> Result<()> {
        if self.all.is_empty() {
            let message = "nothing is written, because no directory was given";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(())
    }

    /// The devices that may be written to. Devices without space are among them only if all lack
    /// space.
    pub fn candidates(&self) -> Result<Vec<Candidate>> {
        self.refuse_without_directory()?;
        let numbered = || self.all.iter().enumerate();
        let in_use: Vec<_> =
            numbered().filter(|(_, device)| device.out_of_use().is_none()).collect();
        if in_use.is_empty() {
            let reasons: Vec<_> =
                numbered().filter_map(|(_, device)| device.out_of_use()).collect();
            return Err(Error::new(ErrorKind::Io, reasons.join("; ")));
        }
        let candidate = |&(index, device): &(usize, &Device)| device.candidate(index);
        if let [only] = &in_use[..] {
            return Ok(vec![candidate(only)]);
        }
        let with_space: Vec<_> =
            in_use.iter().filter(|(_, device)| !device.leaves_out_next()).map(candidate).collect();
        if with_space.is_empty() {
            return Ok(in_use.iter().map(candidate).collect());
        }
        Ok(with_space)
    }
}

impl Deref for Devices {
    type Target = [Device];

    fn deref(&self) -> &[Device] {
        &self.all
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        if self.is_forked() {
            self.all.drain(..).for_each(Device::leave_to_parent);
        } else {
            self.close();
        }
    }
}
