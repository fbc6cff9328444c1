//! The health of a device: the results of its last writes decide whether it may be written to.
//!
//! Reads go on from an unhealthy device, because its bytes lie nowhere else.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::direction::Direction;
use crate::error::{Error, ErrorKind, Result};

/// Number of failed writes in a row after which a device is out of use. One or two bad blocks fail
/// alone; five in a row are the device's fault, and each kept a tensor in memory that should have
/// left it.
const FAILED_IN_A_ROW_MAX: u32 = 5;
/// Number of later writes that leave a device out after it had no space. It is about as many as a
/// step has, so the device is tried again once a step.
const LEFT_OUT_COUNT: u32 = 64;

/// The results of the last writes of one device.
#[derive(Debug, Default)]
pub struct Health(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failed_in_a_row_count: u32,
    /// The error of the last failed write before the device went out of use.
    failure: Option<Error>,
    /// Number of writes that still leave the device out.
    left_out_count: u32,
}

impl Health {
    /// Notes the answer of a request.
    pub fn note(&self, direction: Direction, answer: &Result<()>) {
        if direction == Direction::Read {
            return;
        }
        let mut state = self.lock();
        let Err(error) = answer else {
            state.failed_in_a_row_count = 0;
            state.left_out_count = 0;
            return;
        };
        match error.kind() {
            // A cancelled write, or a closed store, is not the device's fault.
            ErrorKind::Cancelled | ErrorKind::Closed => {}
            ErrorKind::NoSpace => state.left_out_count = LEFT_OUT_COUNT,
            _ => {
                // The failure that took the device out of use stays the reason; later failures do
                // not replace it.
                if state.failed_in_a_row_count < FAILED_IN_A_ROW_MAX {
                    state.failure = Some(error.clone());
                }
                state.failed_in_a_row_count = state.failed_in_a_row_count.saturating_add(1);
            }
        }
    }

    /// The failure that took the device out of use; `None` if it is in use.
    pub fn out_of_use(&self) -> Option<Error> {
        let state = self.lock();
        if state.failed_in_a_row_count < FAILED_IN_A_ROW_MAX {
            return None;
        }
        state.failure.clone()
    }

    /// Returns true if the next write should leave the device out because it had no space.
    pub fn leaves_out_next(&self) -> bool {
        let mut state = self.lock();
        let leaves_out = state.left_out_count > 0;
        state.left_out_count = state.left_out_count.saturating_sub(1);
        leaves_out
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{FAILED_IN_A_ROW_MAX, Health, LEFT_OUT_COUNT};
    use crate::direction::Direction;
    use crate::error::{Error, ErrorKind};

    fn fail(health: &Health, kind: ErrorKind, message: &str) {
        health.note(Direction::Write, &Err(Error::new(kind, message)));
    }

    #[test]
    fn the_failure_that_took_it_out_of_use_stays_the_reason() {
        let health = Health::default();
        let fail = |number: u32| fail(&health, ErrorKind::Io, &format!("failure {number}"));
        (1..FAILED_IN_A_ROW_MAX).for_each(fail);
        assert!(health.out_of_use().is_none());
        // Other writes were in flight then; they fail later, each with its own message.
        (FAILED_IN_A_ROW_MAX..10).for_each(fail);
        let reason = health.out_of_use().expect("it is out of use");
        assert_eq!(reason.to_string(), format!("failure {FAILED_IN_A_ROW_MAX}"));
    }

    #[test]
    fn reads_wishes_and_single_failures_do_not_count() {
        let health = Health::default();
        for _ in 0..2 * FAILED_IN_A_ROW_MAX {
            health.note(Direction::Read, &Err(Error::new(ErrorKind::Io, "a read")));
            fail(&health, ErrorKind::Cancelled, "a wish");
            fail(&health, ErrorKind::Io, "a bad block");
            health.note(Direction::Write, &Ok(()));
        }
        assert!(health.out_of_use().is_none());
    }

    #[test]
    fn a_full_device_is_left_out_for_a_while() {
        let health = Health::default();
        fail(&health, ErrorKind::NoSpace, "full");
        let left_out = (0..1000).take_while(|_| health.leaves_out_next()).count();
        assert_eq!(left_out, LEFT_OUT_COUNT as usize);
        fail(&health, ErrorKind::NoSpace, "full");
        health.note(Direction::Write, &Ok(()));
        assert!(!health.leaves_out_next(), "a write that ended well shows that there is room");
    }
}
