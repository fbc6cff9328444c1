//! The measurement behind `ssdtrain bench`: the rate of one setting in one directory.
//!
//! All settings share one file and one set of buffers, so that they differ in nothing else. The
//! first write of a block costs the file system an allocation: write every request once before a
//! comparison.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{Backend, DirectIo, Tuning};
use crate::direction::Direction;
use crate::disk::spill_file::{Extent, Quota, SpillFile};
use crate::engine;
use crate::engine::contract::{IoEngine, Setup};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::{Arena, PAGE_BYTES, Slot};
use crate::memory::host::{HostSource, HostTarget};
use crate::memory::landing::Landing;
use crate::queue::{Job, JobMemory, Request, SubmitQueue};
use crate::ticket::{Ticket, ticket};

/// Size of one request, like a tensor that is worth a write.
pub const REQUEST_BYTES: usize = 16 << 20;

/// An unnamed file and memory of its size. Runs move bytes between them.
#[derive(Debug)]
pub struct Probe {
    pairs: Vec<(Arc<Extent>, Arc<Slot>)>,
    alignment: usize,
}

/// Requests on their way through an engine of this run alone.
pub struct ProbeRun {
    // The first field, so that an early drop ends the engine while its tickets live.
    engine: Box<dyn IoEngine>,
    tickets: Vec<Ticket>,
    ended_count: usize,
    begin: Instant,
}

impl Probe {
    /// Opens a file for `request_count` requests in `dir`, bypassing the page cache.
    pub fn open(dir: &Path, request_count: usize) -> Result<Self> {
        let (file, _) = SpillFile::open(dir, DirectIo::Required, &Quota::new(None))?;
        let arena = Arena::new(0)?;
        let pair = |index: usize| {
            let slot = Arc::new(arena.slot(REQUEST_BYTES)?);
            fill(&HostTarget::from(Arc::clone(&slot)), index);
            Ok((Arc::new(file.reserve(REQUEST_BYTES as u64)?), slot))
        };
        let pairs = (0..request_count).map(pair).collect::<Result<_>>()?;
        Ok(Self { pairs, alignment: file.alignment() })
    }

    /// Addresses, offsets and lengths of direct I/O in the directory are multiples of this.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Begins to move the requests of `range`, all at once. The time counts from here.
    pub fn begin(
        &self,
        backend: &Backend,
        tuning: Tuning,
        direction: Direction,
        range: Range<usize>,
    ) -> Result<ProbeRun> {
        let count = self.pairs.len();
        let pairs = self.pairs.get(range.clone()).filter(|pairs| !pairs.is_empty());
        let pairs = pairs.ok_or_else(|| {
            let message =
                format!("requests {range:?} of {count} cannot be measured; name some of them");
            Error::new(ErrorKind::Config, message)
        })?;
        let setup = Setup::new(tuning, self.alignment, count)?;
        let queue = Arc::clone(&setup.queue);
        let (engine, _) = engine::open(backend, setup)?;
        let begin = Instant::now();
        let tickets: Result<_> = pairs.iter().map(|pair| push(&queue, direction, pair)).collect();
        Ok(ProbeRun { engine, tickets: tickets?, ended_count: 0, begin })
    }
}

impl ProbeRun {
    /// Waits at most `limit` for the next request. Returns the time of all requests after the last.
    pub fn wait_for(&mut self, limit: Duration) -> Option<Result<Duration>> {
        let Some(ticket) = self.tickets.get(self.ended_count) else {
            return Some(Ok(self.begin.elapsed()));
        };
        match ticket.wait_for(limit)? {
            Ok(()) => self.ended_count += 1,
            Err(error) => return Some(Err(error)),
        }
        (self.ended_count == self.tickets.len()).then(|| Ok(self.begin.elapsed()))
    }

    /// The name of the engine that moves the requests.
    pub fn engine_name(&self) -> &'static str {
        self.engine.name()
    }
}

fn push(
    queue: &SubmitQueue,
    direction: Direction,
    (extent, slot): &(Arc<Extent>, Arc<Slot>),
) -> Result<Ticket> {
    let (completer, ticket) = ticket();
    let memory = match direction {
        Direction::Read => JobMemory::Into(Landing::from(Arc::clone(slot))),
        Direction::Write => JobMemory::From(HostSource::from(Arc::clone(slot))),
    };
    queue.push(&Request::new(Job::new(Arc::clone(extent), memory, completer)))?;
    Ok(ticket)
}

/// Noise that no drive can compress, with a number in each page: some drives store equal pages
/// once.
fn fill(target: &HostTarget, seed: usize) {
    let mut page = [0; PAGE_BYTES];
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    for chunk in page.chunks_exact_mut(8) {
        // Marsaglia's xorshift.
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    for start in (0..target.len()).step_by(PAGE_BYTES) {
        page[..8].copy_from_slice(&(seed * target.len() + start).to_ne_bytes());
        target.copy_in(start, &page);
    }
}

#[cfg(test)]
mod tests {
    use super::{HostTarget, Probe, ProbeRun, REQUEST_BYTES};
    use crate::config::{Backend, Tuning};
    use crate::direction::Direction;
    use crate::error::ErrorKind;
    use std::sync::Arc;
    use std::time::Duration;

    fn finish(mut run: ProbeRun) {
        let limit = Duration::from_secs(60);
        let all = loop {
            if let Some(answer) = run.wait_for(limit) {
                break answer.unwrap();
            }
        };
        assert!(all > Duration::ZERO);
    }

    #[test]
    fn written_bytes_come_back_under_every_setting() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let probe = Probe::open(dir.path(), 2).unwrap();
        assert!(probe.alignment().is_power_of_two());
        let tuning = Tuning { queue_depth: 3, piece_bytes: 1 << 20 };
        finish(probe.begin(&Backend::Psync, tuning, Direction::Write, 0..2).unwrap());
        let (extent, slot) = &probe.pairs[1];
        let memory = HostTarget::from(Arc::clone(slot));
        let mut written = vec![0; REQUEST_BYTES];
        memory.copy_out(0, &mut written);
        let file = rustix::fs::fstat(extent.file()).unwrap();
        assert!(file.st_blocks as usize * 512 >= 2 * REQUEST_BYTES);
        for backend in [Backend::Auto, Backend::Psync] {
            memory.copy_in(0, &vec![0; REQUEST_BYTES]);
            let run = probe.begin(&backend, tuning, Direction::Read, 0..2).unwrap();
            assert!(["io_uring", "psync"].contains(&run.engine_name()));
            finish(run);
            let mut read = vec![0; REQUEST_BYTES];
            memory.copy_out(0, &mut read);
            assert!(read == written, "the bytes of a probe came back changed");
        }
    }

    #[test]
    fn requests_that_are_not_there_are_refused() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let probe = Probe::open(dir.path(), 1).unwrap();
        for range in [0..2, 1..1, 0..0] {
            let run = probe.begin(&Backend::Psync, Tuning::default(), Direction::Read, range);
            assert_eq!(run.err().unwrap().kind(), ErrorKind::Config);
        }
    }
}
