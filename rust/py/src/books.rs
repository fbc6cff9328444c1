//! The records of a session, by the storages that they are of.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyWeakrefMethods;

use crate::gate::RecordReference;

/// At so many known storages, those that are gone are forgotten for the first time.
const FORGET_AT_MIN: usize = 1024;
/// So many records of one storage are known, the newest ones: bounds the work of a pack that saves
/// one of many slices.
const RECORDS_MAX: usize = 16;

/// The records of one session.
pub struct Books {
    /// By the identity of a storage: its records, the oldest first; some are dead.
    known: HashMap<usize, Vec<RecordReference>>,
    forget_at: usize,
}

impl Default for Books {
    fn default() -> Self {
        Self { known: HashMap::new(), forget_at: FORGET_AT_MIN }
    }
}

impl Books {
    /// The records of a storage, the newest first. Several cover parts of it, or count its changes
    /// apart.
    pub fn of(&self, py: Python<'_>, identity: usize) -> Vec<RecordReference> {
        let records = self.known.get(&identity).into_iter().flatten();
        records.rev().map(|one| one.clone_ref(py)).collect()
    }

    /// All records.
    pub fn all(&self, py: Python<'_>) -> Vec<RecordReference> {
        self.known.values().flatten().map(|one| one.clone_ref(py)).collect()
    }

    /// Enters a record; returns what is to be dropped: dead entries, of its storage and, as the
    /// table doubles, of all others.
    pub fn remember(
        &mut self,
        py: Python<'_>,
        identity: usize,
        reference: RecordReference,
    ) -> Vec<RecordReference> {
        let is_dead = |one: &mut RecordReference| one.bind(py).upgrade().is_none();
        let mut dropped = Vec::new();
        if self.known.len() >= self.forget_at {
            for records in self.known.values_mut() {
                dropped.extend(records.extract_if(.., is_dead));
            }
            self.known.retain(|_, records| !records.is_empty());
            self.forget_at = FORGET_AT_MIN.max(2 * self.known.len());
        }
        let records = self.known.entry(identity).or_default();
        dropped.extend(records.extract_if(.., is_dead));
        if records.len() == RECORDS_MAX {
            dropped.push(records.remove(0));
        }
        records.push(reference);
        dropped
    }
}
