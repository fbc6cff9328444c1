//! Rounds of which only what leaves memory is followed.

use std::collections::HashMap;
use std::sync::Arc;

use ssdtrain_core::guide::Place;
use ssdtrain_core::round::{Entry, FORWARD, Plan, Round, next_key};
use ssdtrain_core::rounds::Rounds;
use ssdtrain_core::window::Look;

const SIZES: [u64; 4] = [10, 20, 10, 30];

fn entry(nbytes: u64, joined: Option<i64>) -> Entry {
    Entry { sequence: 0, nbytes, gpu: Some(1), joined, is_narrow: false }
}

/// A round that was followed in whole; its third tensor shares the bytes of the first.
fn whole() -> Round<()> {
    let mut round = Round::new(FORWARD);
    for (place, nbytes) in SIZES.into_iter().enumerate() {
        let joined =
            (place == 2).then_some(next_key(Round::<()>::new(FORWARD).signature(), SIZES[0]));
        round.add((), entry(nbytes, joined), 0.0);
    }
    round
}

fn guided() -> Round<()> {
    let mut round = Round::new(FORWARD);
    round.add((), entry(SIZES[0], None), 0.0);
    round.begin_guide(whole().guide().into());
    round
}

#[test]
fn a_narrow_copy_tells_no_rounds_apart() {
    let (mut plain, mut narrowing) = (whole(), whole());
    narrowing.add((), Entry { is_narrow: true, ..entry(20, None) }, 0.0);
    assert_eq!(narrowing.signature(), plain.signature());
    let narrow_key = narrowing.guide()[SIZES.len()].key;
    for round in [&mut plain, &mut narrowing] {
        round.add((), entry(20, None), 0.0);
    }
    assert_eq!(narrowing.signature(), plain.signature());
    let [last, last_narrowing] = [&plain, &narrowing].map(|round| round.guide().last().copied());
    assert_eq!(last_narrowing, last);
    assert_ne!(last.map(|place| place.key), Some(narrow_key));
}

#[test]
fn a_guide_has_the_keys_of_all_tensors_and_of_their_records() {
    let (whole, mut first_key) = (whole(), None);
    let guide = whole.guide();
    let mut key = Round::<()>::new(FORWARD).signature();
    for (place, nbytes) in SIZES.into_iter().enumerate() {
        key = next_key(key, nbytes);
        let first_key = *first_key.get_or_insert(key);
        let record_key = if place == 2 { first_key } else { key };
        assert_eq!(guide[place], Place { key, record_key, gpu: Some(1), stays: false });
    }
    assert_eq!(guide.len(), SIZES.len());
    assert_eq!(key, whole.signature());
}

#[test]
fn a_round_that_leaves_tensors_out_has_the_keys_of_one_that_does_not() {
    let mut round = guided();
    assert!(!round.is_partial());
    let second = round.guided(SIZES[1]).expect("it is in the guide");
    assert_eq!(second, whole().guide()[1]);
    round.pass(SIZES[1]);
    assert!(round.is_partial());
    assert_eq!(round.guided(SIZES[2]), Some(whole().guide()[2]));
    round.add((), entry(SIZES[2], Some(second.key)), 0.0);
    assert_eq!(round.guided(SIZES[3]), Some(whole().guide()[3]));
    round.pass(SIZES[3]);
    assert_eq!(round.signature(), whole().signature());
    assert_eq!(round.len(), 2);
    // What comes after the last place of the guide is unknown.
    assert_eq!(round.guided(SIZES[0]), None);
}

#[test]
fn an_unknown_tensor_ends_the_guide() {
    let mut round = guided();
    assert_eq!(round.guided(SIZES[1] + 1), None);
    // Nothing is known of what comes then, though it may look alike.
    assert_eq!(round.guided(SIZES[1]), None);
    assert!(!round.is_partial());
}

#[test]
fn a_round_that_is_asked_for_or_closed_leaves_nothing_out() {
    let mut round = guided();
    round.set_closed(true);
    assert_eq!(round.guided(SIZES[1]), None);
    round.set_closed(false);
    round.note_needed(0, round.signature(), 1.0);
    assert_eq!(round.guided(SIZES[1]), None);
    assert_eq!(Round::<()>::new(FORWARD).guided(SIZES[0]), None);
}

#[test]
fn the_order_of_a_round_in_whole_is_not_that_of_one_that_lacks_tensors() {
    let mut rounds = Rounds::<()>::default();
    let is_dead = |(): &()| false;
    // The places of the tensors that are followed, beside the first.
    let play = |rounds: &mut Rounds<()>, followed: &[usize], asked: &[usize]| {
        let round = rounds.open(FORWARD, false, is_dead).round;
        round.lock().add((), entry(SIZES[0], None), 0.0);
        round.lock().begin_guide(whole().guide().into());
        for (place, nbytes) in SIZES.iter().enumerate().skip(1) {
            if followed.contains(&place) {
                round.lock().add((), entry(*nbytes, None), 0.0);
            } else {
                round.lock().pass(*nbytes);
            }
        }
        rounds.predict(&round, None, |()| Some(1));
        let mut round = round.lock();
        let places = (0..round.len()).map(|ordinal| round.position(ordinal));
        let expected: Option<Vec<_>> = places.collect();
        for ordinal in asked {
            round.note_needed(*ordinal, 0, 1.0);
        }
        expected.expect("an order is expected")
    };
    play(&mut rounds, &[1, 2, 3], &[3, 1, 0, 2]);
    play(&mut rounds, &[3], &[1, 0]);
    assert_eq!(play(&mut rounds, &[1, 2, 3], &[3, 1, 0, 2]), [2, 1, 3, 0]);
    assert_eq!(play(&mut rounds, &[3], &[1, 0]), [1, 0]);
    assert_eq!(play(&mut rounds, &[2], &[0, 1]), [0, 1], "as many, but others");
}

#[test]
fn reads_begin_when_they_are_due_though_only_tensors_that_stay_are_used() {
    let mut rounds = Rounds::<()>::default();
    let round = rounds.open(FORWARD, false, |(): &()| false).round;
    let (mut keys, mut key) = (Vec::new(), round.lock().signature());
    for nbytes in SIZES {
        key = next_key(key, nbytes);
        keys.push(key);
    }
    round.lock().add((), entry(SIZES[0], None), 0.0);
    round.lock().begin_guide(whole().guide().into());
    SIZES[1..].iter().for_each(|nbytes| round.lock().pass(*nbytes));
    let plan = Plan {
        needed_s: keys.iter().rev().zip([4.0, 5.0, 6.0, 7.0]).map(|(key, at)| (*key, at)).collect(),
        start_by_s: HashMap::from([(keys[0], 6.0)]),
        longest_gap_s: 0.5,
    };
    rounds.predict(&round, Some(Arc::new(plan)), |()| Some(keys[0]));
    let begins = |rounds: &mut Rounds<()>, key| {
        round.lock().note_passed(key);
        rounds.follow_passed(&round)?;
        let mut walk = rounds.walk(&round, 0, u64::MAX);
        let look = |(): &()| Look::OnDisk { key: keys[0], slot_bytes: 1, joins: false };
        let ordinal = rounds.next(&round, &mut walk, look)?;
        assert!(rounds.note(&round, &mut walk, ordinal, true));
        assert_eq!(rounds.next(&round, &mut walk, look), None);
        Some(ordinal)
    };
    assert_eq!(begins(&mut rounds, keys[3]), None, "memory is at its peak, and there is time");
    assert!(!rounds.follows(&round), "until then the window may follow other backwards");
    assert_eq!(begins(&mut rounds, keys[2]), None);
    assert_eq!(begins(&mut rounds, keys[1]), Some(0));
    assert!(!round.lock().is_any_due(), "nothing is left to be read");
    round.lock().note_needed(0, keys[0], 1.0);
    assert!(rounds.follow(&round, 0).is_some_and(|given_up| given_up[0].ordinals.is_empty()));
}
