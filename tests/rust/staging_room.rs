//! Room in pinned memory: of the ring, and of what stays there; on a GPU made of software.
//!
//! Its detector reports each pair of accesses that nothing orders; every test ends with none.

use ssdtrain_core::Backend;
use ssdtrain_core::staging::{Full, PinnedBytes, Staged, Tier};

#[expect(dead_code, reason = "shared with other suites")]
mod engines;
#[expect(dead_code, reason = "shared with other suites")]
mod fake_gpu;
mod memory;
#[expect(dead_code, reason = "shared with other suites")]
mod round_trip;
mod staged_way;
use engines::paused_disk;
use fake_gpu::{TO_DEVICE, TO_HOST, on_a_fake_gpu};
use round_trip::scratch;
use staged_way::{
    LEN, LONG, RING, begun, full, grow_tier, load, open, open_bounded, open_with, pinned_bytes,
    save, until, until_empty,
};

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
        let one = LEN.next_multiple_of(4096) as u64;
        let (staging, stream) = (open_bounded(&dir, one), gpu.stream());
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
        let staging = open_with(&dir, disk, PinnedBytes { down: LEN, up: LEN });
        let (stream, source) = (gpu.stream(), gpu.allocate(LEN));
        stream.fill(&source, 1);
        let try_save = |tier| staging.save(source.range(), stream.handle(), tier).unwrap();
        grow_tier(&staging, LEN);
        let stays = begun(try_save(Tier::Pinned));
        until(&staging, || stays.is_settled());
        // One that the disk has begun; another is cancelled, and its slot is free.
        loop {
            let unwanted = begun(try_save(Tier::Disk));
            until(&staging, || full(try_save(Tier::Disk)) == Full::DiskBehind);
            let before = pinned_bytes(&staging).1;
            drop(unwanted);
            // The worker has looked at the writes once a load has come and gone.
            assert!(stream.read(&load(gpu, &staging, &stream, &stays)) == vec![1; LEN]);
            until(&staging, || pinned_bytes(&staging).1 <= before);
            if pinned_bytes(&staging).1 == before {
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
fn tensors_that_stay_have_pinned_memory_of_their_own() {
    on_a_fake_gpu("tensors_that_stay_have_pinned_memory_of_their_own", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let source = gpu.allocate(LEN);
        let save_to = |tier| staging.save(source.range(), stream.handle(), tier).unwrap();
        assert_eq!(full(save_to(Tier::Pinned)), Full::Pinned, "there is none yet");
        let ring_bytes = pinned_bytes(&staging).0;
        grow_tier(&staging, LEN);
        // Longer than any slot of what goes to the disk.
        grow_tier(&staging, RING.down + 1);
        assert!(staging.tier().bytes().0 > LEN + RING.down);
        assert_eq!(pinned_bytes(&staging).0, ring_bytes + staging.tier().bytes().0);
        let large = gpu.allocate(RING.down + 1);
        let of_large = staging.save(large.range(), stream.handle(), Tier::Pinned).unwrap();
        stream.fill(&source, 3);
        let (of_large, stays) = (begun(of_large), begun(save_to(Tier::Pinned)));
        assert_eq!(full(save_to(Tier::Pinned)), Full::Pinned);
        let written = begun(save_to(Tier::Disk));
        stays.release(stream.handle()).unwrap();
        written.release(stream.handle()).unwrap();
        stream.fill(&source, 0xdd);
        until(&staging, || stays.is_settled() && of_large.is_settled());
        assert!(stays.is_pinned() && stays.failure().is_none());
        assert!(stream.read(&load(gpu, &staging, &stream, &stays)) == vec![3; LEN]);
        let counts = staging.counts();
        assert_eq!(counts.staying_bytes, (LEN + RING.down + 1) as u64);
        assert_eq!(counts.from_slot_count, 0, "it was on its way to nowhere");
        drop((stays, of_large, written));
        until_empty(&staging);
    });
}

#[test]
fn a_long_tensor_goes_to_the_disk_in_parts() {
    on_a_fake_gpu("a_long_tensor_goes_to_the_disk_in_parts", |gpu| {
        for seed in 0..3 {
            gpu.set_lag(TO_HOST, 2000, seed);
            gpu.set_lag(TO_DEVICE, 2000, seed);
            let (dir, pinned) = (scratch(), PinnedBytes { down: 10 * LEN, up: LEN });
            let (staging, stream) = (open_with(&dir, Backend::Psync, pinned), gpu.stream());
            let len = 9 * LEN + 1;
            assert!(len <= staging.longest_bytes() && LEN < len / 8);
            let source = gpu.allocate(len);
            stream.fill(&source, 7);
            let save = || staging.save(source.range(), stream.handle(), Tier::Disk).unwrap();
            let staged = begun(save());
            assert_ne!(full(save()), Full::TooLong);
            staged.release(stream.handle()).unwrap();
            // The memory is used for something else at once.
            stream.fill(&source, 0xdd);
            until(&staging, || staged.is_settled());
            assert!(staged.failure().is_none() && !staged.is_pinned());
            assert_eq!(staging.counts().down_bytes, len as u64);
            let target = load(gpu, &staging, &stream, &staged);
            assert!(stream.read(&target) == vec![7; len]);
            // Before the write.
            gpu.hold(TO_HOST);
            stream.fill(&source, 9);
            let early = begun(save());
            early.release(stream.handle()).unwrap();
            stream.fill(&source, 0xdd);
            let target = gpu.allocate(len);
            let loading = staging.load(&early, target.range(), stream.handle()).unwrap();
            loading.lend(stream.handle(), LONG).unwrap().unwrap();
            gpu.release(TO_HOST);
            assert!(stream.read(&target) == vec![9; len]);
            // Given up while some of its parts are on their way.
            gpu.hold(TO_DEVICE);
            let before = staging.counts().up_bytes;
            let loading = staging.load(&staged, target.range(), stream.handle()).unwrap();
            until(&staging, || staging.counts().up_bytes > before);
            let after = loading.give_up().expect("a part is on its way");
            staging.order(&after, stream.handle(), false).unwrap();
            stream.fill(&target, 1);
            gpu.release(TO_DEVICE);
            drop((staged, early));
            until_empty(&staging);
            assert!(stream.read(&target) == vec![1; len]);
        }
    });
}

#[test]
fn a_tensor_that_stays_may_lie_in_several_blocks() {
    on_a_fake_gpu("a_tensor_that_stays_may_lie_in_several_blocks", |gpu| {
        let dir = scratch();
        let (staging, stream) = (open(&dir, Backend::Psync), gpu.stream());
        let len = (5 << 20) + 1;
        let source = gpu.allocate(len);
        stream.fill(&source, 7);
        let save = || staging.save(source.range(), stream.handle(), Tier::Pinned).unwrap();
        for _ in 0..3 {
            assert_eq!(full(save()), Full::Pinned);
            grow_tier(&staging, 2 << 20);
        }
        let staged = begun(save());
        assert_eq!(full(save()), Full::Pinned);
        staged.release(stream.handle()).unwrap();
        stream.fill(&source, 0xdd);
        assert!(stream.read(&load(gpu, &staging, &stream, &staged)) == vec![7; len]);
        until(&staging, || staged.is_settled());
        assert!(stream.read(&load(gpu, &staging, &stream, &staged)) == vec![7; len]);
        drop(staged);
        until_empty(&staging);
    });
}
