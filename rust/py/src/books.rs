//! The records of a session, by their storages.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyWeakrefMethods;

use crate::gate::RecordReference;

/// At this many storages, entries of dead records are removed for the first time.
const FORGET_AT_MIN: usize = 1024;
/// The most records that are listed for one storage, the newest ones. This bounds the work of a
/// pack that saves one of many slices.
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
    /// The records of a storage, the newest first. There are several if they cover parts of it, or
    /// follow different version counters.
    pub fn of(&self, py: Python<'_>, identity: usize) -> Vec<RecordReference> {
        let records = self.known.get(&identity).into_iter().flatten();
        records.rev().map(|reference| reference.clone_ref(py)).collect()
    }

    /// All records.
    pub fn all(&self, py: Python<'_>) -> Vec<RecordReference> {
        self.known.values().flatten().map(|reference| reference.clone_ref(py)).collect()
    }

    /// Enters a record. Returns the entries that the caller drops once the books are unlocked: dead
    /// ones of this storage or, when the table has doubled, of all storages, and the oldest beyond
    /// [`RECORDS_MAX`].
    pub fn remember(
        &mut self,
        py: Python<'_>,
        identity: usize,
        reference: RecordReference,
    ) -> Vec<RecordReference> {
        let is_dead = |reference: &mut RecordReference| reference.bind(py).upgrade().is_none();
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
