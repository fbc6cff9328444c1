//! A float32 master of a bfloat16 weight, stored as its difference from the weight. Pure.
//!
//! The weight is the master, rounded to the nearest bfloat16, ties to even. As integers, the bits
//! of the master and of the widened weight differ by at most half a unit of the weight, which is
//! 32,768 units of the master, for every sign and exponent:
//!
//! ```text
//! master  3F80_5000   weight 3F80   master - (weight << 16) =  0x5000   rounded down
//! master  3F80_C000   weight 3F81                             -0x4000   rounded up
//! master  3F7F_8000   weight 3F80                             -0x8000   a tie, up to the even one
//! master  3F80_8000   weight 3F80                             +0x8000   a tie, down to it
//! master  7F7F_FFFF   weight 7F80                             -0x0001   rounded up to infinity
//! ```
//!
//! An `i16` holds all of these 65,537 differences but +0x8000, the tie that was rounded down (about
//! every 131,072nd place). Such a place is noted as a *carry*. The code checks every place. If a
//! weight is not its rounded master, and for most NaN, there is no code, and the master has to be
//! stored as it is.

use std::hint::black_box;

use xxhash_rust::xxh3::Xxh3Default;

/// Number of weights in a block; a block stays in the processor's cache.
const BLOCK_LEN: usize = 4096;
/// If there is more than one carry for so many weights, the carries are stored as one bit for each
/// weight in the payload.
const WEIGHTS_PER_CARRY: usize = 2048;
const TIE_DOWN: i32 = 0x8000;
const CARRY: u32 = 0x1_0000;

/// The length, the checksum and the carries of a packed master; its differences are in the payload.
#[derive(Debug)]
pub struct MasterCode {
    len: usize,
    /// A checksum of the bits of the weights. The payload is of use only with the same weights.
    weights: u64,
    carries: Carries,
}

#[derive(Debug)]
enum Carries {
    Few(Vec<u64>),
    /// One bit for each weight, behind the differences.
    InPayload,
}

/// Returns the largest number of `i16` in a payload for `len` weights.
pub fn payload_len_max(len: usize) -> usize {
    len + len.div_ceil(16)
}

impl MasterCode {
    /// Packs masters into a payload, or returns `None` if the weights are not the rounded masters.
    ///
    /// # Panics
    /// If the weights and masters differ in number, or the length of the payload is not
    /// [`payload_len_max`].
    pub fn pack(weights: &[u16], masters: &[u32], payload: &mut [i16]) -> Option<Self> {
        let len = weights.len();
        assert!(masters.len() == len && payload.len() == payload_len_max(len), "of other lengths");
        let (differences, bits) = payload.split_at_mut(len);
        let (mut carries, mut sum) = (Vec::new(), Xxh3Default::new());
        let mut copy = [0; BLOCK_LEN];
        for (number, differences) in differences.chunks_mut(BLOCK_LEN).enumerate() {
            let start = number * BLOCK_LEN;
            let weights = copied(&weights[start..start + differences.len()], &mut copy);
            let masters = &masters[start..];
            if !pack_block(weights, masters, differences) {
                note_carries(weights, masters, start, &mut carries)?;
            }
            sum_up(weights, &mut sum);
        }
        let carries = if carries.len() <= len / WEIGHTS_PER_CARRY {
            carries.shrink_to_fit();
            Carries::Few(carries)
        } else {
            bits.fill(0);
            for place in carries {
                bits[place as usize / 16] |= 1 << (place % 16);
            }
            Carries::InPayload
        };
        Some(Self { len, weights: sum.digest(), carries })
    }

    /// Number of weights.
    pub fn weight_count(&self) -> usize {
        self.len
    }

    /// Number of `i16` of the payload that are needed.
    pub fn payload_len(&self) -> usize {
        match self.carries {
            Carries::Few(_) => self.len,
            Carries::InPayload => payload_len_max(self.len),
        }
    }

    /// Unpacks the masters. Returns false if the weights differ from those they were packed with;
    /// the masters are then wrong.
    ///
    /// # Panics
    /// If the number of weights, of masters, or the length of the payload differs from the packed.
    pub fn unpack(&self, weights: &[u16], payload: &[i16], masters: &mut [u32]) -> bool {
        let is_like = (weights.len(), masters.len(), payload.len())
            == (self.len, self.len, self.payload_len());
        assert!(is_like, "of other lengths");
        let (differences, bits) = payload.split_at(self.len);
        let (mut sum, mut copy) = (Xxh3Default::new(), [0; BLOCK_LEN]);
        for (number, masters) in masters.chunks_mut(BLOCK_LEN).enumerate() {
            let start = number * BLOCK_LEN;
            let weights = copied(&weights[start..start + masters.len()], &mut copy);
            let differences = &differences[start..start + masters.len()];
            for ((master, weight), difference) in masters.iter_mut().zip(weights).zip(differences) {
                *master = widened(*weight).wrapping_add_signed(i32::from(*difference));
            }
            sum_up(weights, &mut sum);
        }
        if sum.digest() != self.weights {
            return false;
        }
        match &self.carries {
            Carries::Few(places) => {
                for place in places {
                    let master = &mut masters[*place as usize];
                    *master = master.wrapping_add(CARRY);
                }
            }
            Carries::InPayload => {
                for (masters, bits) in masters.chunks_mut(16).zip(bits) {
                    for (place, master) in masters.iter_mut().enumerate() {
                        let carry = u32::from(bits.cast_unsigned() >> place & 1);
                        *master = master.wrapping_add(CARRY * carry);
                    }
                }
            }
        }
        true
    }
}

/// Returns true if the weights are the rounded masters; every NaN counts as rounded to every other.
pub fn is_rounded(weights: &[u16], masters: &[u32]) -> bool {
    let mut blocks = weights.chunks(BLOCK_LEN).zip(masters.chunks(BLOCK_LEN));
    weights.len() == masters.len()
        && blocks.all(|(weights, masters)| {
            let mut differs = false;
            for (weight, master) in weights.iter().zip(masters) {
                let is_nan = master << 1 > 0xFF00_0000;
                let up = master.wrapping_add(0x7FFF + (master >> 16 & 1));
                differs |=
                    if is_nan { weight << 1 <= 0xFF00 } else { up >> 16 != (*weight).into() };
            }
            !differs
        })
}

/// The bits of a bfloat16 as those of the float32 with the same value.
fn widened(weight: u16) -> u32 {
    u32::from(weight) << 16
}

/// Copies weights, so that all steps see the same bits: other threads may change weights at any
/// time (training without locks does).
fn copied<'a>(weights: &[u16], copy: &'a mut [u16; BLOCK_LEN]) -> &'a [u16] {
    copy[..weights.len()].copy_from_slice(weights);
    // Without this the compiler may read the weights themselves again.
    &black_box(copy)[..weights.len()]
}

/// Returns true if the weight is an odd neighbour of a tie, which rounds to the even neighbour.
fn is_tie_to_odd(weight: u16, difference: i32) -> bool {
    difference.unsigned_abs() == TIE_DOWN.unsigned_abs() && weight & 1 == 1
}

/// Writes the differences of a block. Returns true if all fit and no weight is an odd neighbour of
/// a tie.
fn pack_block(weights: &[u16], masters: &[u32], differences: &mut [i16]) -> bool {
    let mut rest = 0;
    for ((difference, weight), master) in differences.iter_mut().zip(weights).zip(masters) {
        let exact = master.wrapping_sub(widened(*weight)).cast_signed();
        *difference = exact as i16;
        rest |= exact ^ i32::from(*difference);
        rest |= i32::from(*difference == i16::MIN) & i32::from(*weight);
    }
    rest == 0
}

/// Notes the places of a block in which a tie was rounded down; `None` if a weight is not its
/// rounded master.
fn note_carries(
    weights: &[u16],
    masters: &[u32],
    start: usize,
    carries: &mut Vec<u64>,
) -> Option<()> {
    for (place, (weight, master)) in weights.iter().zip(masters).enumerate() {
        let exact = master.wrapping_sub(widened(*weight)).cast_signed();
        if is_tie_to_odd(*weight, exact) {
            return None;
        }
        if exact == TIE_DOWN {
            carries.push((start + place) as u64);
        } else if i16::try_from(exact).is_err() {
            return None;
        }
    }
    Some(())
}

fn sum_up(weights: &[u16], sum: &mut Xxh3Default) {
    let mut bytes = [0; 2 * BLOCK_LEN];
    let bytes = &mut bytes[..2 * weights.len()];
    for (pair, weight) in bytes.chunks_exact_mut(2).zip(weights) {
        pair.copy_from_slice(&weight.to_le_bytes());
    }
    sum.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds to the nearest bfloat16, ties to even, as torch does; every NaN becomes 0x7FC0.
    fn rounded(master: u32) -> u16 {
        if f32::from_bits(master).is_nan() {
            return 0x7FC0;
        }
        ((master + 0x7FFF + (master >> 16 & 1)) >> 16) as u16
    }

    fn packed(weights: &[u16], masters: &[u32]) -> Option<(MasterCode, Vec<i16>)> {
        let mut payload = vec![0x55; payload_len_max(weights.len())];
        let code = MasterCode::pack(weights, masters, &mut payload)?;
        payload.truncate(code.payload_len());
        Some((code, payload))
    }

    fn assert_returns(masters: &[u32]) -> usize {
        let weights: Vec<_> = masters.iter().copied().map(rounded).collect();
        let (code, payload) = packed(&weights, masters).expect("the weights are the masters");
        let mut found = vec![0; masters.len()];
        assert!(code.unpack(&weights, &payload, &mut found));
        assert_eq!(found, masters);
        assert!(is_rounded(&weights, masters));
        payload.len()
    }

    /// All patterns with this upper half that are numbers.
    fn numbers(upper: u32) -> Vec<u32> {
        (0..=0xFFFF)
            .map(|low| upper << 16 | low)
            .filter(|bits| !f32::from_bits(*bits).is_nan())
            .collect()
    }

    #[test]
    fn every_edge_returns() {
        // Zeros, subnormals, the least normal, one, the largest, infinities; and their neighbours.
        for upper in [0, 1, 2, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80] {
            for sign in [0, 0x8000] {
                assert_returns(&numbers(upper | sign));
            }
        }
    }

    #[test]
    fn carries_are_a_list_or_bits() {
        let mut masters: Vec<_> =
            (0..10 * BLOCK_LEN as u32 + 5).map(|n| 0x3F80_0000 + 7 * n).collect();
        for place in [0, 4095, 4096, 9000, 40_964] {
            masters[place] = 0x4000_8000;
        }
        let few = masters.iter().filter(|bits| **bits & 0x1_FFFF == 0x8000).count();
        assert!(few <= masters.len() / WEIGHTS_PER_CARRY, "{few}");
        assert_eq!(assert_returns(&masters), masters.len());
        masters[5000..5100].fill(0xC000_8000);
        assert_eq!(assert_returns(&masters), payload_len_max(masters.len()));
        masters.fill(0x4000_8000);
        assert_eq!(assert_returns(&masters), payload_len_max(masters.len()));
        assert_eq!(assert_returns(&[]), 0);
    }

    #[test]
    fn a_weight_that_is_not_its_master_is_refused() {
        let masters = vec![0x3F80_1234; BLOCK_LEN + 3];
        for (place, other) in [(0, 0x3F81), (BLOCK_LEN + 2, 0x3F7F), (7, 0xBF80), (9, 0x7FC0)] {
            let mut weights = vec![0x3F80; masters.len()];
            assert!(packed(&weights, &masters).is_some());
            weights[place] = other;
            assert!(packed(&weights, &masters).is_none(), "{place}");
            assert!(!is_rounded(&weights, &masters), "{place}");
        }
        // A tie rounds to even, up or down.
        for (weight, master) in [(0x3F81, 0x3F80_8000), (0xBF81, 0xBF81_8000)] {
            let neighbour = if master < 0x8000_0000 { weight - 1 } else { weight + 1 };
            assert!(packed(&[weight], &[master]).is_none());
            assert!(packed(&[neighbour], &[master]).is_some());
        }
        // This NaN has a larger difference than an `i16` holds; another NaN below fits.
        assert!(packed(&[0x7FC0], &[0x7FFF_FFFF]).is_none());
        // The largest of all differences is that of both zeros.
        assert!(packed(&[0], &[0x8000_0000]).is_none());
        assert!(packed(&[0x7FC0], &[0x7FC0_0000]).is_some());
        assert!(is_rounded(&[0x7FC0], &[0xFFFF_FFFF]));
        assert!(is_rounded(&[0xFFFF], &[0x7F80_0001]));
        // A carry would make a number of this NaN, and infinity is no NaN.
        assert!(!is_rounded(&[0], &[0xFFFF_FFFF]));
        assert!(!is_rounded(&[0x7F80], &[0x7F80_0001]));
    }

    #[test]
    fn other_weights_are_seen() {
        let masters: Vec<_> = (0..3 * BLOCK_LEN as u32).map(|n| 0x3F80_0000 + 77 * n).collect();
        let mut weights: Vec<_> = masters.iter().copied().map(rounded).collect();
        let (code, payload) = packed(&weights, &masters).expect("the weights are the masters");
        let mut found = vec![0; masters.len()];
        for place in [0, 5000, masters.len() - 1] {
            weights[place] ^= 0x8000;
            assert!(!code.unpack(&weights, &payload, &mut found));
            weights[place] ^= 0x8000;
        }
        assert!(code.unpack(&weights, &payload, &mut found));
    }
}
