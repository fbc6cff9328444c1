//! The bytes over a budget while each kernel of a step runs. Kernels are in blocks, so that a
//! tensor which is away for thousands of kernels changes and reads few entries.

use std::ops::Range;

const BLOCK: usize = 128;

#[derive(Clone, Debug)]
struct Block {
    /// Bytes added to all kernels of the block together.
    added: i64,
    most: i64,
    least: i64,
    /// Seconds of all its kernels, and of its kernels with excess.
    seconds: f64,
    short_s: f64,
}

/// Bytes over a budget for each kernel; negative if there is room.
#[derive(Clone, Debug)]
pub struct Excess {
    seconds: Vec<f64>,
    bytes: Vec<i64>,
    blocks: Vec<Block>,
}

impl Excess {
    /// For kernels with these times and these bytes over the budget.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn new(seconds: &[f64], bytes: Vec<i64>) -> Self {
        assert_eq!(seconds.len(), bytes.len(), "each kernel has a time and an excess");
        let empty = Block { added: 0, most: 0, least: 0, seconds: 0.0, short_s: 0.0 };
        let blocks = vec![empty; bytes.len().div_ceil(BLOCK)];
        let mut made = Self { seconds: seconds.to_vec(), bytes, blocks };
        for index in 0..made.blocks.len() {
            made.blocks[index].seconds = made.seconds[made.kernels(index)].iter().sum();
            made.refresh(index);
        }
        made
    }

    fn kernels(&self, block: usize) -> Range<usize> {
        block * BLOCK..((block + 1) * BLOCK).min(self.bytes.len())
    }

    fn refresh(&mut self, index: usize) {
        let kernels = self.kernels(index);
        let block = &mut self.blocks[index];
        let bytes = &self.bytes[kernels.clone()];
        block.most = bytes.iter().copied().max().unwrap_or(0) + block.added;
        block.least = bytes.iter().copied().min().unwrap_or(0) + block.added;
        block.short_s = bytes
            .iter()
            .zip(&self.seconds[kernels])
            .filter(|(bytes, _)| **bytes + block.added > 0)
            .map(|(_, seconds)| seconds)
            .sum();
    }

    /// Adds bytes to a range of kernels of a step that repeats: a range beyond the last kernel goes
    /// on with the first.
    pub fn add(&mut self, kernels: Range<usize>, bytes: i64) {
        for part in self.parts(kernels) {
            let (first, last) = (part.start / BLOCK, (part.end - 1) / BLOCK);
            for index in first..=last {
                let own = self.kernels(index);
                let inside = part.start.max(own.start)..part.end.min(own.end);
                if inside.len() == own.len() {
                    let block = &mut self.blocks[index];
                    let was = (block.least > 0, block.most > 0);
                    block.added += bytes;
                    block.most += bytes;
                    block.least += bytes;
                    if was != (block.least > 0, block.most > 0) || (block.most > 0) != was.0 {
                        self.refresh(index);
                    }
                } else {
                    for kernel in &mut self.bytes[inside] {
                        *kernel += bytes;
                    }
                    self.refresh(index);
                }
            }
        }
    }

    /// Seconds of the kernels with excess in a range, and the largest excess there.
    pub fn short(&self, kernels: Range<usize>) -> (f64, i64) {
        let (mut seconds, mut most) = (0.0, i64::MIN);
        for part in self.parts(kernels) {
            let (first, last) = (part.start / BLOCK, (part.end - 1) / BLOCK);
            for index in first..=last {
                let own = self.kernels(index);
                let block = &self.blocks[index];
                let inside = part.start.max(own.start)..part.end.min(own.end);
                if inside.len() == own.len() || block.most <= 0 {
                    seconds += block.short_s;
                    most = most.max(block.most);
                    continue;
                }
                for kernel in inside {
                    let here = self.bytes[kernel] + block.added;
                    most = most.max(here);
                    seconds += if here > 0 { self.seconds[kernel] } else { 0.0 };
                }
            }
        }
        (seconds, most)
    }

    /// The largest excess of all kernels.
    pub fn most(&self) -> i64 {
        self.blocks.iter().map(|block| block.most).max().unwrap_or(0)
    }

    /// Seconds of the kernels with excess before each kernel, and of all as a last entry; for many
    /// ranges between two changes.
    pub fn short_before(&self) -> Vec<f64> {
        let mut before = Vec::with_capacity(self.bytes.len() + 1);
        let mut sum = 0.0;
        before.push(sum);
        for (kernel, (bytes, seconds)) in self.bytes.iter().zip(&self.seconds).enumerate() {
            sum += if bytes + self.blocks[kernel / BLOCK].added > 0 { *seconds } else { 0.0 };
            before.push(sum);
        }
        before
    }

    /// A range that may reach into the next step, as ranges of one step.
    fn parts(&self, kernels: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.bytes.len();
        assert!(kernels.len() <= count, "{kernels:?} is more than a step");
        let (start, end) = (kernels.start % count, kernels.start % count + kernels.len());
        let wrapped = if end > count { 0..end - count } else { 0..0 };
        [start..end.min(count), wrapped].into_iter().filter(|part| !part.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::Excess;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Steps of up to five blocks, and changes that may go beyond the last kernel.
        #[test]
        fn it_counts_as_a_plain_list_of_kernels(
            start in prop::collection::vec(-50i64..50, 1..600),
            changes in prop::collection::vec((0usize..1000, 0usize..1000, -60i64..60), 0..30),
            asked in (0usize..1000, 0usize..1000),
        ) {
            let count = start.len();
            let seconds: Vec<f64> = (0..count).map(|kernel| 1.0 + (kernel % 7) as f64).collect();
            let mut plain = start.clone();
            let mut excess = Excess::new(&seconds, start);
            let range = |first: usize, length: usize| {
                let first = first % count;
                first..first + length % (count + 1)
            };
            for (first, length, bytes) in changes {
                for kernel in range(first, length) {
                    plain[kernel % count] += bytes;
                }
                excess.add(range(first, length), bytes);
            }
            let inside: Vec<usize> = range(asked.0, asked.1).map(|kernel| kernel % count).collect();
            let short: f64 = inside
                .iter()
                .filter(|&&kernel| plain[kernel] > 0)
                .map(|&kernel| seconds[kernel])
                .sum();
            let (found, most) = excess.short(range(asked.0, asked.1));
            prop_assert!((found - short).abs() < 1e-9, "{found} s instead of {short} s");
            let expected = inside.iter().map(|&kernel| plain[kernel]).max();
            // Without an excess the amount of room does not matter.
            prop_assert_eq!(most.max(0), expected.unwrap_or(0).max(0));
            prop_assert_eq!(Some(excess.most()), plain.iter().copied().max());
            let all: f64 = excess.short_before()[count];
            prop_assert!((all - excess.short(0..count).0).abs() < 1e-9);
        }
    }
}
