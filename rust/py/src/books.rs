//! The records of a session, by the storages that they are of.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyWeakrefMethods;

use crate::gate::RecordReference;

/// At so many known storages, those that are gone are forgotten for the first time.
const FORGET_AT_MIN: usize = 1024;

/// The records of one session.
pub struct Books {
    /// The last record of each storage, by the identity of the storage; some are dead.
    pub known: HashMap<usize, RecordReference>,
    forget_at: usize,
}

impl Default for Books {
    fn default() -> Self {
        Self { known: HashMap::new(), forget_at: FORGET_AT_MIN }
    }
}

impl Books {
    /// Enters a record; returns what is to be dropped: dead entries, as the table doubles.
    pub fn remember(
        &mut self,
        py: Python<'_>,
        identity: usize,
        reference: RecordReference,
    ) -> Vec<RecordReference> {
        let mut dropped = Vec::new();
        if self.known.len() >= self.forget_at {
            let is_dead = |_: &usize, one: &mut RecordReference| one.bind(py).upgrade().is_none();
            dropped.extend(self.known.extract_if(is_dead).map(|(_, one)| one));
            self.forget_at = FORGET_AT_MIN.max(2 * self.known.len());
        }
        dropped.extend(self.known.insert(identity, reference));
        dropped
    }
}
