//! The rounds of one session: the round that is packed now, the rounds without an end, and the
//! round whose backward the window follows.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::round::{Plan, Round};
use crate::window::{Look, Walk, Window};

/// Number of learned orders that are remembered; no training has so many kinds of steps.
pub const ORDERS_MAX: usize = 64;
/// Number of rounds without an end that are watched. Older rounds teach nothing any more.
pub const UNFINISHED_MAX: usize = 32;

/// A round, which its tensors keep alive. A thread that holds its lock calls no other code.
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

/// The round that a packed tensor belongs to.
#[derive(Debug)]
pub struct Opened<E> {
    /// The round that is packed now.
    pub round: SharedRound<E>,
    /// Rounds that have ended, to learn from; their orders are remembered.
    pub finished: Vec<SharedRound<E>>,
    /// Rounds that are not watched any more.
    pub forgotten: Vec<SharedRound<E>>,
}

/// The rounds of one session, and the tensors that were read ahead.
#[derive(Debug)]
pub struct Rounds<E> {
    current: Option<SharedRound<E>>,
    unfinished: VecDeque<SharedRound<E>>,
    /// The order of the last round that has ended, by signature.
    orders: HashMap<i64, Arc<[usize]>>,
    window: Window,
    /// The round whose backward the window follows.
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

    /// Returns true if both are the same round.
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

    /// The round of a tensor that is packed in `phase`. It is a new round if the current round
    /// cannot take the tensor. With `goes_on` a round takes tensors even after the first of its
    /// unpacks.
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

    /// Like [`take_finished`](Self::take_finished), also for the current round if its backward has
    /// begun and ended.
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
        &mut self,
        round: &SharedRound<E>,
        plan: Option<Arc<Plan>>,
        key_on_disk: impl Fn(&E) -> Option<i64>,
    ) {
        if self.follows(round) {
            self.window.begin();
        }
        let mut round = round.lock();
        let learned = self.orders.get(&round.order_name()).map(Arc::clone);
        round.predict(learned, plan, key_on_disk);
    }

    /// Makes the window follow the backward of a round, which uses a tensor now; returns the
    /// tensors that were read ahead in vain. `None` if the window should stay where it is.
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

    /// Like [`follow`](Self::follow), for a round that uses a tensor which is not followed. `None`
    /// as well if no read is due.
    pub fn follow_passed(&mut self, round: &SharedRound<E>) -> Option<Vec<Of<E>>> {
        if !round.lock().is_any_due() {
            return None;
        }
        if self.follows(round) {
            return Some(Vec::new());
        }
        let given_up = self.clear();
        self.followed = Some(round.clone());
        self.window.begin();
        Some(given_up.into_iter().collect())
    }

    /// Returns true if the window follows the backward of this round.
    pub fn follows(&self, round: &SharedRound<E>) -> bool {
        self.followed.as_ref().is_some_and(|followed| followed.is(round))
    }

    /// Empties the window; returns the tensors that were read ahead.
    pub fn clear(&mut self) -> Option<Of<E>> {
        let ordinals = self.window.clear();
        Some(Of { round: self.followed.take()?, ordinals })
    }

    /// Begins a walk along the tensors that may be read ahead while so much is in memory; see
    /// [`Window::walk`].
    pub fn walk(&self, round: &SharedRound<E>, resident_bytes: u64, room_bytes: u64) -> Walk {
        let mut round = round.lock();
        let spare_bytes = round.note_resident(resident_bytes);
        self.window.walk(&round, room_bytes, spare_bytes)
    }

    /// The next tensor that should be read now; pass it to [`note`](Self::note).
    pub fn next(
        &mut self,
        round: &SharedRound<E>,
        walk: &mut Walk,
        look: impl Fn(&E) -> Look,
    ) -> Option<usize> {
        self.window.next(&mut round.lock(), walk, look)
    }

    /// Notes whether the read was begun. Returns false if the window follows another round by now;
    /// the caller should then give the read up.
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
