//! The conformance suite: what every engine must do, run against each of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use ssdtrain_core::{
    Backend, DirectIo, ErrorKind, Faults, Stats, StoreConfig, Stored, TensorStore, Tuning,
};

mod engines;
mod memory;
mod round_trip;
use engines::{ENGINES, config, on_every_engine, open, paused_disk};
use memory::{Memory, lend};
use round_trip::{pattern, read_back, scratch, write};

#[test]
fn every_size_and_alignment_comes_back() {
    on_every_engine([false], |store| {
        for len in [1, 511, 512, 513, 4095, 4096, 4097, 65_537, 1 << 20, (3 << 20) + 7, 40 << 20] {
            for start in [0, 1, 64, 511] {
                let bytes = pattern(len as u64, len + start);
                let stored = store.write(lend(&bytes, start)).unwrap();
                assert_eq!(stored.len(), len);
                assert!(read_back(store, &stored).unwrap() == bytes[start..], "{len} at {start}");
            }
        }
    });
}

#[test]
fn the_place_within_a_block_is_kept() {
    on_every_engine([false], |store| {
        let bytes = pattern(3, 100_000);
        for start in [0, 64, 200, 4097] {
            let stored = store.write(lend(&bytes, start)).unwrap();
            stored.ticket().wait().unwrap();
            let pending = store.read(&stored).unwrap();
            pending.ticket().wait().unwrap();
            let restored = pending.restored().unwrap();
            let address = bytes[start..].as_ptr() as usize;
            assert_eq!(restored.address() as usize % 512, address % 512);
        }
    });
}

#[test]
fn many_tensors_in_flight_do_not_mix() {
    on_every_engine([false, true], |store| {
        let tensors: Vec<_> =
            (0..300).map(|index| pattern(index, 10_000 + 977 * index as usize)).collect();
        let stored: Vec<_> = tensors.iter().map(|bytes| write(store, bytes).unwrap()).collect();
        for one in &stored {
            one.ticket().wait().unwrap();
        }
        let reads: Vec<_> = stored.iter().rev().map(|one| store.read(one).unwrap()).collect();
        for (read, bytes) in reads.iter().zip(tensors.iter().rev()) {
            read.ticket().wait().unwrap();
            assert!(read.restored().unwrap().to_vec() == **bytes);
        }
        let written: u64 = stored.iter().map(|one| one.len() as u64).sum();
        assert!(store.stats().unwrap().written.bytes >= written);
        assert_eq!(store.stats().unwrap().read.count, 300);
    });
}

#[test]
fn the_source_is_held_until_its_bytes_are_safe_and_no_longer() {
    on_every_engine([false], |store| {
        let bytes = pattern(1, 8 << 20);
        let stored = write(store, &bytes).unwrap();
        stored.ticket().wait().unwrap();
        assert_eq!(Arc::strong_count(&bytes), 1);
        drop(stored);
    });
}

#[test]
fn released_space_is_used_again() {
    on_every_engine([false], |store| {
        for round in 0..20 {
            let bytes = pattern(round, 10 << 20);
            let stored = write(store, &bytes).unwrap();
            stored.ticket().wait().unwrap();
            store.release(stored);
        }
        assert!(store.stats().unwrap().disk_reserved_bytes <= 64 << 20);
    });
}

#[test]
fn handles_dropped_in_flight_leave_nothing() {
    on_every_engine([false], |store| {
        for round in 0..50 {
            let bytes = pattern(round, 5 << 20);
            let stored = write(store, &bytes).unwrap();
            if round % 2 == 0 {
                drop(stored);
                continue;
            }
            stored.ticket().wait().unwrap();
            drop(store.read(&stored).unwrap());
        }
        store.close();
    });
}

#[test]
fn several_threads_share_a_store() {
    on_every_engine([false, true], |store| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for index in 0..40 {
                        let bytes = pattern(thread * 1000 + index, 50_000 + index as usize * 321);
                        let stored = write(store, &bytes).unwrap();
                        assert!(read_back(store, &stored).unwrap() == *bytes);
                    }
                });
            }
        });
    });
}

#[test]
fn a_closed_store_refuses_and_answers() {
    on_every_engine([false], |store| {
        let bytes = pattern(1, 1 << 20);
        let stored = write(store, &bytes).unwrap();
        stored.ticket().wait().unwrap();
        store.close();
        store.close();
        assert_eq!(store.read(&stored).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(write(store, &bytes).unwrap_err().kind(), ErrorKind::Closed);
    });
}

/// A depth is a bound on pieces in flight, so no ring can be too small for them.
#[test]
fn every_depth_serves_more_pieces_than_it_holds() {
    for engine in ENGINES {
        for queue_depth in [1, 2, 3, 16] {
            let dir = scratch();
            let tuning = Tuning { queue_depth, piece_bytes: 4096 };
            let store = match TensorStore::open(&config(dir.path(), engine()).tuned(tuning)) {
                Err(error) if error.kind() == ErrorKind::Unsupported => continue,
                opened => opened.unwrap(),
            };
            let tensors: Vec<_> = (0..24).map(|index| pattern(index, 80_000)).collect();
            let stored: Vec<_> =
                tensors.iter().map(|bytes| write(&store, bytes).unwrap()).collect();
            for one in &stored {
                one.ticket().wait().unwrap();
            }
            let reads: Vec<_> = stored.iter().map(|one| store.read(one).unwrap()).collect();
            for (read, bytes) in reads.iter().zip(&tensors) {
                read.ticket().wait().unwrap();
                assert!(read.restored().unwrap().to_vec() == **bytes);
            }
        }
    }
}

#[test]
fn an_unfinished_write_cannot_be_read() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    let bytes = pattern(1, 4096);
    let stored = write(&store, &bytes).unwrap();
    assert_eq!(store.read(&stored).unwrap_err().kind(), ErrorKind::Config);
    pause.resume();
    assert!(read_back(&store, &stored).unwrap() == *bytes);
}

#[test]
fn a_queued_write_can_be_cancelled_and_frees_its_source() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    // Requests as large as a piece are not joined.
    let tuning = Tuning { queue_depth: 1, piece_bytes: 1 << 20 };
    let config = config(dir.path(), disk).tuned(tuning);
    let store = TensorStore::open(&config).unwrap();
    let tensors: Vec<_> = (0..8).map(|index| pattern(index, 1 << 20)).collect();
    let stored: Vec<_> = tensors.iter().map(|bytes| write(&store, bytes).unwrap()).collect();
    // One thread holds at most one request; the others still wait.
    let cancelled = stored.iter().filter(|one| one.cancel()).count();
    assert!(cancelled >= 7);
    let held = tensors.iter().filter(|bytes| Arc::strong_count(bytes) > 1).count();
    // The one that the thread holds may have ended by now: it was cancelled before its first piece.
    assert!(held <= 8 - cancelled, "{held} held, {cancelled} cancelled");
    for one in &stored {
        assert!(one.ticket().is_done() || cancelled == 7);
    }
    assert_eq!(store.stats().unwrap().cancelled_count, cancelled as u64);
    pause.resume();
    for one in &stored {
        let kind = one.ticket().wait().map_or_else(|error| Some(error.kind()), |()| None);
        assert!(matches!(kind, Some(ErrorKind::Cancelled) | None));
    }
    assert!(tensors.iter().all(|bytes| Arc::strong_count(bytes) == 1), "answered, but still held");
}

#[test]
fn abandoned_transfers_are_counted_and_can_be_waited_for() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    let (soon, long) = (Duration::from_millis(1), Duration::from_secs(60));
    assert_eq!(store.wait_for_abandoned(long), Some(false), "nothing was abandoned");
    let bytes = pattern(1, 1 << 20);
    let begun = |count: fn(&Stats) -> u64| {
        while count(&store.stats().unwrap()) == 0 {
            thread::yield_now();
        }
    };
    let stored = write(&store, &bytes).unwrap();
    begun(|stats| stats.written.operation_count);
    assert_eq!(store.resident_bytes(), 0, "the caller has the source and counts it");
    drop(stored);
    assert_eq!((store.resident_bytes(), Arc::strong_count(&bytes)), (bytes.len(), 2));
    assert_eq!(store.wait_for_abandoned(soon), None);
    pause.resume();
    while store.resident_bytes() > 0 {
        store.wait_for_abandoned(long).unwrap();
    }
    assert_eq!(Arc::strong_count(&bytes), 1);

    let stored = write(&store, &bytes).unwrap();
    stored.ticket().wait().unwrap();
    pause.pause();
    let pending = store.read(&stored).unwrap();
    begun(|stats| stats.read.operation_count);
    drop(pending);
    assert_eq!(store.resident_bytes(), store.stats().unwrap().arena_live_bytes as usize);
    assert!(store.resident_bytes() >= bytes.len(), "the slot is in use");
    assert_eq!(store.wait_for_abandoned(soon), None);
    pause.resume();
    store.wait_for_abandoned(long).unwrap();
    assert_eq!((store.resident_bytes(), store.wait_for_abandoned(long)), (0, Some(false)));
}

#[test]
fn closing_a_stuck_store_answers_every_ticket() {
    let dir = scratch();
    let (_pause, disk) = paused_disk();
    // Requests as large as a piece are not joined, so each of the four threads holds one at most.
    let tuning = Tuning { queue_depth: 4, piece_bytes: 1 << 20 };
    let store = TensorStore::open(&config(dir.path(), disk).tuned(tuning)).unwrap();
    let bytes = pattern(1, 1 << 20);
    let stored: Vec<_> = (0..20).map(|_| write(&store, &bytes).unwrap()).collect();
    store.close();
    let closed =
        |one: &&Stored| one.ticket().wait().is_err_and(|error| error.kind() == ErrorKind::Closed);
    assert!(stored.iter().filter(closed).count() >= 16);
    drop(stored);
    assert_eq!(Arc::strong_count(&bytes), 1);
}

#[test]
fn a_full_queue_says_so() {
    let dir = scratch();
    let (_pause, disk) = paused_disk();
    let mut config = config(dir.path(), disk);
    config.queue_capacity = 4;
    let store = TensorStore::open(&config).unwrap();
    let bytes = pattern(1, 4096);
    let mut stored = Vec::new();
    let refusal = loop {
        match write(&store, &bytes) {
            Ok(one) => stored.push(one),
            Err(error) => break error,
        }
        assert!(stored.len() <= 16, "a queue of 4 before 4 threads took more than 8 requests");
    };
    assert_eq!(refusal.kind(), ErrorKind::Busy);
    assert_eq!(Arc::strong_count(&bytes), 1 + stored.len());
}

#[test]
fn a_failed_write_is_an_error_and_its_space_returns() {
    let dir = scratch();
    let faults = Faults { io_error_rate: 1.0, ..Faults::default() };
    let store = open(dir.path(), Backend::Simulated(faults)).unwrap();
    let stored = write(&store, &pattern(1, 1 << 20)).unwrap();
    let error = stored.ticket().wait().unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Io, Some(5)));
    assert!(store.read(&stored).is_err());
    drop(stored);
    assert_eq!(store.stats().unwrap().disk_used_bytes, 0);
    assert_eq!(store.stats().unwrap().written.failed_count, 1);
}

#[test]
fn a_full_disk_is_no_space() {
    let dir = scratch();
    let faults = Faults { capacity_bytes: Some(1 << 20), ..Faults::default() };
    let store = open(dir.path(), Backend::Simulated(faults)).unwrap();
    let first = write(&store, &pattern(1, 1 << 19)).unwrap();
    first.ticket().wait().unwrap();
    let second = write(&store, &pattern(2, 1 << 20)).unwrap();
    assert_eq!(second.ticket().wait().unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(read_back(&store, &first).unwrap() == *pattern(1, 1 << 19));
}

#[test]
fn a_flipped_bit_is_found_when_asked_for() {
    let dir = scratch();
    for verify in [true, false] {
        let mut config = config(
            dir.path(),
            Backend::Simulated(Faults { bit_flip_rate: 1.0, ..Faults::default() }),
        );
        config.verify = verify;
        let store = TensorStore::open(&config).unwrap();
        // A whole number of blocks at an aligned address: every flipped bit is the tensor's.
        let bytes = pattern(5, (1 << 20) + 4096);
        let start = bytes.as_ptr().align_offset(4096);
        let stored = store.write(lend(&bytes, start)).unwrap();
        match read_back(&store, &stored) {
            Err(error) => assert!(verify && error.kind() == ErrorKind::Corrupt, "{error}"),
            Ok(back) => assert!(!verify && back != bytes[start..]),
        }
    }
}

#[test]
fn several_directories_share_the_load() {
    let dirs = [scratch(), scratch()];
    let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
    config.direct_io = DirectIo::Optional;
    let store = TensorStore::open(&config).unwrap();
    let tensors: Vec<_> = (0..16).map(|index| pattern(index, 4 << 20)).collect();
    let stored: Vec<_> = tensors.iter().map(|bytes| write(&store, bytes).unwrap()).collect();
    for (one, bytes) in stored.iter().zip(&tensors) {
        assert!(read_back(&store, one).unwrap() == **bytes);
    }
    assert_eq!(store.stats().unwrap().engines.len(), 2);
    // 16 times 4 MiB in one file would reserve 64 MiB there and nothing in the other.
    assert!(store.stats().unwrap().disk_reserved_bytes >= 128 << 20);
}

#[test]
fn without_a_directory_every_write_is_refused() {
    let config = StoreConfig::new([""; 0]);
    let store = TensorStore::open(&config).unwrap();
    assert!(!store.has_directory());
    let bytes = pattern(1, 1 << 20);
    let refused = write(&store, &bytes).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert_eq!(refused.to_string(), "nothing is written, because no directory was given");
    assert_eq!(Arc::strong_count(&bytes), 1, "the source is free");
    let rates = store.rates().unwrap();
    assert_eq!((rates.write, rates.read), (Some(0.0), Some(0.0)));
    assert!(store.stats().unwrap().engines.is_empty());
    assert!(store.notes().is_empty());
    store.close();
    store.close();
    assert_eq!(write(&store, &bytes).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn the_quota_is_a_bound() {
    let dir = scratch();
    let mut config = config(dir.path(), Backend::Auto);
    config.max_disk_bytes = Some(3 << 20);
    let store = TensorStore::open(&config).unwrap();
    let kept = write(&store, &pattern(1, 2 << 20)).unwrap();
    let refused = write(&store, &pattern(2, 2 << 20)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OverBound);
    assert!(refused.to_string().contains("max_disk_bytes"), "{refused}");
    kept.ticket().wait().unwrap();
    drop(kept);
    write(&store, &pattern(2, 2 << 20)).unwrap().ticket().wait().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Random schedules of write, read and release on a disk that errs: what comes back is what was
    /// written, or an error; never other bytes.
    #[test]
    fn faults_never_change_bytes(
        seed in any::<u64>(),
        steps in proptest::collection::vec((0u8..3, 1usize..300_000, any::<usize>()), 1..60),
    ) {
        let dir = scratch();
        let faults = Faults {
            seed,
            short_rate: 0.3,
            io_error_rate: 0.05,
            retry_rate: 0.2,
            bit_flip_rate: 0.1,
            ..Faults::default()
        };
        let mut config = config(dir.path(), Backend::Simulated(faults));
        config.verify = true;
        let config = config.tuned(Tuning { piece_bytes: 64 << 10, ..Tuning::default() });
        let store = TensorStore::open(&config).unwrap();
        let mut live: HashMap<usize, (Arc<Memory>, Stored)> = HashMap::new();
        for (index, (what, len, pick)) in steps.into_iter().enumerate() {
            let chosen = live.keys().copied().nth(pick % live.len().max(1));
            match (what, chosen) {
                (1, Some(key)) => {
                    let (bytes, stored) = &live[&key];
                    if let Ok(back) = read_back(&store, stored) {
                        prop_assert!(back == **bytes);
                    }
                }
                (2, Some(key)) => drop(live.remove(&key)),
                _ => {
                    let bytes = pattern(seed ^ index as u64, len);
                    match write(&store, &bytes) {
                        Ok(stored) => drop(live.insert(index, (bytes, stored))),
                        // So many writes failed in a row that the directory is out of use.
                        Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Io),
                    }
                }
            }
        }
        for (_, stored) in live.values() {
            if let Err(error) = stored.ticket().wait() {
                prop_assert_eq!(error.kind(), ErrorKind::Io);
            }
        }
        live.clear();
        // What was released on its way is free when its last piece has ended.
        store.close();
        prop_assert_eq!(store.stats().unwrap().disk_used_bytes, 0);
        prop_assert_eq!(store.stats().unwrap().arena_live_bytes, 0);
    }
}

const MIB: usize = 1 << 20;

#[test]
fn one_reads_what_the_other_wrote_into_memory_of_its_own() {
    let dir = scratch();
    let store = TensorStore::open(&config(dir.path(), Backend::Psync)).unwrap();
    let beside = store.beside(0).unwrap();
    let bytes = pattern(1, MIB);
    let stored = write(&store, &bytes).unwrap();
    stored.ticket().wait().unwrap();
    let pending = beside.read(&stored).unwrap();
    pending.ticket().wait().unwrap();
    let restored = pending.restored().unwrap();
    drop(pending);
    assert!(restored.to_vec() == bytes[..]);
    assert_eq!(store.resident_bytes(), 0);
    assert!(beside.resident_bytes() >= MIB);
    assert!(beside.owns(restored.address() as usize) && !store.owns(restored.address() as usize));
    assert_eq!(beside.stats().unwrap().disk_used_bytes, store.stats().unwrap().disk_used_bytes);
    // The traffic of the disks is told by both, that of stores beside the first also by itself.
    let known = store.stats().unwrap();
    assert_eq!((known.beside_written_bytes, known.beside_read_bytes), (0, known.read.bytes));
    let own = write(&beside, &bytes).unwrap();
    own.ticket().wait().unwrap();
    assert!(read_back(&store, &own).unwrap() == bytes[..]);
    assert_eq!(
        store.stats().unwrap().beside_written_bytes,
        store.stats().unwrap().written.bytes / 2
    );
    assert_eq!(store.stats().unwrap().beside_read_bytes, known.read.bytes);
}

#[test]
fn the_disks_are_there_until_the_last_one_is_gone_or_one_is_closed() {
    let dir = scratch();
    let store = TensorStore::open(&config(dir.path(), Backend::Psync)).unwrap();
    let beside = store.beside(0).unwrap();
    let bytes = pattern(2, MIB);
    let stored = write(&store, &bytes).unwrap();
    drop(store);
    assert!(read_back(&beside, &stored).unwrap() == bytes[..]);
    let another = beside.beside(0).unwrap();
    beside.close();
    let refused = another.write(lend(&bytes, 0)).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    assert_eq!(another.beside(0).map(|_| ()).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn they_share_one_quota() {
    let dir = scratch();
    let mut config = config(dir.path(), Backend::Psync);
    config.max_disk_bytes = Some(3 * MIB as u64);
    let store = TensorStore::open(&config).unwrap();
    let beside = store.beside(0).unwrap();
    let bytes = pattern(3, 2 * MIB);
    let stored = write(&store, &bytes).unwrap();
    let refused = beside.write(lend(&bytes, 0)).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OverBound);
    stored.ticket().wait().unwrap();
    drop(stored);
    assert!(write(&beside, &bytes).is_ok());
}
