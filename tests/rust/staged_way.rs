//! Saves and loads of the staged way, for the suites of it.

use std::sync::Arc;
use std::time::Duration;

use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::staging::{Full, PinnedBytes, Saved, Staged, Staging, Tier};
use ssdtrain_core::{Backend, StoreConfig, TensorStore};

use super::engines::config;
use super::fake_gpu::{ComputeStream, DeviceBytes, FakeGpu};

pub const LEN: usize = 300_001;
pub const RING: PinnedBytes = PinnedBytes { down: 1 << 20, up: 1 << 20 };
/// Longer than any of these takes; what ends later hangs.
pub const LONG: Duration = Duration::from_secs(30);

pub fn begun(saved: Saved) -> Staged {
    match saved {
        Saved::Begun(staged) => staged,
        other => panic!("not saved: {other:?}"),
    }
}

pub fn full(saved: Saved) -> Full {
    match saved {
        Saved::Full(full) => full,
        other => panic!("there was room: {other:?}"),
    }
}

/// Waits for what the worker does.
pub fn until(staging: &Staging, mut is_so: impl FnMut() -> bool) {
    loop {
        let turn = staging.turn();
        if is_so() {
            return;
        }
        assert!(staging.wait_for_turn(turn, LONG), "the worker does nothing any more");
    }
}

/// A staging over a store on `backend`, with room for three tensors in each direction.
pub fn open(dir: &tempfile::TempDir, backend: Backend) -> Staging {
    open_with(dir, backend, RING)
}

pub fn open_with(dir: &tempfile::TempDir, backend: Backend, pinned: PinnedBytes) -> Staging {
    let store = TensorStore::open(&config(dir.path(), backend)).unwrap();
    Staging::open(&Gpu::get(0).unwrap(), Arc::new(store), pinned, &Arc::default()).unwrap()
}

/// The same over a disk of so many bytes.
pub fn open_bounded(dir: &tempfile::TempDir, max_disk_bytes: u64) -> Staging {
    let config = config(dir.path(), Backend::Psync);
    let config = StoreConfig { max_disk_bytes: Some(max_disk_bytes), ..config };
    let store = TensorStore::open(&config).unwrap();
    Staging::open(&Gpu::get(0).unwrap(), Arc::new(store), RING, &Arc::default()).unwrap()
}

/// Computes a tensor and saves it.
pub fn save<'gpu>(
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
pub fn load<'gpu>(
    gpu: &'gpu FakeGpu,
    staging: &Staging,
    stream: &ComputeStream<'_>,
    staged: &Staged,
) -> DeviceBytes<'gpu> {
    let target = gpu.allocate(staged.len());
    stream.fill(&target, 0xee);
    let loading = staging.load(staged, target.range(), stream.handle()).unwrap();
    loading.lend(stream.handle(), LONG).expect("it comes").unwrap();
    target
}

/// Bytes of pinned memory, and the bytes of it in slots.
pub fn pinned_bytes(staging: &Staging) -> (usize, usize) {
    let (ring, tier) = (staging.pinned_bytes(), staging.tier().bytes());
    (ring.0 + tier.0, ring.1 + tier.1)
}

/// Pins another block for tensors that stay there.
pub fn grow_tier(staging: &Staging, nbytes: usize) {
    staging.tier().grow(&Gpu::get(0).unwrap(), nbytes).unwrap();
}

/// Waits until nothing holds pinned memory any more.
pub fn until_empty(staging: &Staging) {
    until(staging, || pinned_bytes(staging).1 == 0);
}
