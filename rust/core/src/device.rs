//! One directory of a store: its file, its queue, its engine, and what is thought of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::{Directory, StoreConfig};
use crate::direction::Direction;
use crate::disk::spill_file::{Extent, Quota, SpillFile};
use crate::disk::statistics::Meter;
use crate::disk::stripe::Lane;
use crate::engine;
use crate::engine::contract::IoEngine;
use crate::error::Result;
use crate::memory::buffer::IoBuf;
use crate::queue::{Backlog, Job, Request, SubmitQueue};
use crate::ticket::{Ticket, ticket};

/// A spill file with the engine that serves it.
pub struct Device {
    file: Arc<SpillFile>,
    queue: Arc<SubmitQueue>,
    meter: Arc<Meter>,
    engine: Mutex<Box<dyn IoEngine>>,
    engine_name: &'static str,
    /// Bytes of writes that have not ended.
    backlog: Arc<AtomicU64>,
}

impl Device {
    /// Opens the file and starts the engine; the sentences say what was given up.
    pub fn open(
        dir: &Directory,
        config: &StoreConfig,
        quota: &Arc<Quota>,
    ) -> Result<(Self, Vec<String>)> {
        let (file, file_note) = SpillFile::open(&dir.path, config.direct_io, quota)?;
        let queue = SubmitQueue::new(config.queue_capacity)?;
        let meter = Arc::new(Meter::default());
        let backend = dir.backend.as_ref().unwrap_or(&config.backend);
        let (engine, note) = engine::open(backend, dir.tuning, file.alignment(), &queue, &meter)?;
        let (engine_name, engine) = (engine.name(), Mutex::new(engine));
        let backlog = Arc::default();
        let device = Self { file, queue, meter, engine, engine_name, backlog };
        Ok((device, file_note.into_iter().chain(note).collect()))
    }

    /// The file.
    pub fn file(&self) -> &Arc<SpillFile> {
        &self.file
    }

    /// The traffic.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The name of the engine that users see.
    pub fn engine_name(&self) -> &'static str {
        self.engine_name
    }

    /// How busy and how fast it is.
    pub fn lane(&self, device: usize) -> Lane {
        let backlog_bytes = self.backlog.load(Ordering::Relaxed);
        Lane { device, backlog_bytes, ns_per_byte: self.meter.ns_per_byte() }
    }

    /// Why it is out of use, if it is.
    pub fn out_of_use(&self) -> Option<String> {
        let failure = self.meter.distrust()?;
        let dir = self.file.dir().display();
        Some(format!(
            "{dir} is out of use after several failed writes in a row; the last said: {failure}; \
             look at the disk (dmesg), then open a new store"
        ))
    }

    /// Reserves space for `buffer` and queues its write.
    pub fn write(&self, buffer: IoBuf) -> Result<(Arc<Extent>, (Request, Ticket))> {
        let len = buffer.len() as u64;
        let extent = Arc::new(self.file.reserve(len)?);
        let backlog = Some(Backlog::new(&self.backlog, len));
        let part = self.push(Direction::Write, &extent, buffer, backlog)?;
        Ok((extent, part))
    }

    /// Queues a read of `extent` into `buffer`.
    pub fn read(&self, extent: &Arc<Extent>, buffer: IoBuf) -> Result<(Request, Ticket)> {
        self.push(Direction::Read, extent, buffer, None)
    }

    fn push(
        &self,
        direction: Direction,
        extent: &Arc<Extent>,
        buffer: IoBuf,
        backlog: Option<Backlog>,
    ) -> Result<(Request, Ticket)> {
        let (completer, ticket) = ticket();
        let extent = Arc::clone(extent);
        let request = Request::new(Job { direction, extent, buffer, completer, backlog });
        self.queue.push(&request)?;
        Ok((request, ticket))
    }

    /// Stops a simulated disk.
    pub fn pause(&self) {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).pause();
    }

    /// Lets a paused simulated disk move.
    pub fn resume(&self) {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).resume();
    }

    /// Ends what has begun and gives the blocks back.
    pub fn close(&self) {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).close();
        // Refused truncation leaves the blocks until the last handle is dropped.
        let _kept = self.file.discard();
    }

    /// In a forked process: forgets the engine, whose threads are the parent's; joining them would
    /// wait for ever.
    pub fn leave_to_parent(self) {
        std::mem::forget(self.engine);
    }
}
