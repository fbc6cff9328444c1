//! The staged way between a GPU and the store, on a GPU made of software.
//!
//! Its detector reports each pair of accesses that nothing orders; every test ends with none.

use std::sync::Arc;
use std::time::Duration;

use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::staging::{Full, Loading, PinnedBytes, Saved, Staged, Staging, Tier};
use ssdtrain_core::{Backend, ErrorKind, StoreConfig, TensorStore};

#[expect(dead_code, reason = "shared with other suites")]
mod engines;
#[expect(dead_code, reason = "shared with other suites")]
mod fake_gpu;
mod memory;
#[expect(dead_code, reason = "shared with other suites")]
mod round_trip;
use engines::{config, paused_disk};
use fake_gpu::{
    ComputeStream, DeviceBytes, FakeGpu, TO_DEVICE, TO_HOST, When, in_a_forked_child, on_a_fake_gpu,
};
use round_trip::scratch;

const LEN: usize = 300_001;
const RING: PinnedBytes = PinnedBytes { down: 1 << 20, up: 1 << 20 };
/// Longer than any of these takes; what ends later hangs.
const LONG: Duration = Duration::from_secs(30);

fn begun(saved: Saved) -> Staged {
    match saved {
        Saved::Begun(staged) => staged,
        other => panic!("not saved: {other:?}"),
    }
}

fn full(saved: Saved) -> Full {
    match saved {
        Saved::Full(full) => full,
        other => panic!("there was room: {other:?}"),
    }
}

/// Waits for what the worker does.
fn until(staging: &Staging, mut is_so: impl FnMut() -> bool) {
    loop {
        let turn = staging.turn();
        if is_so() {
            return;
        }
        assert!(staging.wait_for_turn(turn, LONG), "the worker does nothing any more");
    }
}

/// A staging over a store on `backend`, with room for three tensors in each direction.
fn open(dir: &tempfile::TempDir, backend: Backend) -> Staging {
    let store = TensorStore::open(&config(dir.path(), backend)).unwrap();
    Staging::open(&Gpu::get(0).unwrap(), Arc::new(store), RING).unwrap()
}

/// Computes a tensor and saves it.
fn save<'gpu>(
    gpu: &'gpu FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
    value: u8,
) -> (Staged, DeviceBytes<'gpu>) {
    let source = gpu.allocate(LEN);
    stream.fill(&source, value);
    let staged = begun(staging.save(source.range(), stream.handle(), Tier::Disk).unwrap());
    (staged, source)
}

/// Loads into memory that the stream has used before, and lends it to the stream.
fn load<'gpu>(
    gpu: &'gpu FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
    staged: &Staged,
) -> DeviceBytes<'gpu> {
    let target = gpu.allocate(LEN);
    stream.fill(&target, 0xee);
    let loading = staging.load(staged, target.range(), stream.handle()).unwrap();
    loading.lend(stream.handle(), LONG).expect("it comes").unwrap();
    target
}

/// Waits until nothing holds pinned memory any more.
fn until_empty(staging: &Staging) {
    until(staging, || staging.pinned_bytes().1 == 0);
}

#[test]
fn what_was_saved_comes_back_from_the_disk() {
    on_a_fake_gpu("what_was_saved_comes_back_from_the_disk", |gpu| {
        for seed in 0..3 {
            gpu.set_lag(TO_HOST, 2000, seed);
            gpu.set_lag(TO_DEVICE, 2000, seed);
            let dir = scratch();
            let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
            let mut saved = Vec::new();
            for value in 0..20 {
                let source = gpu.allocate(LEN);
                stream.fill(&source, value);
                let staged = loop {
                    let turn = staging.turn();
                    match staging.save(source.range(), stream.handle(), Tier::Disk).unwrap() {
                        Saved::Begun(staged) => break staged,
                        Saved::Full(_) => assert!(staging.wait_for_turn(turn, LONG)),
                        Saved::Capturing => unreachable!("nothing is captured here"),
                    }
                };
                staged.release(stream.handle()).unwrap();
                // The memory is used for something else at once.
                stream.fill(&source, 0xdd);
                stream.synchronize();
                saved.push(staged);
            }
            until(&staging, || saved.iter().all(Staged::is_settled));
            assert_eq!(staging.pinned_bytes().1, 0, "all is on the disk");
            for (value, staged) in saved.into_iter().enumerate().rev() {
                assert!(staged.failure().is_none());
                let target = load(gpu, &staging, &stream, &staged);
                drop(staged);
                assert!(stream.read(&target) == vec![value as u8; LEN], "{value}");
            }
            until_empty(&staging);
            let counts = staging.counts();
            assert_eq!(counts.down_bytes, 20 * LEN as u64);
            assert_eq!((counts.up_bytes, counts.from_slot_count), (counts.down_bytes, 0));
            assert!(counts.down_ns > 0 && counts.up_ns > 0, "the copies took no time: {counts:?}");
            assert!(staging.close(LONG));
        }
    });
}

#[test]
fn what_has_not_left_its_slot_comes_from_there() {
    on_a_fake_gpu("what_has_not_left_its_slot_comes_from_there", |gpu| {
        let ((pause, disk), dir) = (paused_disk(), scratch());
        let (staging, stream) = (open(&dir, disk), gpu.stream());
        let (staged, source) = save(gpu, &staging, &stream, 7);
        // Once while it waits for the disk, and once while it is still being copied.
        let target = load(gpu, &staging, &stream, &staged);
        assert!(stream.read(&target) == vec![7; LEN]);
        gpu.hold(TO_HOST);
        let (held, held_source) = save(gpu, &staging, &stream, 9);
        let early = gpu.allocate(LEN);
        let loading = staging.load(&held, early.range(), stream.handle()).unwrap();
        assert!(loading.is_enqueued(), "the GPU waits, and not the CPU");
        loading.lend(stream.handle(), LONG).unwrap().unwrap();
        gpu.release(TO_HOST);
        assert!(stream.read(&early) == vec![9; LEN]);
        assert_eq!(staging.counts().from_slot_count, 2);
        pause.resume();
        until(&staging, || staged.is_settled() && held.is_settled());
        drop((staged, held, source, held_source));
        until_empty(&staging);
    });
}

#[test]
fn a_full_ring_says_what_it_waits_for() {
    on_a_fake_gpu("a_full_ring_says_what_it_waits_for", |gpu| {
        let ((pause, disk), dir) = (paused_disk(), scratch());
        let (staging, stream) = (open(&dir, disk), gpu.stream());
        let source = gpu.allocate(LEN);
        stream.fill(&source, 1);
        let try_save = |tier| staging.save(source.range(), stream.handle(), tier).unwrap();
        gpu.hold(TO_HOST);
        let held: Vec<_> = (0..3).map(|_| begun(try_save(Tier::Disk))).collect();
        assert_eq!(full(try_save(Tier::Disk)), Full::GpuBehind);
        gpu.release(TO_HOST);
        until(&staging, || full(try_save(Tier::Disk)) == Full::DiskBehind);
        pause.resume();
        until(&staging, || held.iter().all(Staged::is_settled));
        let large = gpu.allocate(RING.down + 1);
        let answer = staging.save(large.range(), stream.handle(), Tier::Disk).unwrap();
        assert_eq!(full(answer), Full::TooLong);
    });
}

#[test]
fn a_load_finds_room_however_full_the_other_direction_is() {
    on_a_fake_gpu("a_load_finds_room_however_full_the_other_direction_is", |gpu| {
        let dir = scratch();
        let one = Some(LEN.next_multiple_of(4096) as u64);
        let config = StoreConfig { max_disk_bytes: one, ..config(dir.path(), Backend::Psync) };
        let store = Arc::new(TensorStore::open(&config).unwrap());
        let staging = Staging::open(&Gpu::get(0).unwrap(), store, RING).unwrap();
        let stream = gpu.stream();
        let (on_disk, _source) = save(gpu, &staging, &stream, 1);
        until(&staging, || on_disk.is_settled());
        assert!(on_disk.failure().is_none() && !on_disk.is_pinned());
        let refused: Vec<_> = (0..3).map(|_| save(gpu, &staging, &stream, 2)).collect();
        until(&staging, || refused.iter().all(|(staged, _)| staged.is_settled()));
        let source = gpu.allocate(LEN);
        let answer = staging.save(source.range(), stream.handle(), Tier::Disk).unwrap();
        assert_eq!(full(answer), Full::Pinned, "all slots are taken for good");
        assert!(stream.read(&load(gpu, &staging, &stream, &on_disk)) == vec![1; LEN]);
    });
}

#[test]
fn the_slot_of_a_write_that_nobody_wants_waits_for_the_disk() {
    on_a_fake_gpu("the_slot_of_a_write_that_nobody_wants_waits_for_the_disk", |gpu| {
        let ((pause, disk), dir) = (paused_disk(), scratch());
        let store = Arc::new(TensorStore::open(&config(dir.path(), disk)).unwrap());
        let one_slot = PinnedBytes { down: LEN, up: LEN };
        let staging = Staging::open(&Gpu::get(0).unwrap(), store, one_slot).unwrap();
        let (stream, source) = (gpu.stream(), gpu.allocate(LEN));
        stream.fill(&source, 1);
        let try_save = |tier| staging.save(source.range(), stream.handle(), tier).unwrap();
        staging.grow_tier(LEN).unwrap();
        let stays = begun(try_save(Tier::Pinned));
        until(&staging, || stays.is_settled());
        // One that the disk has begun. One that had not begun is cancelled, and its slot is free.
        loop {
            let unwanted = begun(try_save(Tier::Disk));
            until(&staging, || full(try_save(Tier::Disk)) == Full::DiskBehind);
            let before = staging.pinned_bytes().1;
            drop(unwanted);
            // The worker has looked at the writes once a load has come and gone.
            assert!(stream.read(&load(gpu, &staging, &stream, &stays)) == vec![1; LEN]);
            until(&staging, || staging.pinned_bytes().1 <= before);
            if staging.pinned_bytes().1 == before {
                break;
            }
        }
        assert_eq!(full(try_save(Tier::Disk)), Full::DiskBehind);
        pause.resume();
        drop(stays);
        until_empty(&staging);
    });
}

#[test]
fn what_shall_stay_has_pinned_memory_of_its_own() {
    on_a_fake_gpu("what_shall_stay_has_pinned_memory_of_its_own", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let source = gpu.allocate(LEN);
        let save_to = |tier| staging.save(source.range(), stream.handle(), tier).unwrap();
        assert_eq!(full(save_to(Tier::Pinned)), Full::Pinned, "there is none yet");
        let ring_bytes = staging.pinned_bytes().0;
        staging.grow_tier(LEN).unwrap();
        // Longer than any slot of what goes to the disk.
        staging.grow_tier(RING.down + 1).unwrap();
        let tier_bytes = staging.tier_bytes().0;
        assert!(tier_bytes > LEN + RING.down);
        assert_eq!(staging.pinned_bytes().0, ring_bytes + tier_bytes);
        let large = gpu.allocate(RING.down + 1);
        let answer = staging.save(large.range(), stream.handle(), Tier::Pinned).unwrap();
        let (of_large, mut stays) = (begun(answer), Vec::new());
        stream.fill(&source, 3);
        stays.push(begun(save_to(Tier::Pinned)));
        assert_eq!(full(save_to(Tier::Pinned)), Full::Pinned);
        let written = begun(save_to(Tier::Disk));
        stays[0].release(stream.handle()).unwrap();
        written.release(stream.handle()).unwrap();
        stream.fill(&source, 0xdd);
        until(&staging, || stays[0].is_settled() && of_large.is_settled());
        assert!(stays[0].is_pinned() && stays[0].failure().is_none());
        assert!(stream.read(&load(gpu, &staging, &stream, &stays[0])) == vec![3; LEN]);
        let counts = staging.counts();
        assert_eq!(counts.staying_bytes, (LEN + RING.down + 1) as u64);
        assert_eq!(counts.from_slot_count, 0, "it was on its way to nowhere");
        drop((stays, of_large, written));
        until_empty(&staging);
        let again = begun(save_to(Tier::Pinned));
        until(&staging, || again.is_settled());
    });
}

#[test]
fn what_the_disk_refuses_stays_in_its_slot() {
    on_a_fake_gpu("what_the_disk_refuses_stays_in_its_slot", |gpu| {
        let dir = scratch();
        let config =
            StoreConfig { max_disk_bytes: Some(4096), ..config(dir.path(), Backend::Psync) };
        let store = Arc::new(TensorStore::open(&config).unwrap());
        let staging = Staging::open(&Gpu::get(0).unwrap(), store, RING).unwrap();
        let stream = gpu.stream();
        let (staged, source) = save(gpu, &staging, &stream, 5);
        staged.release(stream.handle()).unwrap();
        stream.fill(&source, 0xdd);
        until(&staging, || staged.is_settled());
        assert!(staged.is_pinned());
        assert_eq!(staged.failure().unwrap().kind(), ErrorKind::OverBound);
        let counts = staging.counts();
        assert_eq!((counts.write_refused_count, counts.write_failed_count), (1, 0));
        let told = staging.take_refusals();
        assert!(matches!(&told[..], [(error, 1)] if error.kind() == ErrorKind::OverBound));
        assert!(staging.take_refusals().is_empty(), "each is told once");
        assert_eq!(staging.last_refusal().unwrap().kind(), ErrorKind::OverBound);
        assert!(stream.read(&load(gpu, &staging, &stream, &staged)) == vec![5; LEN]);
        drop(staged);
        until_empty(&staging);
    });
}

#[test]
fn what_nobody_wants_gives_its_slot_back_after_its_copy() {
    on_a_fake_gpu("what_nobody_wants_gives_its_slot_back_after_its_copy", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        gpu.hold(TO_HOST);
        let (staged, source) = save(gpu, &staging, &stream, 5);
        staged.release(stream.handle()).unwrap();
        drop(staged);
        assert!(staging.pinned_bytes().1 >= LEN, "the copy is under way");
        // The memory may be given to others in the order of the stream.
        stream.fill(&source, 0xdd);
        gpu.release(TO_HOST);
        until_empty(&staging);
        assert!(stream.read(&source) == vec![0xdd; LEN]);
        assert!(staging.close(LONG));
    });
}

#[test]
fn what_was_seen_to_be_over_is_not_waited_for() {
    on_a_fake_gpu("what_was_seen_to_be_over_is_not_waited_for", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let waits = || gpu.call_count("cuStreamWaitEvent");
        gpu.hold(TO_HOST);
        let (staged, source) = save(gpu, &staging, &stream, 5);
        let before = waits();
        assert!(staging.order(&staged.copied(), stream.handle()).unwrap());
        assert_eq!(waits(), before + 1, "the copy is under way");
        gpu.release(TO_HOST);
        until(&staging, || staged.is_settled());
        // The worker has seen the copy end; so the host has, and all that it puts on a stream now.
        let before = waits();
        assert!(staging.order(&staged.copied(), stream.handle()).unwrap());
        assert_eq!(waits(), before);
        stream.fill(&source, 0xdd);
        drop(staged);
        until_empty(&staging);
    });
}

#[test]
fn a_forked_child_knows_that_the_gpu_is_its_parents() {
    on_a_fake_gpu("a_forked_child_knows_that_the_gpu_is_its_parents", |_| {
        let gpu = Gpu::get(0).unwrap();
        assert!(in_a_forked_child(|| gpu.is_forked()));
        // Also where the child forks again.
        assert!(in_a_forked_child(|| in_a_forked_child(|| gpu.is_forked())));
        assert!(!gpu.is_forked());
        gpu.within(|_| Ok(())).unwrap();
    });
}

#[test]
fn a_load_that_is_given_up_does_not_write() {
    on_a_fake_gpu("a_load_that_is_given_up_does_not_write", |gpu| {
        let ((pause, disk), dir) = (paused_disk(), scratch());
        let (staging, stream) = (open(&dir, disk), gpu.stream());
        pause.resume();
        let (staged, source) = save(gpu, &staging, &stream, 5);
        staged.release(stream.handle()).unwrap();
        until(&staging, || staged.is_settled());
        pause.pause();
        let target = gpu.allocate(LEN);
        let loading = staging.load(&staged, target.range(), stream.handle()).unwrap();
        assert!(loading.lend(stream.handle(), Duration::ZERO).is_none(), "nothing moves");
        assert!(loading.give_up().is_none(), "no copy has begun");
        stream.fill(&target, 0xaa);
        pause.resume();
        until_empty(&staging);
        assert!(stream.read(&target) == vec![0xaa; LEN]);
        let error = loading.lend(stream.handle(), LONG).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        // One whose copy has begun is waited for, by the stream.
        gpu.hold(TO_DEVICE);
        let loading = staging.load(&staged, target.range(), stream.handle()).unwrap();
        until(&staging, || loading.is_enqueued());
        loading.give_up().expect("the copy has begun").wait_on(stream.handle()).unwrap();
        stream.fill(&target, 0xbb);
        gpu.release(TO_DEVICE);
        assert!(stream.read(&target) == vec![0xbb; LEN]);
        drop((staged, source));
        until_empty(&staging);
    });
}

#[test]
fn a_slot_is_read_into_again_once_the_gpu_has_its_bytes() {
    on_a_fake_gpu("a_slot_is_read_into_again_once_the_gpu_has_its_bytes", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let mut saved = Vec::new();
        for value in 0..5 {
            let (staged, _source) = save(gpu, &staging, &stream, value);
            staged.release(stream.handle()).unwrap();
            until(&staging, || staged.is_settled());
            saved.push(staged);
        }
        gpu.hold(TO_DEVICE);
        let targets: Vec<_> = saved.iter().map(|_| gpu.allocate(LEN)).collect();
        let loads: Vec<_> = saved
            .iter()
            .zip(&targets)
            .map(|(staged, target)| staging.load(staged, target.range(), stream.handle()).unwrap())
            .collect();
        // There are three slots, and the copies from them stand still.
        until(&staging, || loads[..3].iter().all(Loading::is_enqueued));
        assert!(loads[3].lend(stream.handle(), Duration::from_millis(50)).is_none());
        gpu.release(TO_DEVICE);
        for (value, (loading, target)) in loads.iter().zip(&targets).enumerate() {
            loading.lend(stream.handle(), LONG).unwrap().unwrap();
            assert!(stream.read(target) == vec![value as u8; LEN], "{value}");
        }
        drop(saved);
        until_empty(&staging);
    });
}

#[test]
fn several_streams_are_lent_the_same_load() {
    on_a_fake_gpu("several_streams_are_lent_the_same_load", |gpu| {
        let dir = scratch();
        let staging = open(&dir, Backend::Psync);
        let (first, second) = (gpu.stream(), gpu.stream());
        let (staged, source) = save(gpu, &staging, &first, 5);
        staged.release(first.handle()).unwrap();
        until(&staging, || staged.is_settled());
        gpu.hold(TO_DEVICE);
        let target = gpu.allocate(LEN);
        let loading = staging.load(&staged, target.range(), first.handle()).unwrap();
        for stream in [&first, &second] {
            loading.lend(stream.handle(), LONG).unwrap().unwrap();
        }
        gpu.release(TO_DEVICE);
        assert!(second.read(&target) == vec![5; LEN]);
        first.synchronize();
        drop(source);
    });
}

#[test]
fn a_stream_that_captures_keeps_its_tensors() {
    on_a_fake_gpu("a_stream_that_captures_keeps_its_tensors", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let source = gpu.allocate(LEN);
        stream.begin_capture();
        let answer = staging.save(source.range(), stream.handle(), Tier::Disk).unwrap();
        stream.end_capture();
        assert!(matches!(answer, Saved::Capturing), "{answer:?}");
        assert_eq!(staging.pinned_bytes().1, 0);
    });
}

#[test]
fn nothing_is_loaded_into_a_graph() {
    on_a_fake_gpu("nothing_is_loaded_into_a_graph", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let (staged, _source) = save(gpu, &staging, &stream, 5);
        staged.release(stream.handle()).unwrap();
        until(&staging, || staged.is_settled());
        let target = gpu.allocate(LEN);
        let before = staging.load(&staged, target.range(), stream.handle()).unwrap();
        until(&staging, || before.is_enqueued());
        stream.begin_capture();
        for answer in [
            before.lend(stream.handle(), LONG).expect("it is enqueued"),
            staging.load(&staged, target.range(), stream.handle()).map(drop),
        ] {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("CUDA graph"), "{error}");
        }
        stream.end_capture();
        before.lend(stream.handle(), LONG).expect("it is enqueued").unwrap();
        assert!(stream.read(&target) == vec![5; LEN]);
    });
}

#[test]
fn the_callers_context_is_as_it_was() {
    on_a_fake_gpu("the_callers_context_is_as_it_was", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let before = gpu.current_context();
        let (staged, source) = save(gpu, &staging, &stream, 1);
        assert_eq!(gpu.current_context(), before);
        gpu.leave_context();
        staged.release(stream.handle()).unwrap();
        until(&staging, || staged.is_settled());
        assert_eq!(gpu.current_context(), 0);
        gpu.enter_context();
        drop((staged, source));
    });
}

#[test]
fn a_closed_staging_refuses_and_ends() {
    on_a_fake_gpu("a_closed_staging_refuses_and_ends", |gpu| {
        let ((pause, disk), dir) = (paused_disk(), scratch());
        let (staging, stream) = (open(&dir, disk), gpu.stream());
        let (staged, source) = save(gpu, &staging, &stream, 1);
        assert!(!staging.close(Duration::ZERO), "a write is under way");
        let error = staging.save(source.range(), stream.handle(), Tier::Disk).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        let error = staging.load(&staged, source.range(), stream.handle()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        pause.resume();
        assert!(staging.close(LONG));
        assert!(staged.is_settled());
    });
}

/// The functions that are called once something is under way.
const SYMBOLS: [&str; 11] = [
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
];
const LAUNCH_FAILED: i32 = 719;
/// Without an answer to a query the whole stream is waited for, which is as good, and without one
/// to how long a copy took it is not counted. Of the others there is one call each.
const IS_ABSORBED: [(&str, When); 12] = [
    ("cuCtxPushCurrent_v2", When::After(1)),
    ("cuCtxPopCurrent_v2", When::After(0)),
    ("cuCtxPopCurrent_v2", When::After(1)),
    ("cuEventQuery", When::After(0)),
    ("cuEventQuery", When::After(1)),
    ("cuEventQuery", When::Always),
    ("cuEventElapsedTime", When::After(0)),
    ("cuEventElapsedTime", When::After(1)),
    ("cuEventElapsedTime", When::Always),
    ("cuMemcpyDtoHAsync_v2", When::After(1)),
    ("cuMemcpyHtoDAsync_v2", When::After(1)),
    ("cuStreamIsCapturing", When::After(1)),
];

/// One way down and up, during which calls may fail; an error of any of them is returned.
fn down_and_up(
    gpu: &FakeGpu,
    staging: &Staging,
    failure: Option<(&str, When)>,
) -> ssdtrain_core::Result<()> {
    let (stream, source, target) = (gpu.stream(), gpu.allocate(LEN), gpu.allocate(LEN));
    stream.fill(&source, 3);
    stream.synchronize();
    if let Some((symbol, when)) = failure {
        gpu.fail(symbol, LAUNCH_FAILED, when, false);
    }
    // A context that is current is neither entered nor left.
    let is_outside = failure.is_some_and(|(symbol, _)| symbol.starts_with("cuCtxP"));
    if is_outside {
        gpu.leave_context();
    }
    let answer = moved(staging, &stream, &source, &target);
    gpu.recover();
    if is_outside {
        gpu.enter_context();
    }
    // As after any step that failed: what uses source and target has ended before they go.
    gpu.synchronize();
    answer?;
    assert!(stream.read(&target) == vec![3; LEN], "other bytes came back");
    Ok(())
}

fn moved(
    staging: &Staging,
    stream: &ComputeStream<'_>,
    source: &DeviceBytes<'_>,
    target: &DeviceBytes<'_>,
) -> ssdtrain_core::Result<()> {
    let staged = begun(staging.save(source.range(), stream.handle(), Tier::Disk)?);
    let released = staged.release(stream.handle());
    until(staging, || staged.is_settled());
    released?;
    let loading = staging.load(&staged, target.range(), stream.handle())?;
    loading.lend(stream.handle(), LONG).expect("it comes, or fails")
}

#[test]
fn each_failure_of_the_driver_is_told_by_its_name() {
    on_a_fake_gpu("each_failure_of_the_driver_is_told_by_its_name", |gpu| {
        for symbol in SYMBOLS {
            for when in [When::After(0), When::After(1), When::Always] {
                // With no event in the pool.
                let dir = scratch();
                let staging = open(&dir, Backend::Psync);
                match down_and_up(gpu, &staging, Some((symbol, when))) {
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Cuda, "{symbol} {when:?}: {error}");
                        assert!(error.to_string().contains(symbol), "{when:?}: {error}");
                    }
                    Ok(()) => assert!(
                        IS_ABSORBED.contains(&(symbol, when)),
                        "{symbol} failed ({when:?}), and nobody heard of it"
                    ),
                }
                until_empty(&staging);
                down_and_up(gpu, &staging, None)
                    .unwrap_or_else(|error| panic!("{symbol}: {error}"));
                assert!(staging.close(LONG));
            }
        }
    });
}

#[test]
fn a_slot_is_never_given_to_others_under_a_copy_of_unknown_end() {
    on_a_fake_gpu("a_slot_is_never_given_to_others_under_a_copy_of_unknown_end", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let source = gpu.allocate(LEN);
        stream.fill(&source, 3);
        gpu.synchronize();
        let save = || staging.save(source.range(), stream.handle(), Tier::Disk);
        for (is_known, left_bytes) in [(true, 0), (false, LEN.next_multiple_of(4096))] {
            // The event behind the copy is the second that is recorded.
            gpu.fail("cuEventRecord", LAUNCH_FAILED, When::After(1), false);
            if !is_known {
                gpu.fail("cuStreamSynchronize", LAUNCH_FAILED, When::Always, false);
            }
            let error = save().unwrap_err();
            gpu.recover();
            assert!(error.to_string().contains("cuEventRecord"), "{error}");
            assert_eq!(staging.pinned_bytes().1, left_bytes);
        }
        gpu.synchronize();
    });
}

#[test]
fn a_staging_that_cannot_open_leaves_nothing() {
    on_a_fake_gpu("a_staging_that_cannot_open_leaves_nothing", |gpu| {
        let (dir, gpu_0) = (scratch(), Gpu::get(0).unwrap());
        let store = Arc::new(TensorStore::open(&config(dir.path(), Backend::Psync)).unwrap());
        let open = || Staging::open(&gpu_0, Arc::clone(&store), RING);
        for (symbol, after_count) in [
            ("cuMemHostRegister_v2", 0),
            ("cuMemHostRegister_v2", 1),
            ("cuStreamCreate", 1),
            // Here the context is current before, and only the worker enters it.
            ("cuCtxPushCurrent_v2", 0),
        ] {
            let count = |symbol| gpu.call_count(symbol);
            let (registered, created) = (count("cuMemHostRegister_v2"), count("cuStreamCreate"));
            let (given_back, destroyed) =
                (count("cuMemHostUnregister"), count("cuStreamDestroy_v2"));
            gpu.fail(symbol, LAUNCH_FAILED, When::After(after_count), false);
            let error = open().unwrap_err();
            gpu.recover();
            assert!(error.to_string().contains(symbol), "{error}");
            let failed = |name| u64::from(name == symbol);
            assert_eq!(
                count("cuMemHostUnregister") - given_back,
                count("cuMemHostRegister_v2") - registered - failed("cuMemHostRegister_v2"),
            );
            assert_eq!(
                count("cuStreamDestroy_v2") - destroyed,
                count("cuStreamCreate") - created - failed("cuStreamCreate"),
            );
        }
        assert!(open().unwrap().close(LONG));
    });
}

#[test]
fn a_driver_without_a_gpu_is_no_driver() {
    on_a_fake_gpu("a_driver_without_a_gpu_is_no_driver", |gpu| {
        const NO_DEVICE: i32 = 100;
        gpu.fail("cuInit", NO_DEVICE, When::Always, false);
        let error = Gpu::get(0).unwrap_err();
        gpu.recover();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("no GPU"), "{error}");
    });
}

#[test]
fn a_gpu_that_is_not_there_is_told() {
    on_a_fake_gpu("a_gpu_that_is_not_there_is_told", |_gpu| {
        let error = Gpu::get(7).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cuda);
        assert!(error.to_string().contains("cuDeviceGet"), "{error}");
    });
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    match Gpu::get(0) {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            assert!(error.to_string().contains("NVIDIA driver"), "{error}");
        }
        answer => eprintln!("skipped: this machine has a driver ({answer:?})"),
    }
}
