//! Several directories: one tensor on all of them, less on the slow, none on those that fail.

mod memory;
mod round_trip;

use std::path::Path;
use std::sync::Arc;

use ssdtrain_core::{Backend, DirectIo, ErrorKind, Faults, PauseSwitch, StoreConfig, TensorStore};

use round_trip::{pattern, read_back, scratch, write};

const MIB: usize = 1 << 20;

/// A store on these simulated disks, one directory each.
fn open(faults: &[Faults]) -> (Vec<tempfile::TempDir>, TensorStore) {
    let dirs: Vec<_> = faults.iter().map(|_| scratch()).collect();
    let mut config = StoreConfig::new(dirs.iter().map(tempfile::TempDir::path));
    config.direct_io = DirectIo::Optional;
    for (dir, faults) in config.dirs.iter_mut().zip(faults) {
        dir.backend = Some(Backend::Simulated(faults.clone()));
    }
    let store = TensorStore::open(&config).unwrap();
    (dirs, store)
}

/// Blocks on the disk behind the unnamed file of a directory, through the descriptors of this
/// process; simulated disks do not use their file, so only real ones have any.
fn reserved(dir: &Path) -> u64 {
    let mut blocks = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_there = std::fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(dir));
        if is_there && let Ok(facts) = std::fs::metadata(entry.path()) {
            blocks += std::os::unix::fs::MetadataExt::blocks(&facts);
        }
    }
    blocks * 512
}

#[test]
fn one_tensor_lies_on_all_directories() {
    let dirs = [scratch(), scratch(), scratch()];
    let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
    config.direct_io = DirectIo::Optional;
    config.verify = true;
    let store = TensorStore::open(&config).unwrap();
    for len in [1, 5 * MIB + 77, 24 * MIB, 32 * MIB + 1] {
        let bytes = pattern(len as u64, len);
        let stored = write(&store, &bytes).unwrap();
        assert!(read_back(&store, &stored).unwrap() == *bytes);
        assert_eq!(Arc::strong_count(&bytes), 1, "the source is free when the last part is");
    }
    assert!(dirs.iter().all(|dir| reserved(dir.path()) > 0), "every directory took a part");
    assert_eq!(store.stats().unwrap().disk_used_bytes, 0);
}

#[test]
fn a_directory_that_hangs_gets_nothing_more() {
    let pause = PauseSwitch::paused();
    let paused = Faults { pause: pause.clone(), ..Faults::default() };
    let (_dirs, store) = open(&[Faults::default(), paused]);
    // The first tensors go to both, and their second halves wait there for ever.
    let stuck: Vec<_> =
        (0..2).map(|seed| write(&store, &pattern(seed, 16 * MIB)).unwrap()).collect();
    while store.stats().unwrap().written.bytes < 16 * MIB as u64 {
        std::thread::yield_now();
    }
    assert!(stuck.iter().all(|one| !one.ticket().is_done()));
    for seed in 0..8 {
        let bytes = pattern(seed, 4 * MIB);
        assert!(read_back(&store, &write(&store, &bytes).unwrap()).unwrap() == *bytes);
    }
    pause.resume();
    for one in &stuck {
        one.ticket().wait().unwrap();
    }
}

#[test]
fn a_failing_directory_is_taken_out_of_use_and_the_others_go_on() {
    let broken = Faults { io_error_rate: 1.0, ..Faults::default() };
    let (dirs, store) = open(&[Faults::default(), broken]);
    let mut failed_count = 0;
    for seed in 0..40 {
        let bytes = pattern(seed, 8 * MIB);
        let stored = write(&store, &bytes).unwrap();
        match read_back(&store, &stored) {
            Ok(back) => assert!(back == *bytes),
            Err(error) => {
                failed_count += 1;
                assert_eq!((error.kind(), error.errno()), (ErrorKind::Io, Some(5)), "{error}");
            }
        }
        assert_eq!(Arc::strong_count(&bytes), 1);
    }
    assert!((1..40).contains(&failed_count), "{failed_count} of 40 failed");
    let last = pattern(1, 8 * MIB);
    assert!(read_back(&store, &write(&store, &last).unwrap()).unwrap() == *last);
    let notes = store.notes().join("\n");
    assert!(notes.contains(&*dirs[1].path().to_string_lossy()), "{notes}");
    assert!(notes.contains("out of use") && !notes.contains(&*dirs[0].path().to_string_lossy()));
}

#[test]
fn with_every_directory_out_of_use_writes_are_refused_with_the_reason() {
    let broken = Faults { io_error_rate: 1.0, ..Faults::default() };
    let (_dirs, store) = open(&[broken]);
    let refused = (0..100).find_map(|seed| {
        let stored = match write(&store, &pattern(seed, MIB)) {
            Ok(stored) => stored,
            Err(error) => return Some(error),
        };
        assert!(stored.ticket().wait().is_err());
        None
    });
    let refused = refused.expect("a directory that fails every time is not asked for ever");
    assert_eq!(refused.kind(), ErrorKind::Io);
    assert!(refused.to_string().contains("out of use"), "{refused}");
    assert_eq!(store.stats().unwrap().disk_used_bytes, 0);
}

#[test]
fn a_full_directory_leaves_the_work_to_the_others() {
    let full = Faults { capacity_bytes: Some(0), ..Faults::default() };
    let (_dirs, store) = open(&[full, Faults::default()]);
    let first = write(&store, &pattern(1, 16 * MIB)).unwrap();
    assert_eq!(first.ticket().wait().unwrap_err().kind(), ErrorKind::NoSpace);
    // The next ones know.
    let bytes = pattern(2, 16 * MIB);
    assert!(read_back(&store, &write(&store, &bytes).unwrap()).unwrap() == *bytes);
    assert!(store.notes().iter().all(|note| !note.contains("out of use")), "it may recover");
}

#[test]
fn a_part_that_is_refused_leaves_nothing_of_the_others() {
    let pause = PauseSwitch::paused();
    let paused = Faults { pause: pause.clone(), ..Faults::default() };
    let dirs = [scratch(), scratch()];
    let mut config = StoreConfig::new(dirs.each_ref().map(tempfile::TempDir::path));
    config.direct_io = DirectIo::Optional;
    config.backend = Backend::Simulated(paused);
    config.max_disk_bytes = Some(12 << 20);
    let store = TensorStore::open(&config).unwrap();
    let bytes = pattern(3, 16 * MIB);
    let refused = write(&store, &bytes).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OverBound);
    pause.resume();
    store.close();
    assert_eq!(store.stats().unwrap().disk_used_bytes, 0);
    assert_eq!(Arc::strong_count(&bytes), 1);
}
