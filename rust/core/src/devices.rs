//! The devices of a store, which all stores beside each other share.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::device::Device;
use crate::direction::Direction;
use crate::disk::stripe::Candidate;
use crate::error::{Error, ErrorKind, Result};

/// One device for each directory; closed with the last store on them, if not before.
pub struct Devices {
    all: Vec<Device>,
    /// Of every device: a tensor may lie on all of them.
    alignment: usize,
    verify: bool,
    closed: AtomicBool,
    process: u32,
    fallbacks: Vec<String>,
    /// What other stores than the one that opened them gave to be written, and to be read.
    queued_beside_bytes: [AtomicU64; 2],
}

/// What the disks did of late, in bytes per second of the time in which they were busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of writes; `None` before enough was written to tell.
    pub write: Option<f64>,
    /// Of reads; `None` before enough was read to tell.
    pub read: Option<f64>,
}

impl Devices {
    /// Devices that were opened, with the fallbacks that this took.
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

    /// What the place and the length of each extent are a multiple of.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Whether what is written is summed up, and compared when it is read.
    pub fn verifies(&self) -> bool {
        self.verify
    }

    /// The fallbacks that were taken while opening, one sentence each.
    pub fn fallbacks(&self) -> &[String] {
        &self.fallbacks
    }

    /// Counts what another store than the first one gave to be moved.
    pub fn note_queued_beside(&self, direction: Direction, bytes: u64) {
        self.queued_beside_bytes[direction as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// The sum of that.
    pub fn queued_beside_bytes(&self, direction: Direction) -> u64 {
        self.queued_beside_bytes[direction as usize].load(Ordering::Relaxed)
    }

    /// Refuses new work and ends what has begun. Idempotent; not for a forked process.
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.all.iter().for_each(Device::close);
        }
    }

    /// What the disks did of late. Directories work in parallel, so their rates are summed up;
    /// those that are out of use, or moved too little to tell, add nothing.
    pub fn rates(&self) -> Result<Rates> {
        self.refuse_if_forked()?;
        let sum = |direction| {
            let in_use = self.all.iter().filter(|device| device.out_of_use().is_none());
            in_use.filter_map(|device| device.rate(direction)).reduce(|sum, rate| sum + rate)
        };
        Ok(Rates { write: sum(Direction::Write), read: sum(Direction::Read) })
    }

    /// Whether this process was forked from the one that opened them.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Raises `Closed` in a forked process, which has copies, but not the threads.
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

    /// Raises `Closed` if they take no new work.
    pub fn refuse_if_down(&self) -> Result<()> {
        self.refuse_if_forked()?;
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed; open a new one"));
        }
        Ok(())
    }

    /// The devices that may be written to; those without space only if there are no others.
    pub fn candidates(&self) -> Result<Vec<Candidate>> {
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
