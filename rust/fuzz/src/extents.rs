//! The allocator against a map of granules: aligned, no overlap, no loss, and its end is true.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_core::allocator::ExtentAllocator;

const LIMIT_GRANULES: usize = 96;

/// Which granules are taken.
struct Map([bool; LIMIT_GRANULES]);

impl Map {
    fn set(&mut self, offset: u64, len: u64, granularity: u64, taken: bool) {
        assert!(offset.is_multiple_of(granularity), "not aligned");
        let first = (offset / granularity) as usize;
        let last = (offset + len).div_ceil(granularity) as usize;
        for granule in &mut self.0[first..last] {
            assert_ne!(*granule, taken, "a granule in two hands");
            *granule = taken;
        }
    }

    fn has_room(&self, granules: usize) -> bool {
        self.0.windows(granules).any(|window| window.iter().all(|&taken| !taken))
    }
}

fuzz_target!(|data: &[u8]| {
    let [shift, steps @ ..] = data else { return };
    let granularity = 1u64 << (shift % 13);
    let mut space = ExtentAllocator::new(granularity, granularity * LIMIT_GRANULES as u64);
    let mut map = Map([false; LIMIT_GRANULES]);
    let mut live: Vec<(u64, u64)> = Vec::new();
    for step in steps.chunks_exact(2) {
        let [what, amount] = step else { return };
        match what % 8 {
            0..4 => {
                let granules = 1 + *amount as usize % 24;
                let len =
                    granules as u64 * granularity - u64::from(*what >> 4).min(granularity - 1);
                match space.allocate(len) {
                    Some(offset) => {
                        map.set(offset, len, granularity, true);
                        live.push((offset, len));
                    }
                    None => assert!(!map.has_room(granules), "refused with room left"),
                }
            }
            4..7 if !live.is_empty() => {
                let (offset, len) = live.swap_remove(*amount as usize % live.len());
                map.set(offset, len, granularity, false);
                space.free(offset, len);
            }
            _ => {
                let end = live.iter().map(|(offset, len)| offset + len).max().unwrap_or(0);
                assert_eq!(
                    space.shrink(),
                    end.next_multiple_of(granularity),
                    "the end is not true"
                );
            }
        }
        let taken = map.0.iter().filter(|&&taken| taken).count() as u64;
        assert_eq!(space.used(), taken * granularity);
        assert!(space.end() >= space.used());
    }
    for (offset, len) in live.drain(..) {
        space.free(offset, len);
    }
    assert_eq!((space.used(), space.shrink()), (0, 0));
});
