//! Whether a device may be written to, by how its last writes ended.
//!
//! What lies on a device is read whatever is thought of it: there is nowhere else to read it from.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::direction::Direction;
use crate::error::{Error, ErrorKind, Result};

/// After so many failed writes in a row a device is out of use. One or two bad blocks fail alone;
/// five in a row are the device, and each of them kept a tensor in memory that should have left it.
const FAILED_IN_A_ROW_MAX: u32 = 5;
/// After it had no space, a device is left out until so many writes went elsewhere: about as many
/// as a step has, so that it is asked once a step whether somebody freed some.
const LEFT_OUT_COUNT: u32 = 64;

/// What the writes of one device say about it.
#[derive(Debug, Default)]
pub struct Health(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failed_in_a_row_count: u32,
    /// Why the last write failed.
    failure: Option<Error>,
    /// So many writes more leave the device out.
    left_out_count: u32,
}

impl Health {
    /// Takes notice of how a request ended.
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
            // Somebody's wish, not the device's fault.
            ErrorKind::Cancelled | ErrorKind::Closed => {}
            ErrorKind::NoSpace => state.left_out_count = LEFT_OUT_COUNT,
            _ => {
                // What took it out of use stays the reason, whatever else was in flight.
                if state.failed_in_a_row_count < FAILED_IN_A_ROW_MAX {
                    state.failure = Some(error.clone());
                }
                state.failed_in_a_row_count = state.failed_in_a_row_count.saturating_add(1);
            }
        }
    }

    /// Why the device is out of use, if it is.
    pub fn out_of_use(&self) -> Option<Error> {
        let state = self.lock();
        if state.failed_in_a_row_count < FAILED_IN_A_ROW_MAX {
            return None;
        }
        state.failure.clone()
    }

    /// Whether the next write shall leave the device out, because it had no space.
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
    fn what_took_it_out_of_use_stays_the_reason() {
        let health = Health::default();
        let fail = |number: u32| fail(&health, ErrorKind::Io, &format!("failure {number}"));
        (1..FAILED_IN_A_ROW_MAX).for_each(fail);
        assert!(health.out_of_use().is_none());
        // Others were in flight then; they fail later, each with its own words.
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
