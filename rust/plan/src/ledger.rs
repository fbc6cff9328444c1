//! The time of one channel that is not booked yet, kernel by kernel of a step that repeats.
//!
//! G10 (MICRO '23) and TERAIO (arXiv 2506.06472) book bandwidth this way: a transfer takes the free
//! time of the kernels after its begin, or before its deadline, in whole or in parts.

/// A kernel with less free time than this has none.
const NOTHING_S: f64 = 1e-12;

/// Free seconds in each kernel. Kernels are counted on through the steps: with 10 kernels, 13 is
/// the fourth of the second step, and its time is that of kernel 3.
#[derive(Clone, Debug)]
pub struct Ledger {
    free: Vec<f64>,
    /// The next and the last kernel with free time from each kernel, as far as a search has found
    /// them.
    later: Vec<u32>,
    earlier: Vec<u32>,
}

/// The first kernel of a kernel's step. Most kernels are in the first or second step, and a
/// division takes longer than all else here.
fn step_start(kernel: usize, count: usize) -> usize {
    match kernel {
        _ if kernel < count => 0,
        _ if kernel < 2 * count => count,
        _ => kernel - kernel % count,
    }
}

/// The order in which time is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As early as possible.
    Early,
    /// As late as possible.
    Late,
}

impl Ledger {
    /// A ledger without bookings.
    pub fn new(seconds: &[f64]) -> Self {
        let count = seconds.len() as u32;
        Self {
            free: seconds.to_vec(),
            later: (0..=count).collect(),
            earlier: (0..=count).collect(),
        }
    }

    /// The first kernel with free time from `kernel` on; the number of kernels if there is none.
    fn next_free(&mut self, kernel: usize) -> usize {
        let mut found = kernel;
        while self.later[found] as usize != found {
            let beyond = self.later[self.later[found] as usize];
            self.later[found] = beyond;
            found = beyond as usize;
        }
        found
    }

    /// One more than the last kernel with free time below `kernel`; 0 if there is none.
    fn last_free(&mut self, kernel: usize) -> usize {
        let mut found = kernel;
        while self.earlier[found] as usize != found {
            let beyond = self.earlier[self.earlier[found] as usize];
            self.earlier[found] = beyond;
            found = beyond as usize;
        }
        found
    }

    /// The next kernel with free time between two kernels, in the order in which time is taken.
    fn step(&mut self, from: usize, to: usize, order: Order) -> Option<usize> {
        let count = self.free.len();
        match order {
            Order::Early => {
                let mut kernel = from;
                while kernel < to {
                    let base = step_start(kernel, count);
                    let found = self.next_free(kernel - base);
                    if found < count {
                        return Some(base + found).filter(|&kernel| kernel < to);
                    }
                    kernel = base + count;
                }
                None
            }
            Order::Late => {
                let mut end = to;
                while end > from {
                    let base = step_start(end - 1, count);
                    let found = self.last_free(end - base);
                    if found > 0 {
                        return Some(base + found - 1).filter(|&kernel| kernel >= from);
                    }
                    end = base;
                }
                None
            }
        }
    }

    /// Takes time between two kernels. Returns the kernel in which the transfer ends (`Early`) or
    /// begins (`Late`); `None` if it does not fit. Calls `part` with each kernel and the seconds
    /// taken of it.
    fn walk(
        &mut self,
        (mut from, mut to): (usize, usize),
        mut seconds: f64,
        order: Order,
        mut part: impl FnMut(usize, f64),
    ) -> Option<usize> {
        let count = self.free.len();
        loop {
            let kernel = self.step(from, to, order)?;
            let within = kernel - step_start(kernel, count);
            let taken = self.free[within].min(seconds);
            part(within, taken);
            seconds -= taken;
            if seconds <= NOTHING_S {
                return Some(kernel);
            }
            match order {
                Order::Early => from = kernel + 1,
                Order::Late => to = kernel,
            }
        }
    }

    /// The kernel in which a transfer would end (`Early`) or begin (`Late`) if it were booked.
    pub fn find(&mut self, between: (usize, usize), seconds: f64, order: Order) -> Option<usize> {
        self.walk(between, seconds, order, |_, _| {})
    }

    /// Books a transfer, which has to fit.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn book(&mut self, between: (usize, usize), seconds: f64, order: Order) {
        let mut parts = Vec::new();
        let end = self.walk(between, seconds, order, |kernel, taken| parts.push((kernel, taken)));
        assert!(end.is_some(), "a transfer that does not fit was booked");
        for (kernel, taken) in parts {
            self.free[kernel] -= taken;
            if self.free[kernel] <= NOTHING_S {
                self.free[kernel] = 0.0;
                self.later[kernel] = kernel as u32 + 1;
                self.earlier[kernel + 1] = kernel as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Ledger, Order};
    use proptest::prelude::*;

    #[test]
    fn a_transfer_goes_on_in_the_next_step() {
        let mut ledger = Ledger::new(&[1.0, 2.0, 3.0]);
        // 2.5 s from kernel 2 on leave half a second of it.
        assert_eq!(ledger.find((2, 5), 2.5, Order::Early), Some(2));
        ledger.book((2, 5), 2.5, Order::Early);
        // Half a second is left there, and a second of the next step's first kernel.
        assert_eq!(ledger.find((2, 5), 1.5, Order::Early), Some(3));
        assert_eq!(ledger.find((2, 5), 4.0, Order::Early), None);
        assert_eq!(ledger.find((0, 5), 3.0, Order::Late), Some(3));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn time_is_booked_once_and_in_its_place(
            seconds in prop::collection::vec(1u32..5, 1..12),
            asked in prop::collection::vec((0usize..12, 1usize..12, 1u32..8, any::<bool>()), 1..20),
        ) {
            let count = seconds.len();
            let seconds: Vec<f64> = seconds.into_iter().map(f64::from).collect();
            let mut free = seconds.clone();
            let mut ledger = Ledger::new(&seconds);
            for (from, length, wanted, is_early) in asked {
                let (from, to) = (from % count, from % count + length % count + 1);
                let order = if is_early { Order::Early } else { Order::Late };
                let mut left = f64::from(wanted);
                let mut kernels: Vec<usize> = (from..to).collect();
                if order == Order::Late {
                    kernels.reverse();
                }
                let mut after = free.clone();
                let mut expected = None;
                for kernel in kernels {
                    let taken = after[kernel % count].min(left);
                    after[kernel % count] -= taken;
                    left -= taken;
                    if taken > 0.0 && left <= 0.0 {
                        expected = Some(kernel);
                        break;
                    }
                }
                let found = ledger.find((from, to), f64::from(wanted), order);
                prop_assert_eq!(found, expected);
                if expected.is_some() {
                    ledger.book((from, to), f64::from(wanted), order);
                    free = after;
                }
            }
        }
    }
}
