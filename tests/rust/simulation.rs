//! The whole store on simulated disks, driven by seeds and held to a model.
//!
//! Each seed makes a plan (faults, sizes, queue, directories, threads) and a schedule of writes,
//! waits, reads, cancellations, releases and perhaps a close in the middle. Whatever a read returns
//! must be what was written; an error must be one that the plan can give; in the end everything is
//! given back. `SSDTRAIN_SEED` runs one seed, or with `SSDTRAIN_SCHEDULES` so many from it on.

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ssdtrain_core::{
    Backend, DirectIo, Error, ErrorKind, Faults, Pending, Restored, StoreConfig, Stored,
    TensorStore, Tuning,
};

mod memory;
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
            paused: random.one_in(3),
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
    seed: u64,
    source: Weak<Memory>,
    cancelled: bool,
}

struct Reading {
    pending: Pending,
    seed: u64,
    cancelled: bool,
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
            0..35 => self.write(),
            35..45 => self.wait_for_a_write(),
            45..68 => self.begin_read(),
            68..80 => self.finish_read(),
            80..85 => self.cancel_write(),
            85..93 => self.release(),
            93..96 => self.give_up_read(),
            96..99 => self.let_go_of_restored(),
            _ => self.store.resume(),
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
        let place = self.random.choose(&[0, 0, 1, 64, 511, 512, 4095]);
        let seed = self.random.next();
        let memory = Memory::new(seed, len, place);
        let (source, region) = (Arc::downgrade(&memory), lend(&memory, 0));
        drop(memory);
        match self.store.write(region) {
            Ok(stored) => {
                assert_eq!(stored.len(), len);
                self.written.push(Written { stored, seed, source, cancelled: false });
                if self.plan.lockstep {
                    self.wait_for(self.written.len() - 1);
                }
            }
            Err(error) => {
                let at_the_door = error.kind() == ErrorKind::Busy
                    || error.kind() == ErrorKind::NoSpace && error.errno().is_none();
                if !at_the_door {
                    self.check(&error, true, false);
                }
                assert_eq!(source.strong_count(), 0, "a refused write keeps its source");
            }
        }
    }

    fn wait_for_a_write(&mut self) {
        if let Some(index) = self.pick(self.written.len()) {
            self.wait_for(index);
        }
    }

    /// Waits for a write; whether it ended well.
    fn wait_for(&self, index: usize) -> bool {
        self.store.resume();
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
        let written = &self.written[index];
        let before = written.stored.ticket().answer();
        match self.store.read(&written.stored) {
            Ok(pending) => {
                assert!(!matches!(before, Some(Err(_))), "read what was never written");
                self.reading.push(Reading { pending, seed: written.seed, cancelled: false });
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
        self.store.resume();
        let Reading { pending, seed, cancelled } = self.reading.swap_remove(index);
        pending.ticket().wait_for(PATIENCE).expect("a read is answered").ok();
        match pending.restored() {
            Ok(restored) => {
                assert!(is_pattern(seed, &restored.to_vec()), "other bytes came back");
                if self.random.one_in(3) {
                    self.restored.push((restored, seed));
                }
            }
            Err(error) => self.check(&error, false, cancelled),
        }
    }

    fn cancel_write(&mut self) {
        let Some(index) = self.pick(self.written.len()) else { return };
        let written = &mut self.written[index];
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
            self.reading[index].pending.cancel();
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
        for ticket in tickets.chain(self.reading.iter().map(|one| one.pending.ticket())) {
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
        let Written { stored, seed, .. } = &self.written[index];
        let mut tries = 0;
        while tries < TRIES_MAX {
            tries += 1;
            let read = self.store.read(stored).and_then(|pending| {
                pending.ticket().wait_for(PATIENCE).expect("a read is answered")?;
                pending.restored()
            });
            match read {
                Ok(restored) => {
                    assert!(is_pattern(*seed, &restored.to_vec()), "other bytes came back");
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
    store.resume();
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
