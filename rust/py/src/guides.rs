//! The guides of partial rounds, in which only tensors that leave memory are followed; see
//! `core/src/guide.rs`.
//!
//! `activations/followed.py` chooses the partial rounds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ssdtrain_core::guide::Place;
use ssdtrain_core::rounds::ORDERS_MAX;

use crate::planning::Planning;
use crate::saved_tensor::SharedRound;

/// The guides of one session.
#[derive(Default)]
pub struct Guides {
    /// True if the round that began last has a guide. Every pack looks at it.
    is_on: AtomicBool,
    /// By the key of the first tensor.
    known: Mutex<HashMap<i64, Guide>>,
}

#[derive(Clone)]
struct Guide {
    places: Arc<[Place]>,
    /// The number of plans that had been made when it was looked up which places stay; `None`
    /// before.
    plan_count: Option<u64>,
}

impl Guides {
    /// Makes a round that was followed in whole the guide of rounds with the same first tensor.
    pub fn set(&self, ended: &SharedRound) {
        let (opening, places) = {
            let round = ended.lock();
            (round.opening(), round.guide().into())
        };
        let mut known = self.known();
        if known.len() >= ORDERS_MAX {
            known.clear();
        }
        known.insert(opening, Guide { places, plan_count: None });
    }

    /// Gives a new round its guide, if it `is_wanted` and there is one.
    pub fn begin(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        is_wanted: bool,
        planning: &Planning,
    ) -> PyResult<()> {
        let (opening, plan_count) = {
            let round = round.lock();
            (round.opening(), Some(round.plan_count()))
        };
        let known = self.known().get(&opening).filter(|_| is_wanted).cloned();
        self.is_on.store(known.is_some(), Ordering::Relaxed);
        let Some(mut guide) = known else { return Ok(()) };
        if guide.plan_count != plan_count {
            let places = guide.places.iter().map(|place| by_plan(py, *place, planning));
            guide = Guide { places: places.collect::<PyResult<_>>()?, plan_count };
            self.known().insert(opening, guide.clone());
        }
        round.lock().begin_guide(guide.places);
        Ok(())
    }

    /// True if the round that began last has a guide.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<i64, Guide>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place with the action of the last plan. A tensor stays if its record does, unless others are
/// made from it, which have to find its record.
fn by_plan(py: Python<'_>, place: Place, planning: &Planning) -> PyResult<Place> {
    let key = place.record_key;
    let stays = planning.keeps(py, key)? && !planning.is_source(py, key)?;
    Ok(Place { stays, ..place })
}
