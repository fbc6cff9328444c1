//! The engines, and stores on each of them: what conformance suites share.

use std::path::Path;

use ssdtrain_core::{Backend, DirectIo, ErrorKind, Faults, PauseSwitch, StoreConfig, TensorStore};

use crate::round_trip::scratch;

pub const ENGINES: [fn() -> Backend; 3] =
    [|| Backend::IoUring, || Backend::Psync, || Backend::Simulated(Faults::default())];

pub fn config(dir: &Path, backend: Backend) -> StoreConfig {
    let mut config = StoreConfig::new([dir]);
    config.backend = backend;
    config.direct_io = DirectIo::Optional;
    config
}

/// A store on `backend`, or `None` where the kernel forbids `io_uring` (said on stderr).
pub fn open(dir: &Path, backend: Backend) -> Option<TensorStore> {
    open_as(&config(dir, backend))
}

/// A store as `config` says, or `None` where the kernel forbids `io_uring`.
pub fn open_as(config: &StoreConfig) -> Option<TensorStore> {
    match TensorStore::open(config) {
        Ok(store) => Some(store),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A disk on which nothing moves, and the switch that lets it.
pub fn paused_disk() -> (PauseSwitch, Backend) {
    let pause = PauseSwitch::paused();
    (pause.clone(), Backend::Simulated(Faults { pause, ..Faults::default() }))
}

/// Runs `check` on a store of each engine, for each value of `verify`; nothing may be left behind.
pub fn on_every_engine<const COUNT: usize>(verify: [bool; COUNT], check: impl Fn(&TensorStore)) {
    for engine in ENGINES {
        for verify in verify {
            let dir = scratch();
            let mut config = config(dir.path(), engine());
            config.verify = verify;
            let Some(store) = open_as(&config) else { continue };
            check(&store);
            assert_eq!(store.stats().unwrap().disk_used_bytes, 0, "extents are left behind");
            assert_eq!(store.stats().unwrap().arena_live_bytes, 0, "slots are left behind");
            drop(store);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "names are left behind");
        }
    }
}
