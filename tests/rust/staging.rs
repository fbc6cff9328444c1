//! The staged way between a GPU and the store, on a GPU made of software.
//!
//! Its detector reports each pair of accesses that nothing orders; every test ends with none.

use std::sync::Arc;
use std::time::Duration;

use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::cuda::hook::{self, Hook};
use ssdtrain_core::staging::{Loading, Ordered, Saved, Staged, Staging, Tier};
use ssdtrain_core::{Backend, ErrorKind, TensorStore};

#[expect(dead_code, reason = "shared with other suites")]
mod engines;
#[expect(dead_code, reason = "shared with other suites")]
mod fake_gpu;
mod memory;
#[expect(dead_code, reason = "shared with other suites")]
mod round_trip;
#[expect(dead_code, reason = "shared with other suites")]
mod staged_way;
use engines::{config, paused_disk};
use fake_gpu::{
    ComputeStream, DeviceBytes, FakeGpu, TO_DEVICE, TO_HOST, When, in_a_forked_child, on_a_fake_gpu,
};
use round_trip::scratch;
use staged_way::{LEN, LONG, RING, begun, load, open, open_bounded, save, until, until_empty};

#[test]
fn saved_tensors_come_back_from_the_disk() {
    on_a_fake_gpu("saved_tensors_come_back_from_the_disk", |gpu| {
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
fn a_load_before_the_write_comes_from_the_slot() {
    on_a_fake_gpu("a_load_before_the_write_comes_from_the_slot", |gpu| {
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
fn a_refused_write_stays_in_its_slot() {
    on_a_fake_gpu("a_refused_write_stays_in_its_slot", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open_bounded(&dir, 4096), gpu.stream());
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
fn an_abandoned_save_frees_its_slot_after_its_copy() {
    on_a_fake_gpu("an_abandoned_save_frees_its_slot_after_its_copy", |gpu| {
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
fn a_copy_seen_to_be_over_is_not_waited_for() {
    on_a_fake_gpu("a_copy_seen_to_be_over_is_not_waited_for", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let waits = || gpu.call_count("cuStreamWaitEvent");
        gpu.hold(TO_HOST);
        let (staged, source) = save(gpu, &staging, &stream, 5);
        let before = waits();
        let ordered = staging.order(&staged.copied(), stream.handle(), true).unwrap();
        assert!(matches!(ordered, Ordered::Waits(Some(_))), "the place is marked");
        assert_eq!(waits(), before + 1, "the copy is under way");
        gpu.release(TO_HOST);
        until(&staging, || staged.is_settled());
        // The worker has seen the copy end; so the host has, and all that it puts on a stream now.
        let before = waits();
        let ordered = staging.order(&staged.copied(), stream.handle(), true).unwrap();
        assert!(matches!(ordered, Ordered::Waits(None)));
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

/// Saves five tensors and loads them while copies to the GPU stand still: three have a slot, two
/// wait.
fn more_loads_than_slots<'gpu>(
    gpu: &'gpu FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
) -> (Vec<Staged>, Vec<DeviceBytes<'gpu>>, Vec<Loading>) {
    let mut saved = Vec::new();
    for value in 0..5 {
        let (staged, _source) = save(gpu, staging, stream, value);
        staged.release(stream.handle()).unwrap();
        until(staging, || staged.is_settled());
        saved.push(staged);
    }
    gpu.hold(TO_DEVICE);
    let targets: Vec<_> = saved.iter().map(|_| gpu.allocate(LEN)).collect();
    let loads: Vec<_> = saved
        .iter()
        .zip(&targets)
        .map(|(staged, target)| staging.load(staged, target.range(), stream.handle()).unwrap())
        .collect();
    until(staging, || loads[..3].iter().all(Loading::is_enqueued));
    (saved, targets, loads)
}

#[test]
fn a_slot_is_read_into_again_once_the_gpu_has_its_bytes() {
    on_a_fake_gpu("a_slot_is_read_into_again_once_the_gpu_has_its_bytes", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let (saved, targets, loads) = more_loads_than_slots(gpu, &staging, &stream);
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
fn a_load_without_a_slot_fails_with_the_gpu_that_lost_all_slots() {
    on_a_fake_gpu("a_load_without_a_slot_fails_with_the_gpu_that_lost_all_slots", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let (_saved, _targets, loads) = more_loads_than_slots(gpu, &staging, &stream);
        // Nobody knows of the three copies whether they still read their slots.
        gpu.fail("cuEventQuery", LAUNCH_FAILED, When::Always);
        gpu.fail("cuStreamSynchronize", LAUNCH_FAILED, When::Always);
        let error = loads[3].lend(stream.handle(), LONG).expect("it does not hang").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cuda);
        gpu.recover();
        gpu.release(TO_DEVICE);
        gpu.synchronize();
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
fn a_hook_asks_once_about_its_own_stream_alone() {
    on_a_fake_gpu("a_hook_asks_once_about_its_own_stream_alone", |gpu| {
        let dir = scratch();
        let (staging, own, other) = (open(&dir, Backend::Psync), gpu.stream(), gpu.stream());
        let saves = |stream: &ComputeStream<'_>| {
            let source = gpu.allocate(LEN);
            let answer = staging.save(source.range(), stream.handle(), Tier::Disk).unwrap();
            stream.synchronize();
            until_empty(&staging);
            matches!(answer, Saved::Begun(_))
        };
        let saves_captured = |stream: &ComputeStream<'_>| {
            stream.begin_capture();
            let source = gpu.allocate(LEN);
            let answer = staging.save(source.range(), stream.handle(), Tier::Disk).unwrap();
            stream.end_capture();
            matches!(answer, Saved::Begun(_))
        };
        let outer = Hook::enter();
        hook::set_stream(0, own.handle());
        assert!(saves(&own) && saves(&other));
        assert!(!saves_captured(&other), "it is asked about another stream each time");
        let nested = Hook::enter();
        hook::set_stream(0, own.handle());
        assert!(!saves_captured(&own), "a nested hook knows nothing of the outer hook");
        assert!(saves(&own));
        drop(nested);
        assert!(!saves_captured(&own), "the outer hook asks anew after a nested hook");
        hook::set_stream(0, own.handle());
        assert!(saves(&own));
        hook::forget();
        assert!(!saves_captured(&own), "it asks anew after a wait");
        drop(outer);
        assert!(!saves_captured(&own));
    });
}

#[test]
fn a_hook_marks_the_work_of_its_stream_anew_for_each_order() {
    on_a_fake_gpu("a_hook_marks_the_work_of_its_stream_anew_for_each_order", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let _hook = Hook::enter();
        hook::set_stream(0, stream.handle());
        // Each save has to wait for the computation of its own source.
        let saved: Vec<_> = (1..=3).map(|value| save(gpu, &staging, &stream, value)).collect();
        for (value, (staged, source)) in (1..).zip(saved) {
            staged.release(stream.handle()).unwrap();
            until(&staging, || staged.is_settled());
            // Each load has to wait for the last use of its memory.
            stream.fill(&source, 9);
            let loading = staging.load(&staged, source.range(), stream.handle()).unwrap();
            loading.lend(stream.handle(), LONG).unwrap().unwrap();
            assert!(stream.read(&source) == vec![value; LEN]);
        }
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
        gpu.fail(symbol, LAUNCH_FAILED, when);
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
            gpu.fail("cuEventRecord", LAUNCH_FAILED, When::After(1));
            if !is_known {
                gpu.fail("cuStreamSynchronize", LAUNCH_FAILED, When::Always);
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
        let open = || Staging::open(&gpu_0, Arc::clone(&store), RING, &Arc::default());
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
            gpu.fail(symbol, LAUNCH_FAILED, When::After(after_count));
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
        gpu.fail("cuInit", NO_DEVICE, When::Always);
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
