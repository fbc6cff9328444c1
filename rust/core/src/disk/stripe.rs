//! The division of one tensor among several devices. Pure.
//!
//! All parts should end together. A slower or busier device gets less. A device that would end
//! after the others even with the smallest part gets nothing:
//!
//! ```text
//! device 0  |backlog|#########|
//! device 1  |backlog      |###|      the line: when all end
//! device 2  |backlog               |
//! ```

/// Parts are multiples of this, except the last. It is half of the usual piece: a smaller part
/// would cost its device a call and hardly end sooner.
pub const STRIPE_BYTES: usize = 2 << 20;

/// A device that may take a part.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The device's number.
    pub device: usize,
    /// Bytes that wait there already.
    pub backlog_bytes: u64,
    /// Nanoseconds for a byte there; `None` if not known yet.
    pub ns_per_byte: Option<f64>,
}

/// The devices that take a part of `len` bytes, and the bytes of each part, in the order of the
/// file.
///
/// # Panics
/// If there is no candidate, or `len` is zero.
pub fn shares(len: usize, candidates: &[Candidate]) -> Vec<(usize, usize)> {
    assert!(!candidates.is_empty() && len > 0, "nothing to share, or nobody to share it with");
    if let [only] = candidates {
        return vec![(only.device, len)];
    }
    let known: Vec<f64> = candidates.iter().filter_map(|candidate| candidate.ns_per_byte).collect();
    let usual = if known.is_empty() { 1.0 } else { known.iter().sum::<f64>() / known.len() as f64 };
    // (time when it is free, cost of a byte, device)
    let mut free: Vec<(f64, f64, usize)> = candidates
        .iter()
        .map(|candidate| {
            let cost = candidate.ns_per_byte.unwrap_or(usual).max(f64::MIN_POSITIVE);
            (candidate.backlog_bytes as f64 * cost, cost, candidate.device)
        })
        .collect();
    free.sort_by(|device, other| device.0.total_cmp(&other.0));
    let end = common_end(len, &free);
    let mut parts: Vec<(usize, usize)> = Vec::new();
    let mut rest = len;
    for &(begin, cost, device) in &free {
        let share = ((end - begin) / cost).max(0.0) as usize / STRIPE_BYTES * STRIPE_BYTES;
        let share = share.min(rest);
        if share > 0 {
            parts.push((device, share));
            rest -= share;
        }
    }
    // The rest left by rounding goes to the device that would end it first.
    let first = |device: &&(f64, f64, usize), other: &&(f64, f64, usize)| {
        let end = |&(begin, cost, device): &(f64, f64, usize)| {
            let own = parts.iter().find(|part| part.0 == device).map_or(0, |part| part.1);
            begin + (own + rest) as f64 * cost
        };
        end(device).total_cmp(&end(other))
    };
    let device = free.iter().min_by(first).map_or(free[0].2, |device| device.2);
    if rest > 0 {
        match parts.iter_mut().find(|part| part.0 == device) {
            Some(part) => part.1 += rest,
            None => parts.push((device, rest)),
        }
    }
    parts.sort_unstable();
    // A part that is no multiple goes last, so that every part begins on a stripe.
    if let Some(index) = parts.iter().position(|part| !part.1.is_multiple_of(STRIPE_BYTES)) {
        let odd = parts.remove(index);
        parts.push(odd);
    }
    parts
}

/// The time at which all end if the first devices, as many as needed, share `len` bytes.
fn common_end(len: usize, free: &[(f64, f64, usize)]) -> f64 {
    let (mut rate, mut done) = (0.0, 0.0);
    let mut end = f64::INFINITY;
    for &(begin, cost, _) in free {
        if begin >= end {
            break;
        }
        rate += 1.0 / cost;
        done += begin / cost;
        // Sum over the devices of (end - begin) / cost = len.
        end = (len as f64 + done) / rate;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::{Candidate, STRIPE_BYTES, shares};
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    fn candidate(device: usize, backlog_mib: usize, ns_per_byte: f64) -> Candidate {
        let backlog_bytes = (backlog_mib * MIB) as u64;
        Candidate { device, backlog_bytes, ns_per_byte: Some(ns_per_byte) }
    }

    #[test]
    fn equal_devices_get_equal_parts() {
        assert_eq!(
            shares(64 * MIB, &[candidate(0, 0, 1.0), candidate(1, 0, 1.0)]),
            [(0, 32 * MIB), (1, 32 * MIB)]
        );
    }

    #[test]
    fn a_slow_device_gets_less() {
        assert_eq!(
            shares(64 * MIB, &[candidate(0, 0, 1.0), candidate(1, 0, 3.0)]),
            [(0, 48 * MIB), (1, 16 * MIB)]
        );
    }

    #[test]
    fn a_busy_device_gets_what_is_left_or_nothing() {
        assert_eq!(
            shares(64 * MIB, &[candidate(0, 32, 1.0), candidate(1, 0, 1.0)]),
            [(0, 16 * MIB), (1, 48 * MIB)]
        );
        assert_eq!(
            shares(64 * MIB, &[candidate(0, 100, 1.0), candidate(1, 0, 1.0)]),
            [(1, 64 * MIB)]
        );
    }

    #[test]
    fn small_tensors_stay_whole() {
        assert_eq!(shares(MIB, &[candidate(0, 1, 1.0), candidate(1, 0, 1.0)]), [(1, MIB)]);
    }

    proptest! {
        #[test]
        fn every_byte_goes_to_one_device(
            len in 1usize..200 * MIB,
            backlogs in proptest::collection::vec(
                (0usize..500, 0.01f64..100.0, any::<bool>()),
                1..6,
            ),
        ) {
            let candidates: Vec<Candidate> = backlogs
                .iter()
                .enumerate()
                .map(|(device, &(mib, cost, known))| {
                    let ns_per_byte = known.then_some(cost);
                    Candidate { ns_per_byte, ..candidate(device, mib, cost) }
                })
                .collect();
            let parts = shares(len, &candidates);
            prop_assert_eq!(parts.iter().map(|part| part.1).sum::<usize>(), len);
            prop_assert!(parts.iter().all(|part| part.1 > 0 && part.0 < candidates.len()));
            let mut devices: Vec<_> = parts.iter().map(|part| part.0).collect();
            devices.sort_unstable();
            devices.dedup();
            prop_assert_eq!(devices.len(), parts.len());
            for part in &parts[..parts.len() - 1] {
                prop_assert_eq!(part.1 % STRIPE_BYTES, 0);
            }
        }
    }
}
