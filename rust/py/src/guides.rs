//! The guides of partial rounds, in which only tensors that leave memory are followed; see
//! `core/src/guide.rs`.
//!
//! `activations/followed.py` chooses the partial rounds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ssdtrain_core::guide::Place;
use ssdtrain_core::rounds::ORDERS_MAX;

use crate::saved_tensor::SharedRound;

/// The guides of one session.
#[derive(Default)]
pub struct Guides {
    /// True if the round that began last has a guide. Every pack looks at it.
    is_on: AtomicBool,
    /// By the key of the first tensor.
    known: Mutex<HashMap<i64, Arc<[Place]>>>,
}

impl Guides {
    /// Makes a round that was followed in whole the guide of rounds with the same first tensor.
    pub fn set(&self, ended: &SharedRound) {
        let (opening, guide) = {
            let round = ended.lock();
            (round.opening(), round.guide())
        };
        let mut known = self.known();
        if known.len() >= ORDERS_MAX {
            known.clear();
        }
        known.insert(opening, guide);
    }

    /// Gives a new round its guide, if it `is_wanted` and there is one.
    pub fn begin(&self, round: &SharedRound, is_wanted: bool) {
        let opening = round.lock().opening();
        let guide = self.known().get(&opening).filter(|_| is_wanted).map(Arc::clone);
        self.is_on.store(guide.is_some(), Ordering::Relaxed);
        if let Some(guide) = guide {
            round.lock().begin_guide(guide);
        }
    }

    /// True if the round that began last has a guide.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<i64, Arc<[Place]>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
