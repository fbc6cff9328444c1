//! The way past the CPU's memory (GPUDirect Storage), over a cuFile and a GPU made of software.
//!
//! The detector reports each pair of accesses that nothing orders; every test ends with none.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cufile::library::Library;
use ssdtrain_core::cufile::trial;
use ssdtrain_core::staging::{Saved, Staged, Staging, Tier};
use ssdtrain_core::{Backend, ErrorKind, Result, StoreConfig, TensorStore};

#[expect(dead_code, reason = "shared with other suites")]
mod engines;
#[expect(dead_code, reason = "shared with other suites")]
mod fake_gpu;
mod memory;
#[expect(dead_code, reason = "shared with other suites")]
mod round_trip;
#[expect(dead_code, reason = "shared with other suites")]
mod staged_way;
use engines::config;
use fake_gpu::{
    ComputeStream, DeviceBytes, FakeGpu, MOVES_HALF, MOVES_NOTHING, When, with_a_fake_cufile,
};
use memory::lend;
use round_trip::{pattern, read_back, scratch};
use staged_way::{LEN, LONG, RING, begun, until};

const ON_DEVICE: &str = "copies on the device";

fn library() -> &'static Library {
    let library = Library::find(None).unwrap();
    library.open_driver(false).unwrap();
    library
}

fn store(dir: &Path) -> Arc<TensorStore> {
    Arc::new(TensorStore::open(&config(dir, Backend::Psync)).unwrap())
}

fn try_open(store: &TensorStore) -> Result<Staging> {
    let library = library();
    Staging::open_direct(&Gpu::get(0)?, store.for_gpus(library)?, RING, library)
}

/// Waits for a worker that was let go: the last who holds what is registered, it ends by itself.
fn until_gone(is_so: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < until, "something stays registered");
        std::thread::yield_now();
    }
}

/// Computes a tensor and saves it, waiting for room.
fn save<'gpu>(
    gpu: &'gpu FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
    value: u8,
    len: usize,
) -> (Staged, DeviceBytes<'gpu>) {
    let source = gpu.allocate(len);
    stream.fill(&source, value);
    loop {
        let turn = staging.turn();
        match staging.save(source.range(), stream.handle(), Tier::Disk).unwrap() {
            Saved::Begun(staged) => {
                staged.release(stream.handle()).unwrap();
                // The memory is used for something else at once.
                stream.fill(&source, 0xdd);
                return (staged, source);
            }
            Saved::Full(_) => assert!(staging.wait_for_turn(turn, LONG)),
            Saved::Capturing => unreachable!("nothing is captured here"),
        }
    }
}

/// Loads into memory that the stream has used before.
fn load(
    gpu: &FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
    staged: &Staged,
    len: usize,
) -> Result<Vec<u8>> {
    let target = gpu.allocate(len);
    stream.fill(&target, 0xee);
    let loading = staging.load(staged, target.range(), stream.handle())?;
    let lent = loading.lend(stream.handle(), LONG).expect("it comes, or fails");
    let found = stream.read(&target);
    lent.map(|()| found)
}

/// Saves one tensor, waits until it has settled, and loads it.
fn down_and_up(gpu: &FakeGpu, staging: &Staging, value: u8) -> (Staged, Result<Vec<u8>>) {
    let stream = gpu.stream();
    let (staged, source) = save(gpu, staging, &stream, value, LEN);
    until(staging, || staged.is_settled());
    let found = load(gpu, staging, &stream, &staged, LEN);
    stream.synchronize();
    drop(source);
    (staged, found)
}

#[test]
fn saved_tensors_come_back_from_the_disk() {
    with_a_fake_cufile("saved_tensors_come_back_from_the_disk", |gpu| {
        for seed in 0..3 {
            gpu.set_lag(ON_DEVICE, 2000, seed);
            let (dir, stream) = (scratch(), gpu.stream());
            let store = store(dir.path());
            let staging = try_open(&store).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a name is left");
            let lens = [1, 511, 4095, 4096, 4097, LEN, 1 << 20];
            let all: Vec<_> = (0..28).map(|index| (index as u8, lens[index % 7])).collect();
            let (saved, _sources): (Vec<_>, Vec<_>) =
                all.iter().map(|&(value, len)| save(gpu, &staging, &stream, value, len)).unzip();
            until(&staging, || saved.iter().all(Staged::is_settled));
            assert_eq!(staging.pinned_bytes().1, 0, "all is on the disk");
            for (&(value, len), staged) in all.iter().zip(saved).rev() {
                assert!(staged.failure().is_none(), "{:?}", staged.failure());
                let found = load(gpu, &staging, &stream, &staged, len).unwrap();
                assert!(found == vec![value; len], "{value}");
            }
            until(&staging, || staging.pinned_bytes().1 == 0);
            assert_eq!(staging.counts().from_slot_count, 0);
            // The store that it belongs to counts what it did.
            let stats = store.stats().unwrap();
            assert_eq!((stats.written.count, stats.read.count), (28, 28));
            assert!(gpu.cufile_call_count("cuFileWrite") > 0);
            assert!(staging.close(LONG));
            gpu.set_lag(ON_DEVICE, 0, seed);
        }
    });
}

#[test]
fn registrations_end_before_their_memory() {
    with_a_fake_cufile("registrations_end_before_their_memory", |gpu| {
        for is_store_first in [true, false] {
            let dir = scratch();
            let store = store(dir.path());
            let staging = try_open(&store).unwrap();
            assert_eq!(gpu.registered_count(), 3, "a file and two rings");
            let (staged, found) = down_and_up(gpu, &staging, 5);
            assert!(found.unwrap() == vec![5; LEN]);
            if is_store_first {
                store.close();
                let error = load(gpu, &staging, &gpu.stream(), &staged, LEN).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Closed);
            }
            let frees = gpu.call_count("cuMemFree_v2");
            drop(staged);
            assert!(staging.close(LONG));
            drop((staging, store));
            until_gone(|| gpu.registered_count() == 0);
            until_gone(|| gpu.call_count("cuMemFree_v2") == frees + 2);
        }
    });
}

#[test]
fn a_failed_write_stays_in_its_slot() {
    with_a_fake_cufile("a_failed_write_stays_in_its_slot", |gpu| {
        for code in [libc::EIO, libc::EPERM, 5011, 5030, -5022, 6000, MOVES_NOTHING] {
            let dir = scratch();
            let staging = try_open(&store(dir.path())).unwrap();
            gpu.fail_cufile("cuFileWrite", code, When::Always);
            let (staged, found) = down_and_up(gpu, &staging, 7);
            gpu.recover_cufile();
            let failure = staged.failure().expect("nothing was written").to_string();
            let words = if code == MOVES_NOTHING { "moved no bytes" } else { "cuFileWrite failed" };
            assert!(failure.contains(words), "{code}: {failure}");
            if code.abs() > 5000 {
                assert!(failure.contains(&code.abs().to_string()), "{failure}");
            }
            assert!(staged.is_pinned());
            assert!(found.unwrap() == vec![7; LEN]);
            drop(staged);
            until(&staging, || staging.pinned_bytes().1 == 0);
            // The next one works.
            let (staged, found) = down_and_up(gpu, &staging, 9);
            assert!(staged.failure().is_none());
            assert!(found.unwrap() == vec![9; LEN]);
        }
    });
}

#[test]
fn a_disk_without_space_is_told_as_that() {
    with_a_fake_cufile("a_disk_without_space_is_told_as_that", |gpu| {
        let dir = scratch();
        let staging = try_open(&store(dir.path())).unwrap();
        gpu.fail_cufile("cuFileWrite", libc::ENOSPC, When::Always);
        let (staged, found) = down_and_up(gpu, &staging, 7);
        gpu.recover_cufile();
        assert_eq!(staged.failure().unwrap().kind(), ErrorKind::NoSpace);
        assert!(found.unwrap() == vec![7; LEN]);
        // The quota is one for both files.
        let bound =
            StoreConfig { max_disk_bytes: Some(4096), ..config(dir.path(), Backend::Psync) };
        let staging = try_open(&TensorStore::open(&bound).unwrap()).unwrap();
        let (staged, found) = down_and_up(gpu, &staging, 8);
        assert_eq!(staged.failure().unwrap().kind(), ErrorKind::OverBound);
        assert!(found.unwrap() == vec![8; LEN]);
    });
}

#[test]
fn short_and_failed_transfers_are_asked_for_again() {
    with_a_fake_cufile("short_and_failed_transfers_are_asked_for_again", |gpu| {
        for (symbol, code, when) in [
            ("cuFileWrite", MOVES_HALF, When::After(0)),
            ("cuFileWrite", MOVES_HALF, When::After(1)),
            ("cuFileRead", MOVES_HALF, When::After(0)),
            ("cuFileWrite", libc::EINTR, When::After(0)),
            ("cuFileRead", libc::EAGAIN, When::After(0)),
            ("cuFileRead", libc::EIO, When::After(0)),
            ("cuFileRead", 5030, When::After(0)),
        ] {
            let dir = scratch();
            let staging = try_open(&store(dir.path())).unwrap();
            let before = gpu.cufile_call_count(symbol);
            gpu.fail_cufile(symbol, code, when);
            let (staged, found) = down_and_up(gpu, &staging, 3);
            gpu.recover_cufile();
            assert!(staged.failure().is_none(), "{symbol} {code}: {:?}", staged.failure());
            assert!(found.unwrap() == vec![3; LEN], "{symbol} {code}");
            let least = if when == When::After(0) { 2 } else { 1 };
            assert!(gpu.cufile_call_count(symbol) - before >= least, "{symbol} {code}");
        }
    });
}

#[test]
fn small_neighbours_go_together_and_a_short_one_is_resumed() {
    with_a_fake_cufile("small_neighbours_go_together_and_a_short_one_is_resumed", |gpu| {
        const BUSY: usize = 100_000;
        const SMALL: usize = 4000;
        let (dir, stream) = (scratch(), gpu.stream());
        let staging = try_open(&store(dir.path())).unwrap();
        gpu.hold("disk");
        let mut busy = Vec::new();
        for count in 1..=4 {
            busy.push(save(gpu, &staging, &stream, 1, BUSY));
            // One after the other, or they would go together.
            until_gone(|| gpu.cufile_call_count("cuFileWrite") == count);
        }
        // Nobody wants every other one: the rest are neighbours on the disk, not in memory.
        staging.tier().grow(&Gpu::get(0).unwrap(), SMALL).unwrap();
        gpu.hold("copies to the host");
        let (mut small, mut between) = (Vec::new(), Vec::new());
        for value in 10..20 {
            small.push((value, save(gpu, &staging, &stream, value, SMALL)));
            between.push(save(gpu, &staging, &stream, value, SMALL));
        }
        let source = gpu.allocate(SMALL);
        let last = begun(staging.save(source.range(), stream.handle(), Tier::Pinned).unwrap());
        // Their memory stays until they have been copied.
        let _sources: Vec<_> = between.into_iter().map(|(_unwanted, source)| source).collect();
        gpu.release("copies to the host");
        // Copies are followed in their order, so all of the others wait for the disk by now.
        until(&staging, || last.is_settled());
        gpu.fail_cufile("cuFileWrite", MOVES_HALF, When::After(0));
        gpu.release("disk");
        until(&staging, || small.iter().all(|(_, (staged, _))| staged.is_settled()));
        gpu.recover_cufile();
        for (value, (staged, _source)) in &small {
            assert!(staged.failure().is_none());
            let found = load(gpu, &staging, &stream, staged, SMALL).unwrap();
            assert!(found == vec![*value; SMALL], "{value}");
        }
        stream.synchronize();
        drop(busy);
    });
}

#[test]
fn a_read_that_always_fails_is_told() {
    with_a_fake_cufile("a_read_that_always_fails_is_told", |gpu| {
        for code in [libc::EIO, 5030, -5022, MOVES_NOTHING] {
            let dir = scratch();
            let staging = try_open(&store(dir.path())).unwrap();
            gpu.fail_cufile("cuFileRead", code, When::Always);
            let (staged, found) = down_and_up(gpu, &staging, 3);
            gpu.recover_cufile();
            let error = found.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let words = if code == MOVES_NOTHING { "moved no bytes" } else { "cuFileRead failed" };
            assert!(error.to_string().contains(words), "{code}: {error}");
            until(&staging, || staging.pinned_bytes().1 == 0);
            // The bytes are there still.
            let found = load(gpu, &staging, &gpu.stream(), &staged, LEN).unwrap();
            assert!(found == vec![3; LEN]);
        }
    });
}

#[test]
fn a_failed_opening_names_its_function_and_leaves_nothing() {
    let name = "a_failed_opening_names_its_function_and_leaves_nothing";
    with_a_fake_cufile(name, |gpu| {
        // Opened first, so that each failure is that of the function and not of the driver.
        library();
        for (symbol, nth) in
            [("cuFileHandleRegister", 0), ("cuFileBufRegister", 0), ("cuFileBufRegister", 1)]
        {
            let dir = scratch();
            let store = store(dir.path());
            let unfreed = || gpu.call_count("cuMemAlloc_v2") - gpu.call_count("cuMemFree_v2");
            let before = unfreed();
            gpu.fail_cufile(symbol, 5008, When::After(nth));
            let error = try_open(&store).unwrap_err();
            assert_eq!(unfreed(), before, "{symbol}: memory of the GPU is left");
            gpu.recover_cufile();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(&format!("{symbol} of libcufile")), "{error}");
            assert!(error.to_string().contains("5008"), "{error}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{symbol}: a name");
            assert!(gpu.registered_count() <= 1, "{symbol}: a ring is left");
            // The next one works.
            let (_staged, found) = down_and_up(gpu, &try_open(&store).unwrap(), 4);
            assert!(found.unwrap() == vec![4; LEN]);
            drop(store);
            until_gone(|| gpu.registered_count() == 0);
        }
        for (symbol, words) in
            [("cuMemAlloc_v2", "cuMemAlloc_v2"), ("cuPointerGetAttribute", "cuPointerGetAttribute")]
        {
            let dir = scratch();
            gpu.fail(symbol, 2, When::After(0));
            let error = try_open(&store(dir.path())).unwrap_err();
            gpu.recover();
            assert!(error.to_string().contains(words), "{error}");
            assert!(error.to_string().contains("of the GPU's memory"), "{error}");
        }
    });
}

#[test]
fn each_failure_of_the_driver_is_told_by_its_name() {
    with_a_fake_cufile("each_failure_of_the_driver_is_told_by_its_name", |gpu| {
        for symbol in ["cuMemcpyDtoDAsync_v2", "cuPointerGetAttribute"] {
            for when in [When::After(0), When::Always] {
                let dir = scratch();
                let staging = try_open(&store(dir.path())).unwrap();
                let (stream, source) = (gpu.stream(), gpu.allocate(LEN));
                stream.fill(&source, 3);
                gpu.fail(symbol, 719, when);
                let told = match staging.save(source.range(), stream.handle(), Tier::Disk) {
                    Err(error) => Some(error),
                    Ok(Saved::Begun(staged)) => {
                        until(&staging, || staged.is_settled());
                        staged.failure()
                    }
                    Ok(other) => panic!("not saved: {other:?}"),
                };
                gpu.recover();
                let told = told.expect("nobody heard of it").to_string();
                assert!(told.contains(symbol), "{told}");
                until(&staging, || staging.pinned_bytes().1 == 0);
                gpu.synchronize();
                let (_staged, found) = down_and_up(gpu, &staging, 3);
                assert!(found.unwrap() == vec![3; LEN]);
            }
        }
    });
}

#[test]
fn memory_of_the_cpu_and_of_a_gpu_go_to_stores_of_their_own() {
    with_a_fake_cufile("memory_of_the_cpu_and_of_a_gpu_go_to_stores_of_their_own", |gpu| {
        let dir = scratch();
        let store = store(dir.path());
        let for_gpus = store.for_gpus(library()).unwrap();
        let bytes = pattern(1, 100_000);
        let error = for_gpus.write(lend(&bytes, 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        // Slots on the GPU behind a store that is not for them: they stay there.
        let library = library();
        let gpu_0 = Gpu::get(0).unwrap();
        let staging = Staging::open_direct(&gpu_0, Arc::clone(&store), RING, library).unwrap();
        let (staged, found) = down_and_up(gpu, &staging, 3);
        assert_eq!(staged.failure().unwrap().kind(), ErrorKind::Config);
        assert!(found.unwrap() == vec![3; LEN]);
        // And the store beside does what it did.
        let stored = store.write(lend(&bytes, 0)).unwrap();
        assert!(read_back(&store, &stored).unwrap() == bytes[..]);
    });
}

#[test]
fn checksums_and_direct_transfers_exclude_each_other() {
    with_a_fake_cufile("checksums_and_direct_transfers_exclude_each_other", |_gpu| {
        let dir = scratch();
        let verified = StoreConfig { verify: true, ..config(dir.path(), Backend::Psync) };
        let error = try_open(&TensorStore::open(&verified).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("verify"), "{error}");
    });
}

#[test]
fn a_trial_tells_whether_it_works() {
    with_a_fake_cufile("a_trial_tells_whether_it_works", |gpu| {
        let dir = scratch();
        let run = || trial::run(None, dir.path(), 0, false);
        // Before the driver is open: afterwards it is not opened again.
        for symbol in ["cuFileSetParameterBool", "cuFileDriverOpen", "cuFileGetVersion"] {
            gpu.fail_cufile(symbol, 5001, When::After(0));
            let error = run().unwrap_err();
            gpu.recover_cufile();
            assert!(error.to_string().contains(symbol), "{error}");
        }
        let facts = run().unwrap();
        assert_eq!((facts.version, facts.allows_compat), (1170, false));
        for (symbol, words) in [
            ("cuFileDriverGetProperties", "cuFileDriverGetProperties of libcufile failed"),
            ("cuFileHandleRegister", "cuFileHandleRegister of libcufile failed"),
            ("cuFileBufRegister", "cuFileBufRegister of libcufile failed"),
            ("cuFileWrite", "cuFileWrite failed"),
            ("cuFileRead", "cuFileRead failed"),
        ] {
            gpu.fail_cufile(symbol, 5008, When::Always);
            let error = run().unwrap_err();
            gpu.recover_cufile();
            assert!(error.to_string().contains(words), "{error}");
            assert!(error.to_string().contains("5008"), "{error}");
        }
        gpu.fail_cufile("cuFileWrite", MOVES_HALF, When::Always);
        assert!(run().unwrap_err().to_string().contains("moved 524288 of 1048576"));
        gpu.recover_cufile();
        assert_eq!(run().unwrap(), facts);
        assert_eq!(gpu.registered_count(), 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    });
}

#[test]
fn compatibility_mode_counts_only_where_it_is_asked_for() {
    with_a_fake_cufile("compatibility_mode_counts_only_where_it_is_asked_for", |_gpu| {
        let dir = scratch();
        assert!(trial::run(None, dir.path(), 0, true).unwrap().allows_compat);
        // By now it is open in that mode, and stays so.
        let error = trial::run(None, dir.path(), 0, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("compatibility mode"), "{error}");
    });
}

#[test]
fn without_the_library_there_is_an_error_and_no_panic() {
    let absent = Path::new("/no/such/libcufile.so.0");
    match Library::find(Some(absent)) {
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("libcufile.so.0"), "{error}");
        }
        Ok(_) => eprintln!("skipped: this machine has the library"),
    }
}
