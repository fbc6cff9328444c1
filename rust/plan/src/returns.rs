//! The times at which tensors on the drives have to come back: one after the other, each before its
//! use.

/// The latest times at which a channel can begin its transfers back, in seconds from now. Three
/// tensors of 2 s that are needed at 5, 6 and 20 s begin at 2, 4 and 18: two *blocks* of work
/// without a pause, [2, 6] and [18, 20].
#[derive(Clone, Debug, Default)]
pub struct Returns {
    deadlines: Vec<f64>,
    starts: Vec<f64>,
    /// Front and end of each block, the last block first.
    blocks: Vec<(f64, f64)>,
}

impl Returns {
    /// Chains transfers back from their deadlines, which are sorted. Each has its duration.
    pub fn chain(&mut self, transfers: impl DoubleEndedIterator<Item = (f64, f64)>) {
        self.deadlines.clear();
        self.starts.clear();
        self.blocks.clear();
        let mut front = f64::INFINITY;
        for (deadline, seconds) in transfers.rev() {
            let end = deadline.min(front);
            front = end - seconds;
            self.deadlines.push(deadline);
            self.starts.push(front);
            match self.blocks.last_mut() {
                Some(block) if block.0 <= deadline => block.0 = front,
                _ => self.blocks.push((front, end)),
            }
        }
        self.deadlines.reverse();
        self.starts.reverse();
    }

    /// The latest start of a transfer, by its index among the deadlines.
    pub fn start(&self, place: usize) -> f64 {
        self.starts[place]
    }

    /// The start of the block that another transfer would be part of: the channel has to begin that
    /// early to bring it back, too.
    pub fn front_with(&self, deadline: f64, seconds: f64) -> f64 {
        let later = self.deadlines.partition_point(|&other| other < deadline);
        let end = self.starts.get(later).map_or(deadline, |&start| start.min(deadline));
        let mut front = end - seconds;
        let mut owed = seconds;
        // A block in the way moves forward by its overlap.
        for &(block_front, block_end) in &self.blocks {
            if block_front >= end {
                continue;
            }
            let overlap = if block_end > end { owed } else { block_end - front };
            if overlap < 0.0 {
                break;
            }
            owed = overlap;
            front = block_front - overlap;
        }
        front
    }
}

#[cfg(test)]
mod tests {
    use super::Returns;
    use proptest::prelude::*;

    fn chained(transfers: &[(f64, f64)]) -> Returns {
        let mut returns = Returns::default();
        returns.chain(transfers.iter().copied());
        returns
    }

    fn transfers() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((0..200u32, 1..20u32), 0..30).prop_map(|list| {
            let mut list: Vec<_> =
                list.into_iter().map(|(at, long)| (f64::from(at), f64::from(long))).collect();
            list.sort_by(|a, b| a.0.total_cmp(&b.0));
            list
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn every_transfer_ends_by_its_deadline_and_before_the_next(list in transfers()) {
            let returns = chained(&list);
            for (place, &(deadline, seconds)) in list.iter().enumerate() {
                let end = returns.start(place) + seconds;
                let next = if place + 1 < list.len() { returns.start(place + 1) } else { deadline };
                // It is not earlier than it must be, either.
                prop_assert!((end - deadline.min(next)).abs() < 1e-9);
            }
        }

        #[test]
        fn one_more_makes_its_block_begin_where_a_new_chain_says(
            list in transfers(),
            deadline in 0..200u32,
            seconds in 1..20u32,
        ) {
            let (deadline, seconds) = (f64::from(deadline), f64::from(seconds));
            let found = chained(&list).front_with(deadline, seconds);
            let mut more = list.clone();
            let place = more.partition_point(|transfer| transfer.0 < deadline);
            more.insert(place, (deadline, seconds));
            let anew = chained(&more);
            // The block reaches back over transfers that follow each other without a pause.
            let mut first = place;
            while first > 0 && anew.start(first - 1) + more[first - 1].1 >= anew.start(first) {
                first -= 1;
            }
            prop_assert!((found - anew.start(first)).abs() < 1e-9);
        }
    }
}
