//! Conformance of `overwrite`: the old bytes or the new ones, whole, whatever fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ssdtrain_core::{
    Backend, DirectIo, ErrorKind, Faults, PauseSwitch, StoreConfig, Stored, TensorStore, Tuning,
};

mod engines;
mod memory;
mod round_trip;
use engines::{ENGINES, config, on_every_engine, open, open_as, paused_disk};
use memory::{Memory, lend};
use round_trip::{pattern, read_back, scratch, write};

const MIB: usize = 1 << 20;

fn write_well(store: &TensorStore, bytes: &Arc<Memory>) -> Stored {
    let stored = write(store, bytes).unwrap();
    stored.ticket().wait().unwrap();
    stored
}

fn used_bytes(store: &TensorStore) -> u64 {
    store.stats().unwrap().disk_used_bytes
}

#[test]
fn new_bytes_take_the_place_of_the_old_and_the_old_space_is_free() {
    on_every_engine([false, true], |store| {
        for len in [1, 513, 4096, 65_537, (3 << 20) + 7] {
            let stored = write_well(store, &Memory::new(1, len, 64));
            // A source may lie elsewhere within its block than the one before.
            for (seed, distance) in [(2, 64), (3, 0), (4, 511), (5, 4095)] {
                let bytes = Memory::new(seed, len, distance);
                let overwrite = store.overwrite(&stored, lend(&bytes, 0)).unwrap();
                overwrite.ticket().wait().unwrap();
                assert_eq!(Arc::strong_count(&bytes), 1, "the source is free when it has ended");
                assert!(used_bytes(store) <= (len + 2 * 4096) as u64, "the old extent is free");
                assert!(read_back(store, &stored).unwrap() == *bytes);
            }
        }
    });
}

/// A store on two simulated disks.
fn on_simulated_disks(faults: [Faults; 2]) -> ([tempfile::TempDir; 2], TensorStore) {
    let dirs = [scratch(), scratch()];
    let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
    config.direct_io = DirectIo::Optional;
    for (dir, faults) in config.dirs.iter_mut().zip(faults) {
        dir.backend = Some(Backend::Simulated(faults));
    }
    let store = TensorStore::open(&config).unwrap();
    (dirs, store)
}

/// Reads go on all the time, and each gives the bytes of one write: of the last that had ended when
/// it began, or of a later one.
fn read_while_overwriting(store: &TensorStore, versions: &[Arc<Memory>]) {
    let stored = write_well(store, &versions[0]);
    let (ended, begun, is_over) =
        (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    let oldest = ended.load(Ordering::SeqCst);
                    let bytes = read_back(store, &stored).unwrap();
                    let newest = begun.load(Ordering::SeqCst);
                    let found = versions[oldest..=newest].iter().any(|one| bytes == **one);
                    assert!(found, "neither the old bytes nor new ones");
                }
            });
        }
        for (round, bytes) in versions.iter().enumerate().skip(1) {
            begun.store(round, Ordering::SeqCst);
            let overwrite = store.overwrite(&stored, lend(bytes, 0)).unwrap();
            overwrite.ticket().wait().unwrap();
            ended.store(round, Ordering::SeqCst);
        }
        is_over.store(true, Ordering::SeqCst);
    });
    drop(stored);
    assert_eq!(used_bytes(store), 0);
}

#[test]
fn a_read_during_an_overwrite_gives_the_old_bytes_or_the_new() {
    let versions: Vec<_> = (0..40).map(|seed| pattern(seed, MIB + 77)).collect();
    for engine in ENGINES {
        let dir = scratch();
        let tuning = Tuning { queue_depth: 4, piece_bytes: 64 << 10 };
        let Some(store) = open_as(&config(dir.path(), engine()).tuned(tuning)) else { continue };
        read_while_overwriting(&store, &versions);
    }
}

#[test]
fn parts_on_several_devices_are_replaced_together() {
    let versions: Vec<_> = (0..10).map(|seed| pattern(seed, 5 * MIB)).collect();
    for engine in ENGINES {
        let dirs = [scratch(), scratch()];
        let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
        (config.backend, config.direct_io) = (engine(), DirectIo::Optional);
        let Some(store) = open_as(&config) else { continue };
        read_while_overwriting(&store, &versions);
    }
}

/// One part is written while the other hangs: what reads take is still the old bytes.
#[test]
fn half_an_overwrite_is_no_overwrite() {
    let pause = PauseSwitch::default();
    let faults = [Faults::default(), Faults { pause: pause.clone(), ..Faults::default() }];
    let (_dirs, store) = on_simulated_disks(faults);
    let (old, new) = (Memory::new(1, 16 * MIB, 0), Memory::new(2, 16 * MIB, 0));
    let stored = write_well(&store, &old);
    let before_count = store.stats().unwrap().written.count;
    pause.pause();
    let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
    while store.stats().unwrap().written.count == before_count {
        thread::yield_now();
    }
    assert!(!overwrite.ticket().is_done(), "the other part hangs");
    let pending = store.read(&stored).unwrap();
    pause.resume();
    pending.ticket().wait().unwrap();
    assert!(pending.restored().unwrap().to_vec() == *old);
    overwrite.ticket().wait().unwrap();
    assert!(read_back(&store, &stored).unwrap() == *new);
}

/// The read of the old bytes hangs on one device while the overwrite ends on the other.
#[test]
fn the_old_extent_is_kept_for_a_read_that_began_before() {
    let pauses = [PauseSwitch::default(), PauseSwitch::default()];
    let faults =
        pauses.each_ref().map(|pause| Faults { pause: pause.clone(), ..Faults::default() });
    let (_dirs, store) = on_simulated_disks(faults);
    // What waits at one device sends small tensors to the other.
    pauses[0].pause();
    let first_waits = write(&store, &Memory::new(1, MIB, 0)).unwrap();
    let old = Memory::new(2, MIB, 0);
    let stored = write_well(&store, &old);
    pauses[1].pause();
    let pending = store.read(&stored).unwrap();
    let _second_waits: Vec<_> =
        (3..20).map(|seed| write(&store, &Memory::new(seed, MIB, 0)).unwrap()).collect();
    pauses[0].resume();
    first_waits.ticket().wait().unwrap();
    let new = Memory::new(30, MIB, 0);
    let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
    overwrite.ticket().wait().unwrap();
    assert!(!pending.ticket().is_done(), "the read of the old bytes hangs");
    let with_old = used_bytes(&store);
    assert!(read_back(&store, &stored).unwrap() == *new);
    pauses[1].resume();
    pending.ticket().wait().unwrap();
    assert!(pending.restored().unwrap().to_vec() == *old);
    assert_eq!(with_old - used_bytes(&store), MIB as u64, "only the old extent is free");
}

#[test]
fn the_ticket_tells_which_bytes_are_there() {
    for seed in 0..12 {
        let dir = scratch();
        let faults = Faults {
            seed,
            short_rate: 0.3,
            retry_rate: 0.2,
            io_error_rate: 0.04,
            space_error_rate: 0.04,
            bit_flip_rate: 0.05,
            ..Faults::default()
        };
        let mut config = config(dir.path(), Backend::Simulated(faults));
        config.verify = true;
        let tuning = Tuning { queue_depth: 4, piece_bytes: 16 << 10 };
        let store = TensorStore::open(&config.tuned(tuning)).unwrap();
        let mut current = pattern(seed, 50_000);
        let Some(stored) = (0..100).find_map(|_| {
            let stored = write(&store, &current).unwrap();
            stored.ticket().wait().is_ok().then_some(stored)
        }) else {
            panic!("no write of 100 ended well");
        };
        let mut failed_count = 0;
        for round in 0..40 {
            let next = pattern(seed * 1000 + round, 50_000);
            let answer = match store.overwrite(&stored, lend(&next, 0)) {
                Ok(overwrite) => overwrite.ticket().wait(),
                // So many writes failed in a row that the directory is out of use.
                Err(error) => Err(error),
            };
            match answer {
                Ok(()) => current = next,
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace), "{error}");
                    failed_count += 1;
                }
            }
            let bytes = (0..300).find_map(|_| read_back(&store, &stored).ok());
            assert!(bytes.expect("what is there can be read") == *current, "round {round}");
            assert!(used_bytes(&store) <= 50_000 + 2 * 4096, "an extent is left behind");
        }
        assert!((1..40).contains(&failed_count), "{failed_count} of 40 overwrites failed");
    }
}

#[test]
fn without_space_for_both_the_old_bytes_stay() {
    let dir = scratch();
    let full = Faults { capacity_bytes: Some(3 * MIB as u64 / 2), ..Faults::default() };
    let mut quota = config(dir.path(), Backend::Auto);
    quota.max_disk_bytes = Some(3 * MIB as u64 / 2);
    let full = config(dir.path(), Backend::Simulated(full));
    for (config, kind) in [(quota, ErrorKind::OverBound), (full, ErrorKind::NoSpace)] {
        let store = TensorStore::open(&config).unwrap();
        let (old, new) = (pattern(1, MIB), pattern(2, MIB));
        let stored = write_well(&store, &old);
        let overwrite = store.overwrite(&stored, lend(&new, 0));
        let error = overwrite.and_then(|overwrite| overwrite.ticket().wait()).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(Arc::strong_count(&new), 1);
        assert!(read_back(&store, &stored).unwrap() == *old);
        assert!(used_bytes(&store) < (MIB + 2 * 4096) as u64);
    }
}

#[test]
fn one_overwrite_at_a_time_and_a_cancelled_one_leaves_the_old_bytes() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    // Requests as large as a piece are not joined, and one thread holds at most one of them.
    let tuning = Tuning { queue_depth: 1, piece_bytes: MIB };
    let store = TensorStore::open(&config(dir.path(), disk).tuned(tuning)).unwrap();
    pause.resume();
    let (old, new) = (Memory::new(1, MIB, 0), Memory::new(2, MIB, 0));
    let stored = write_well(&store, &old);
    pause.pause();
    let in_front = write(&store, &Memory::new(3, MIB, 0)).unwrap();
    while store.stats().unwrap().written.operation_count < 2 {
        thread::yield_now();
    }
    let with_both = used_bytes(&store);
    let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
    let busy = store.overwrite(&stored, lend(&new, 0)).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    assert!(busy.to_string().contains("wait for it first"), "{busy}");
    assert!(overwrite.cancel(), "it had not begun");
    assert_eq!(overwrite.ticket().wait().unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!((Arc::strong_count(&new), used_bytes(&store)), (1, with_both));
    // One that nobody holds is cancelled too, and the next may begin.
    drop(store.overwrite(&stored, lend(&new, 0)).unwrap());
    assert_eq!((Arc::strong_count(&new), used_bytes(&store)), (1, with_both));
    let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
    pause.resume();
    in_front.ticket().wait().unwrap();
    overwrite.ticket().wait().unwrap();
    assert!(read_back(&store, &stored).unwrap() == *new);
}

#[test]
fn a_release_during_an_overwrite_leaves_nothing() {
    for closes in [false, true] {
        let dir = scratch();
        let (pause, disk) = paused_disk();
        let store = open(dir.path(), disk).unwrap();
        pause.resume();
        let (old, new) = (pattern(1, 8 * MIB), pattern(2, 8 * MIB));
        let stored = write_well(&store, &old);
        pause.pause();
        let before_count = store.stats().unwrap().written.operation_count;
        let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
        while store.stats().unwrap().written.operation_count == before_count {
            thread::yield_now();
        }
        store.release(stored);
        if closes {
            store.close();
        }
        pause.resume();
        overwrite.ticket().wait().ok();
        assert_eq!((Arc::strong_count(&new), used_bytes(&store)), (1, 0));
    }
}

#[test]
fn an_abandoned_overwrite_ends_and_the_next_may_begin() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    pause.resume();
    let (old, new) = (pattern(1, MIB), pattern(2, MIB));
    let stored = write_well(&store, &old);
    pause.pause();
    let before_count = store.stats().unwrap().written.operation_count;
    let overwrite = store.overwrite(&stored, lend(&new, 0)).unwrap();
    while store.stats().unwrap().written.operation_count == before_count {
        thread::yield_now();
    }
    drop(overwrite);
    assert_eq!(store.resident_bytes(), new.len(), "its source counts until it has ended");
    assert_eq!(store.overwrite(&stored, lend(&new, 0)).unwrap_err().kind(), ErrorKind::Busy);
    pause.resume();
    while store.resident_bytes() > 0 {
        store.wait_for_abandoned(Duration::from_secs(60)).unwrap();
    }
    // Nobody could learn when it ended, so nobody may find that the bytes have changed.
    assert!(read_back(&store, &stored).unwrap() == *old);
    let next = pattern(3, MIB);
    store.overwrite(&stored, lend(&next, 0)).unwrap().ticket().wait().unwrap();
    assert!(read_back(&store, &stored).unwrap() == *next);
}

#[test]
fn invalid_overwrites_are_refused() {
    let (dir, other_dir) = (scratch(), scratch());
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    let bytes = pattern(1, 4096);
    let stored = write(&store, &bytes).unwrap();
    let refuse = |store: &TensorStore, bytes: &Arc<Memory>| {
        let error = store.overwrite(&stored, lend(bytes, 0)).unwrap_err();
        (error.kind(), error.to_string())
    };
    let (kind, message) = refuse(&store, &bytes);
    assert!(kind == ErrorKind::Config && message.contains("wait for it first"), "{message}");
    pause.resume();
    stored.ticket().wait().unwrap();
    for len in [1, 4095, 4097] {
        let (kind, message) = refuse(&store, &pattern(2, len));
        assert!(kind == ErrorKind::Config && message.contains("4096 bytes"), "{message}");
    }
    let other = open(other_dir.path(), Backend::Psync).unwrap();
    let (kind, message) = refuse(&other, &bytes);
    assert!(kind == ErrorKind::Config && message.contains("another store"), "{message}");
    store.close();
    assert_eq!(refuse(&store, &bytes).0, ErrorKind::Closed);
}
