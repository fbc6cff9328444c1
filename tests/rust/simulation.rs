//! The whole store on simulated disks, driven by seeds and held to a model.
//!
//! Each seed makes a plan (faults, sizes, queue, directories, threads) and a schedule of writes,
//! overwrites, waits, reads into slots and into lent memory, cancellations, releases and perhaps a
//! close in the middle. Whatever a read returns must be what was written; an error must be one that
//! the plan can give; in the end everything is given back. `SSDTRAIN_SEED` runs one seed, or with
//! `SSDTRAIN_SCHEDULES` so many from it on.

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ssdtrain_core::{
    Backend, DirectIo, Error, ErrorKind, Faults, HostSource, Overwrite, PauseSwitch, Pending,
    PendingInto, Restored, StoreConfig, Stored, TensorStore, Transfer, Tuning,
};

mod frame;
mod memory;
use frame::Frame;
use memory::{Memory, lend};

/// A read that a plan may fail succeeds within so many tries, or the plan is not what failed it.
const TRIES_MAX: usize = 300;
/// Nothing here waits for a disk: an answer that takes longer will never come.
const PATIENCE: Duration = Duration::from_secs(120);

/// Equal seeds give equal numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A rate for a fault: half of the plans are without it.
    fn rate(&mut self, most: f64) -> f64 {
        if self.one_in(2) { 0.0 } else { most * self.below(1000) as f64 / 1000.0 }
    }
}

/// What a schedule runs on.
#[derive(Clone, Debug)]
struct Plan {
    seed: u64,
    faults: Faults,
    tuning: Tuning,
    dir_count: usize,
    thread_count: usize,
    step_count: usize,
    queue_capacity: usize,
    max_disk_bytes: Option<u64>,
    verify: bool,
    /// Each request is waited for at once: with one thread, such a schedule repeats exactly.
    lockstep: bool,
    /// A thread closes the store before its schedule ends.
    closes: bool,
}

impl Plan {
    fn new(seed: u64, threads: &[usize]) -> Self {
        let mut random = Random(seed);
        let piece_bytes = random.choose(&[512, 1024, 4096, 16384]);
        let queue_depth = random.choose(&[1, 2, 4]);
        let lockstep = random.one_in(4);
        let max_disk_bytes = random.choose(&[16, 64, 1024]) * piece_bytes as u64;
        Self {
            seed,
            faults: Faults { seed, ..Faults::default() },
            tuning: Tuning { queue_depth, piece_bytes },
            dir_count: random.choose(&[1, 1, 2, 3]),
            thread_count: random.choose(threads),
            step_count: random.choose(&[10, 40, 100]),
            queue_capacity: random.choose(&[1, 2, 4, 1024]),
            max_disk_bytes: Some(max_disk_bytes),
            verify: random.one_in(2),
            lockstep,
            closes: random.one_in(8),
        }
    }

    fn with_faults(mut self) -> Self {
        let mut random = Random(self.seed ^ 1);
        let pieces = 1 + random.below(200) as u64;
        self.faults = Faults {
            seed: self.seed,
            short_rate: random.rate(0.5),
            zero_rate: random.rate(0.02),
            io_error_rate: random.rate(0.05),
            space_error_rate: random.rate(0.05),
            retry_rate: random.rate(0.4),
            bit_flip_rate: if self.verify { random.rate(0.05) } else { 0.0 },
            late_rate: random.rate(0.8),
            capacity_bytes: random.one_in(6).then(|| pieces * self.tuning.piece_bytes as u64),
            gone_after_count: random.one_in(8).then_some(pieces),
            pause: if random.one_in(3) { PauseSwitch::paused() } else { PauseSwitch::default() },
        };
        self
    }

    fn open(&self, dir: &tempfile::TempDir) -> TensorStore {
        // Several files in one directory behave as in several: none has a name.
        let mut config = StoreConfig::new(vec![dir.path(); self.dir_count]).tuned(self.tuning);
        config.backend = Backend::Simulated(self.faults.clone());
        config.direct_io = DirectIo::Optional;
        config.max_disk_bytes = self.max_disk_bytes;
        config.queue_capacity = self.queue_capacity;
        config.verify = self.verify;
        // So little that pages are given back again and again while slots are in use.
        config.arena_retain_bytes = self.tuning.piece_bytes;
        TensorStore::open(&config).expect("a simulated store opens")
    }

    /// Whether this plan has a device that fails a piece in this way.
    fn can_fail_with(&self, error: &Error, writes: bool) -> bool {
        let faults = &self.faults;
        match (error.kind(), error.errno()) {
            (ErrorKind::Io, Some(libc::EIO)) => faults.io_error_rate > 0.0,
            (ErrorKind::Io, Some(libc::ENODEV)) => faults.gone_after_count.is_some(),
            (ErrorKind::Io, None) => {
                let says = |what| error.to_string().contains(what);
                let moves_nothing = faults.zero_rate > 0.0;
                let is_faulty = moves_nothing
                    || faults.io_error_rate > 0.0
                    || faults.gone_after_count.is_some();
                (moves_nothing && says("moved no bytes"))
                    || (writes && is_faulty && says("out of use"))
            }
            (ErrorKind::NoSpace, Some(libc::ENOSPC)) => {
                writes && (faults.space_error_rate > 0.0 || faults.capacity_bytes.is_some())
            }
            (ErrorKind::NoSpace, Some(libc::EDQUOT | libc::EFBIG)) => {
                writes && faults.space_error_rate > 0.0
            }
            (ErrorKind::Corrupt, None) => !writes && faults.bit_flip_rate > 0.0,
            _ => false,
        }
    }
}

/// Something written: what must come back, and what must be let go.
struct Written {
    stored: Stored,
    /// What may come back: one pattern, or several after overwrites whose end nobody saw.
    seeds: Vec<u64>,
    source: Weak<Memory>,
    cancelled: bool,
    overwriting: Option<Overwriting>,
}

struct Overwriting {
    overwrite: Overwrite,
    seed: u64,
    source: Weak<Memory>,
    cancelled: bool,
}

struct Reading {
    into: Into,
    seeds: Vec<u64>,
    cancelled: bool,
}

/// Where a read goes.
enum Into {
    Slot(Pending),
    Lent(PendingInto, Arc<Frame>),
}

impl Into {
    fn ticket(&self) -> &Transfer {
        match self {
            Self::Slot(pending) => pending.ticket(),
            Self::Lent(pending, _) => pending.ticket(),
        }
    }

    fn cancel(&self) -> bool {
        match self {
            Self::Slot(pending) => pending.cancel(),
            Self::Lent(pending, _) => pending.cancel(),
        }
    }
}

/// One thread's schedule and model.
struct Driver<'a> {
    plan: &'a Plan,
    store: &'a TensorStore,
    closing: &'a AtomicBool,
    random: Random,
    written: Vec<Written>,
    reading: Vec<Reading>,
    /// Read and kept: nobody may write into these bytes any more.
    restored: Vec<(Restored, u64)>,
}

impl<'a> Driver<'a> {
    fn new(plan: &'a Plan, store: &'a TensorStore, closing: &'a AtomicBool, thread: usize) -> Self {
        let random = Random(plan.seed.wrapping_add(thread as u64 + 1).wrapping_mul(0x2545_f491));
        let (written, reading, restored) = (Vec::new(), Vec::new(), Vec::new());
        Self { plan, store, closing, random, written, reading, restored }
    }

    fn run(&mut self, closes: bool) {
        let close_at = if closes { self.random.below(self.plan.step_count) } else { usize::MAX };
        for step in 0..self.plan.step_count {
            if step == close_at {
                self.close();
            }
            self.step();
        }
        if !self.closing.load(Ordering::SeqCst) && self.random.one_in(4) && closes {
            self.close();
        }
        self.settle();
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..25 => self.write(),
            25..37 => self.overwrite(),
            37..45 => self.wait_for_a_write(),
            45..68 => self.begin_read(),
            68..80 => self.finish_read(),
            80..85 => self.cancel_write(),
            85..93 => self.release(),
            93..96 => self.give_up_read(),
            96..99 => self.let_go_of_restored(),
            _ => self.plan.faults.pause.resume(),
        }
    }

    fn pick(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| self.random.below(count))
    }

    /// An error must be one that the plan, this thread or a close has caused.
    fn check(&self, error: &Error, writes: bool, cancelled: bool) {
        let caused = match error.kind() {
            ErrorKind::Cancelled => cancelled,
            ErrorKind::Closed => self.closing.load(Ordering::SeqCst),
            _ => self.plan.can_fail_with(error, writes),
        };
        assert!(caused, "an error that nothing caused: {error:?}");
    }

    fn write(&mut self) {
        let block = self.plan.tuning.piece_bytes;
        let len = match self.random.below(4) {
            0 => 1 + self.random.below(1100),
            1 => block * (1 + self.random.below(8)),
            _ => 1 + self.random.below(block * 8),
        };
        let (seed, source, region) = self.source(len);
        match self.store.write(region) {
            Ok(stored) => {
                assert_eq!(stored.len(), len);
                let (seeds, overwriting) = (vec![seed], None);
                let written = Written { stored, seeds, source, cancelled: false, overwriting };
                self.written.push(written);
                if self.plan.lockstep {
                    self.wait_for(self.written.len() - 1);
                }
            }
            Err(error) => self.check_refused(&error, &source),
        }
    }

    /// Memory to write from: its pattern, when it is let go of, and the loan of it.
    fn source(&mut self, len: usize) -> (u64, Weak<Memory>, HostSource) {
        let distance = self.random.choose(&[0, 0, 1, 64, 511, 512, 4095]);
        let seed = self.random.next();
        let memory = Memory::new(seed, len, distance);
        (seed, Arc::downgrade(&memory), lend(&memory, 0))
    }

    fn check_refused(&self, error: &Error, source: &Weak<Memory>) {
        let at_the_door = error.kind() == ErrorKind::Busy
            || error.kind() == ErrorKind::OverBound
            || error.kind() == ErrorKind::NoSpace && error.errno().is_none();
        if !at_the_door {
            self.check(error, true, false);
        }
        assert_eq!(source.strong_count(), 0, "a refused write keeps its source");
    }

    fn overwrite(&mut self) {
        let Some(index) = self.pick(self.written.len()) else { return };
        self.look(index);
        let (seed, source, region) = self.source(self.written[index].stored.len());
        let before = self.written[index].stored.ticket().answer();
        match self.store.overwrite(&self.written[index].stored, region) {
            Ok(overwrite) => {
                // One before it has ended meanwhile, at the latest in the moment before its answer.
                if let Some(one) = &self.written[index].overwriting {
                    one.overwrite.ticket().wait_for(PATIENCE).expect("two at a time").ok();
                    self.look(index);
                }
                let overwriting = Overwriting { overwrite, seed, source, cancelled: false };
                self.written[index].overwriting = Some(overwriting);
                if self.plan.lockstep {
                    self.wait_for_overwrite(index);
                }
            }
            Err(error) => match error.kind() {
                ErrorKind::Config => {
                    assert!(before.is_none(), "{error}");
                    assert_eq!(source.strong_count(), 0, "a refused write keeps its source");
                }
                ErrorKind::Cancelled => {
                    self.check(&error, true, self.written[index].cancelled);
                }
                _ => self.check_refused(&error, &source),
            },
        }
    }

    /// Takes notice of an overwrite that has ended.
    fn look(&mut self, index: usize) {
        let ended = |one: &mut Overwriting| one.overwrite.ticket().is_done();
        let Some(overwriting) = self.written[index].overwriting.take_if(ended) else { return };
        let Overwriting { overwrite, seed, source, cancelled } = overwriting;
        assert_eq!(source.strong_count(), 0, "an answered overwrite keeps its source");
        match overwrite.ticket().wait() {
            Ok(()) => self.written[index].seeds = vec![seed],
            Err(error) => self.check(&error, true, cancelled),
        }
    }

    fn wait_for_overwrite(&mut self, index: usize) {
        self.plan.faults.pause.resume();
        if let Some(one) = &self.written[index].overwriting {
            one.overwrite.ticket().wait_for(PATIENCE).expect("an overwrite is answered").ok();
        }
        self.look(index);
    }

    fn wait_for_a_write(&mut self) {
        if let Some(index) = self.pick(self.written.len()) {
            self.wait_for(index);
        }
    }

    /// Waits for a write; whether it ended well.
    fn wait_for(&self, index: usize) -> bool {
        self.plan.faults.pause.resume();
        let written = &self.written[index];
        let answer = written.stored.ticket().wait_for(PATIENCE).expect("a write is answered");
        assert_eq!(written.source.strong_count(), 0, "an answered write keeps its source");
        if let Err(error) = &answer {
            self.check(error, true, written.cancelled);
        }
        answer.is_ok()
    }

    fn begin_read(&mut self) {
        let Some(index) = self.pick(self.written.len()) else { return };
        self.look(index);
        let distance = self.random.choose(&[0, 1, 64, 511, 512, 4095]);
        let into_slot = self.random.one_in(2);
        let written = &self.written[index];
        let before = written.stored.ticket().answer();
        let begun = if into_slot {
            self.store.read(&written.stored).map(Into::Slot)
        } else {
            let frame = Frame::new(written.stored.len(), distance);
            let pending = self.store.read_into(&written.stored, frame.lend());
            pending.map(|pending| Into::Lent(pending, frame))
        };
        match begun {
            Ok(into) => {
                assert!(!matches!(before, Some(Err(_))), "read what was never written");
                let new = written.overwriting.iter().map(|one| one.seed);
                let seeds = written.seeds.iter().copied().chain(new).collect();
                self.reading.push(Reading { into, seeds, cancelled: false });
                if self.plan.lockstep {
                    self.finish(self.reading.len() - 1);
                }
            }
            Err(error) => match error.kind() {
                ErrorKind::Busy => {}
                ErrorKind::Config => assert!(before.is_none(), "{error}"),
                _ => self.check(&error, true, written.cancelled),
            },
        }
    }

    fn finish_read(&mut self) {
        if let Some(index) = self.pick(self.reading.len()) {
            self.finish(index);
        }
    }

    fn finish(&mut self, index: usize) {
        self.plan.faults.pause.resume();
        let Reading { into, seeds, cancelled } = self.reading.swap_remove(index);
        let answer = into.ticket().wait_for(PATIENCE).expect("a read is answered");
        let bytes = match &into {
            Into::Slot(pending) => pending.restored().map(|restored| restored.to_vec()),
            // Looked at after a failure too: nothing around the target may have been written.
            Into::Lent(_, frame) => answer.map(|()| frame.bytes()).inspect_err(|_| {
                frame.bytes();
            }),
        };
        match bytes {
            Ok(bytes) => {
                let seed = seeds.iter().copied().find(|&seed| is_pattern(seed, &bytes));
                let seed = seed.expect("other bytes came back");
                if let Into::Slot(pending) = into
                    && self.random.one_in(3)
                {
                    self.restored.push((pending.restored().unwrap(), seed));
                }
            }
            Err(error) => self.check(&error, false, cancelled),
        }
    }

    fn cancel_write(&mut self) {
        let Some(index) = self.pick(self.written.len()) else { return };
        self.look(index);
        let drops_handle = self.random.one_in(3);
        let written = &mut self.written[index];
        if let Some(mut one) = written.overwriting.take() {
            one.cancelled = true;
            if one.overwrite.cancel() {
                assert_eq!(one.source.strong_count(), 0, "a cancelled overwrite keeps its source");
            } else if drops_handle {
                // It may end well or not, and nobody sees it.
                written.seeds.push(one.seed);
                return;
            }
            written.overwriting = Some(one);
            return;
        }
        let answered = written.stored.ticket().is_done();
        written.cancelled |= !answered;
        if written.stored.cancel() {
            assert!(!answered, "cancelled after its end");
            assert_eq!(written.source.strong_count(), 0, "a cancelled write keeps its source");
        }
    }

    fn release(&mut self) {
        if let Some(index) = self.pick(self.written.len()) {
            self.store.release(self.written.swap_remove(index).stored);
        }
    }

    fn give_up_read(&mut self) {
        let Some(index) = self.pick(self.reading.len()) else { return };
        if self.random.one_in(2) {
            self.reading[index].cancelled = true;
            self.reading[index].into.cancel();
        } else {
            self.reading.swap_remove(index);
        }
    }

    fn let_go_of_restored(&mut self) {
        if let Some(index) = self.pick(self.restored.len()) {
            let (restored, seed) = self.restored.swap_remove(index);
            assert!(is_pattern(seed, &restored.to_vec()), "kept bytes changed");
        }
    }

    fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.store.close();
        let tickets = self.written.iter().map(|one| one.stored.ticket());
        let overwrites = self.written.iter().filter_map(|one| one.overwriting.as_ref());
        let overwrites = overwrites.map(|one| one.overwrite.ticket());
        let reads = self.reading.iter().map(|one| one.into.ticket());
        for ticket in tickets.chain(overwrites).chain(reads) {
            assert!(ticket.is_done(), "a closed store leaves a ticket without an answer");
        }
    }

    /// The end of a schedule: what was written well is there, whatever happened.
    fn settle(&mut self) {
        while !self.reading.is_empty() {
            self.finish(self.reading.len() - 1);
        }
        let gone = self.plan.faults.gone_after_count.is_some();
        while !self.written.is_empty() {
            let last = self.written.len() - 1;
            self.wait_for_overwrite(last);
            if self.wait_for(last) && !gone && !self.closing.load(Ordering::SeqCst) {
                self.must_be_readable(last);
            }
            self.written.pop();
        }
        while !self.restored.is_empty() {
            self.let_go_of_restored();
        }
    }

    fn must_be_readable(&self, index: usize) {
        let Written { stored, seeds, .. } = &self.written[index];
        let mut tries = 0;
        while tries < TRIES_MAX {
            tries += 1;
            let read = self.store.read(stored).and_then(|pending| {
                pending.ticket().wait_for(PATIENCE).expect("a read is answered")?;
                pending.restored()
            });
            match read {
                Ok(restored) => {
                    let bytes = restored.to_vec();
                    let is_ours = seeds.iter().any(|&seed| is_pattern(seed, &bytes));
                    assert!(is_ours, "other bytes came back");
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Closed => {
                    return self.check(&error, false, false);
                }
                Err(error) if error.kind() == ErrorKind::Busy => {
                    // Other threads have filled the queue; that is no try.
                    tries -= 1;
                    std::thread::yield_now();
                }
                Err(error) => self.check(&error, false, false),
            }
        }
        panic!("what was written well cannot be read in {TRIES_MAX} tries");
    }
}

fn is_pattern(seed: u64, bytes: &Vec<u8>) -> bool {
    *bytes == *Memory::new(seed, bytes.len(), 0)
}

fn run(plan: &Plan, dir: &tempfile::TempDir) {
    let (store, closing) = (plan.open(dir), AtomicBool::new(false));
    if plan.thread_count == 1 {
        Driver::new(plan, &store, &closing, 0).run(plan.closes);
    } else {
        std::thread::scope(|scope| {
            for thread in 0..plan.thread_count {
                let (store, closing) = (&store, &closing);
                let closes = plan.closes && thread == 0;
                scope.spawn(move || Driver::new(plan, store, closing, thread).run(closes));
            }
        });
    }
    // What was released on its way is answered to nobody; the end of the workers shows its end.
    plan.faults.pause.resume();
    store.close();
    let stats = store.stats().unwrap();
    assert_eq!(stats.disk_used_bytes, 0, "extents are left behind");
    assert_eq!(stats.arena_live_bytes, 0, "slots are left behind");
}

/// Names the seed of the schedule that fails.
struct Reproduce<'a>(&'a Plan, &'a str);

impl Drop for Reproduce<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(plan, test) = self;
            eprintln!(
                "{plan:#?}\nagain: SSDTRAIN_SEED={} cargo test --test simulation {test}",
                plan.seed
            );
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn schedules(test: &str, count: u64, plan: impl Fn(u64) -> Plan) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a scratch directory");
    let first = number("SSDTRAIN_SEED");
    let count = number("SSDTRAIN_SCHEDULES").unwrap_or(if first.is_some() { 1 } else { count });
    for seed in first.unwrap_or(0)..first.unwrap_or(0) + count {
        let plan = plan(seed);
        let reproduce = Reproduce(&plan, test);
        run(&plan, &dir);
        drop(reproduce);
    }
}

#[test]
fn without_faults_nothing_fails() {
    schedules("without_faults", 500, |seed| Plan::new(seed, &[1]));
}

#[test]
fn faults_are_told_and_change_no_bytes() {
    schedules("faults_are_told", 1000, |seed| Plan::new(seed, &[1]).with_faults());
}

#[test]
fn threads_share_a_failing_store() {
    schedules("threads_share", 500, |seed| Plan::new(seed, &[2, 3]).with_faults());
}
