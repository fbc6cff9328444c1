//! The rounds of one session: which one is packed, which have ended, whose backward is followed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::round::{Plan, Round};
use crate::window::{Look, Walk, Window};

/// Learned orders that are remembered: more than any training has kinds of steps.
pub const ORDERS_MAX: usize = 64;
/// Rounds without an end that are watched; older ones teach nothing any more.
pub const UNFINISHED_MAX: usize = 32;

/// A round, which its tensors keep. Whoever locks it calls nothing meanwhile.
#[derive(Debug)]
pub struct SharedRound<E>(Arc<Mutex<Round<E>>>);

/// Some tensors of a round.
#[derive(Debug)]
pub struct Of<E> {
    /// The round.
    pub round: SharedRound<E>,
    /// Their ordinals.
    pub ordinals: Vec<usize>,
}

/// Where a tensor belongs that is packed.
#[derive(Debug)]
pub struct Opened<E> {
    /// The round that is packed now.
    pub round: SharedRound<E>,
    /// Rounds that have ended, for who learns from them; their orders are remembered.
    pub finished: Vec<SharedRound<E>>,
    /// Rounds that are watched no longer.
    pub forgotten: Vec<SharedRound<E>>,
}

/// The rounds of one session, and what was read ahead.
#[derive(Debug)]
pub struct Rounds<E> {
    current: Option<SharedRound<E>>,
    unfinished: VecDeque<SharedRound<E>>,
    /// By signature, the order of the last round that has ended.
    orders: HashMap<i64, Arc<[usize]>>,
    window: Window,
    /// Whose backward the window follows.
    followed: Option<SharedRound<E>>,
}

impl<E> Clone for SharedRound<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> SharedRound<E> {
    /// The round itself.
    pub fn lock(&self) -> MutexGuard<'_, Round<E>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether two are one.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<E> Default for Rounds<E> {
    fn default() -> Self {
        Self {
            current: None,
            unfinished: VecDeque::new(),
            orders: HashMap::new(),
            window: Window::default(),
            followed: None,
        }
    }
}

impl<E> Rounds<E> {
    /// The round that is packed now.
    pub fn current(&self) -> Option<&SharedRound<E>> {
        self.current.as_ref()
    }

    /// The round that a tensor which is packed in `phase` belongs to: a new one if this pack is the
    /// first of one. `goes_on` says that a round goes on when one of its tensors was asked for.
    pub fn open(
        &mut self,
        phase: i64,
        goes_on: bool,
        is_dead: impl Fn(&E) -> bool + Copy,
    ) -> Opened<E> {
        if let Some(current) = &self.current {
            let mut round = current.lock();
            let is_open = !round.is_closed() && (goes_on || !round.is_asked_for());
            if round.phase() == phase && is_open && !round.is_dead(is_dead) {
                let round = current.clone();
                return Opened { round, finished: Vec::new(), forgotten: Vec::new() };
            }
        }
        let round = SharedRound(Arc::new(Mutex::new(Round::new(phase))));
        self.unfinished.extend(self.current.replace(round.clone()));
        let surplus = self.unfinished.len().saturating_sub(UNFINISHED_MAX);
        let forgotten = self.unfinished.drain(..surplus).collect();
        Opened { round, finished: self.take_finished(is_dead), forgotten }
    }

    /// The rounds that have ended since the last call; remembers their orders.
    pub fn take_finished(&mut self, is_dead: impl Fn(&E) -> bool + Copy) -> Vec<SharedRound<E>> {
        let has_ended = |round: &SharedRound<E>| round.lock().is_finished(is_dead);
        let (finished, rest): (Vec<_>, Vec<_>) = self.unfinished.drain(..).partition(has_ended);
        self.unfinished = rest.into();
        for round in finished.iter().map(SharedRound::lock).filter(|round| round.is_asked_for()) {
            if self.orders.len() >= ORDERS_MAX {
                self.orders.clear();
            }
            self.orders.insert(round.order_name(), round.needed().into());
        }
        finished
    }

    /// The same with the round that is packed now, if its backward has begun and it has ended.
    pub fn take_ended(&mut self, is_dead: impl Fn(&E) -> bool + Copy) -> Vec<SharedRound<E>> {
        let has_ended = |round: &mut SharedRound<E>| {
            let round = round.lock();
            round.is_asked_for() && round.is_finished(is_dead)
        };
        self.unfinished.extend(self.current.take_if(has_ended));
        self.take_finished(is_dead)
    }

    /// Expects the order that a round of the same signature had, or the reverse of the nodes.
    pub fn predict(
        &self,
        round: &SharedRound<E>,
        plan: Option<Arc<Plan>>,
        is_on_disk: impl Fn(&E) -> bool,
    ) {
        let mut round = round.lock();
        let learned = self.orders.get(&round.order_name()).map(Arc::clone);
        round.predict(learned, plan, is_on_disk);
    }

    /// Has the window follow the backward of a round, which uses a tensor now; returns what was
    /// read ahead in vain. `None` if the window should stay where it is.
    pub fn follow(&mut self, round: &SharedRound<E>, ordinal: usize) -> Option<Vec<Of<E>>> {
        if !Window::follows(&round.lock(), ordinal) {
            return None;
        }
        let is_another = !self.follows(round);
        let mut given_up = Vec::new();
        if is_another {
            given_up.extend(self.clear());
            self.followed = Some(round.clone());
        }
        let ordinals = self.window.move_to(&round.lock(), ordinal, is_another)?;
        given_up.push(Of { round: round.clone(), ordinals });
        Some(given_up)
    }

    /// Whether the window follows the backward of this round.
    pub fn follows(&self, round: &SharedRound<E>) -> bool {
        self.followed.as_ref().is_some_and(|followed| followed.is(round))
    }

    /// Empties the window; returns what was read ahead.
    pub fn clear(&mut self) -> Option<Of<E>> {
        let ordinals = self.window.clear();
        Some(Of { round: self.followed.take()?, ordinals })
    }

    /// Begins to look for what should be read ahead while so much is in memory; see
    /// [`Window::walk`].
    pub fn walk(&self, round: &SharedRound<E>, resident_bytes: u64, room_bytes: u64) -> Walk {
        let mut round = round.lock();
        let spare_bytes = round.note_resident(resident_bytes);
        self.window.walk(&round, room_bytes, spare_bytes)
    }

    /// The next tensor that should be read now; tell [`note`](Self::note) about it.
    pub fn next(
        &mut self,
        round: &SharedRound<E>,
        walk: &mut Walk,
        look: impl Fn(&E) -> Look,
    ) -> Option<usize> {
        self.window.next(&round.lock(), walk, look)
    }

    /// Notes whether the read was begun; `false` if the window follows another round by now, so
    /// that it should be given up.
    #[must_use]
    pub fn note(
        &mut self,
        round: &SharedRound<E>,
        walk: &mut Walk,
        ordinal: usize,
        is_begun: bool,
    ) -> bool {
        let follows = self.follows(round);
        if follows {
            self.window.note(walk, ordinal, is_begun);
        }
        follows
    }
}
