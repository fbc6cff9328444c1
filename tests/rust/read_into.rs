//! Conformance of `read_into`: every byte where the caller wants it, and no byte beside.

use std::thread;
use std::time::Duration;

use ssdtrain_core::{
    Backend, DirectIo, ErrorKind, Faults, StoreConfig, Stored, TensorStore, Tuning,
};

mod engines;
mod frame;
mod memory;
mod round_trip;
use engines::{config, on_every_engine, open, paused_disk};
use frame::Frame;
use memory::{Memory, lend};
use round_trip::{pattern, read_back, scratch, write};

const MIB: usize = 1 << 20;

fn write_well(store: &TensorStore, bytes: &std::sync::Arc<Memory>) -> Stored {
    let stored = write(store, bytes).unwrap();
    stored.ticket().wait().unwrap();
    stored
}

#[test]
fn every_length_and_place_comes_back_and_nothing_around_it_changes() {
    on_every_engine([false, true], |store| {
        for len in [1, 511, 512, 513, 4095, 4096, 4097, 65_537, (1 << 20) + 13] {
            for source_distance in [0, 1, 64, 511] {
                let bytes = Memory::new(len as u64, len, source_distance);
                let stored = write_well(store, &bytes);
                for distance in [source_distance, source_distance + 512, 0, 7, 4095] {
                    let frame = Frame::new(len, distance);
                    let pending = store.read_into(&stored, frame.lend()).unwrap();
                    pending.ticket().wait().unwrap();
                    assert!(
                        frame.bytes() == *bytes,
                        "{len} bytes from {source_distance} to {distance}"
                    );
                }
            }
        }
    });
}

#[test]
fn large_tensors_come_back_in_pieces() {
    on_every_engine([false, true], |store| {
        for (len, distance) in [(9 * MIB + 3, 64), (9 * MIB + 3, 65), (8 * MIB, 0)] {
            let bytes = Memory::new(1, len, 64);
            let stored = write_well(store, &bytes);
            let frame = Frame::new(len, distance);
            store.read_into(&stored, frame.lend()).unwrap().ticket().wait().unwrap();
            assert!(frame.bytes() == *bytes);
            assert!(read_back(store, &stored).unwrap() == *bytes, "and a slot gives them too");
        }
    });
}

#[test]
fn a_tensor_on_several_directories_comes_back() {
    let dirs = [scratch(), scratch(), scratch()];
    let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
    (config.direct_io, config.verify) = (DirectIo::Optional, true);
    let store = TensorStore::open(&config).unwrap();
    for (len, distance) in [(12 * MIB, 64), (12 * MIB + 5, 64), (12 * MIB + 5, 0)] {
        let bytes = Memory::new(9, len, 64);
        let stored = write_well(&store, &bytes);
        let frame = Frame::new(len, distance);
        store.read_into(&stored, frame.lend()).unwrap().ticket().wait().unwrap();
        assert!(frame.bytes() == *bytes);
    }
}

/// Memory that begins like the source within its block needs a slot for the blocks at its ends
/// only.
#[test]
fn an_aligned_read_into_needs_no_slot() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    pause.resume();
    let bytes = Memory::new(1, 2 * MIB, 64);
    let stored = write_well(&store, &bytes);
    pause.pause();
    for (distance, slot_bytes) in [(64, 0..2 * 4096 + 1), (65, 2 * MIB..3 * MIB)] {
        let frame = Frame::new(bytes.len(), distance);
        let pending = store.read_into(&stored, frame.lend()).unwrap();
        let live_bytes = store.stats().unwrap().arena_live_bytes as usize;
        assert!(slot_bytes.contains(&live_bytes), "{live_bytes} bytes of slots");
        pause.resume();
        pending.ticket().wait().unwrap();
        assert!(frame.bytes() == *bytes);
        assert_eq!(store.stats().unwrap().arena_live_bytes, 0);
        pause.pause();
    }
}

#[test]
fn another_length_is_refused() {
    on_every_engine([false, true], |store| {
        let stored = write_well(store, &pattern(1, 5000));
        for len in [1, 4999, 5001, 8192] {
            let frame = Frame::new(len, 64);
            let error = store.read_into(&stored, frame.lend()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("5000 bytes"), "{error}");
            frame.bytes();
        }
    });
}

#[test]
fn faults_are_told_and_touch_nothing_around_the_target() {
    let (mut well_count, mut failed_count) = (0, 0);
    for seed in 0..60 {
        let dir = scratch();
        let faults = Faults {
            seed,
            short_rate: 0.4,
            zero_rate: 0.01,
            io_error_rate: 0.3,
            retry_rate: 0.3,
            bit_flip_rate: 0.1,
            late_rate: 0.3,
            ..Faults::default()
        };
        let mut config = config(dir.path(), Backend::Simulated(faults));
        config.verify = true;
        let tuning = Tuning { queue_depth: 4, piece_bytes: 8192 };
        let store = TensorStore::open(&config.tuned(tuning)).unwrap();
        let bytes = Memory::new(seed, 30_000, 64);
        let stored = store.write(lend(&bytes, 0)).unwrap();
        if stored.ticket().wait().is_err() {
            continue;
        }
        for distance in [64, 100, 64, 100] {
            let frame = Frame::new(bytes.len(), distance);
            let answer = store.read_into(&stored, frame.lend()).unwrap().ticket().wait();
            let found = frame.bytes();
            match answer {
                Ok(()) => {
                    assert!(found == *bytes, "other bytes came back");
                    well_count += 1;
                }
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt), "{error}");
                    failed_count += 1;
                }
            }
        }
    }
    assert!(well_count > 0 && failed_count > 0, "{well_count} ended well, {failed_count} failed");
}

#[test]
fn memory_of_an_abandoned_read_is_held_until_its_end() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    pause.resume();
    let bytes = Memory::new(1, MIB, 0);
    let stored = write_well(&store, &bytes);
    pause.pause();
    let frame = Frame::new(MIB, 0);
    let pending = store.read_into(&stored, frame.lend()).unwrap();
    while store.stats().unwrap().read.operation_count == 0 {
        thread::yield_now();
    }
    drop(pending);
    assert_eq!((frame.is_lent(), store.resident_bytes()), (true, MIB));
    pause.resume();
    while store.resident_bytes() > 0 {
        store.wait_for_abandoned(Duration::from_secs(60)).unwrap();
    }
    frame.bytes();
}

#[test]
fn a_close_answers_and_lets_the_memory_go() {
    let dir = scratch();
    let (pause, disk) = paused_disk();
    let store = open(dir.path(), disk).unwrap();
    pause.resume();
    let stored = write_well(&store, &pattern(1, MIB));
    pause.pause();
    let frames: Vec<_> = (0..12).map(|_| Frame::new(MIB, 64)).collect();
    let reads: Vec<_> =
        frames.iter().map(|frame| store.read_into(&stored, frame.lend()).unwrap()).collect();
    store.close();
    for (read, frame) in reads.iter().zip(&frames) {
        if let Err(error) = read.ticket().wait() {
            assert_eq!(error.kind(), ErrorKind::Closed);
        }
        frame.bytes();
    }
}
