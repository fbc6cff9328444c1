//! What holds for every trace, machine and plan: the simulator's rules, the bound, the planner.

use proptest::prelude::*;
use ssdtrain_plan::bound::least_step_seconds;
use ssdtrain_plan::machine::{Machine, Rates, Tier, Writeback};
use ssdtrain_plan::moves::{Action, Move, Plan};
use ssdtrain_plan::objective::judge;
use ssdtrain_plan::planner::{Found, search};
use ssdtrain_plan::pruning::prune;
use ssdtrain_plan::score::{STEP_COUNT, kernel_seconds};
use ssdtrain_plan::simulator;
use ssdtrain_plan::trace::{Class, Kernel, Tensor, Trace};

const TENSOR_BYTES_MAX: u64 = 1000;
const USES_MAX: usize = 4;

fn machine(device_bytes: u64, host_bytes: u64) -> Machine {
    Machine {
        device_bytes,
        host_bytes,
        ssd: Rates { out: 100.0, back: 150.0 },
        bus: Rates { out: 500.0, back: 600.0 },
        latency_s: 0.0,
        ..Machine::default()
    }
}

/// A machine on which every kernel fits, but rarely all that lives; by the plain rules, or with
/// writes as sessions do them.
fn machines() -> impl Strategy<Value = Machine> {
    let writebacks = prop_oneof![
        Just(None),
        (0..3000u64).prop_map(|in_flight_bytes| Some(Writeback { in_flight_bytes })),
    ];
    (0..3000u64, prop_oneof![Just(0), 0..4000u64], writebacks).prop_map(
        |(more, host, writeback)| {
            let device_bytes = USES_MAX as u64 * TENSOR_BYTES_MAX + more;
            Machine { writeback, ..machine(device_bytes, host) }
        },
    )
}

fn traces() -> impl Strategy<Value = Trace> {
    let tensors = prop::collection::vec((1..=TENSOR_BYTES_MAX, any::<bool>()), 4..24);
    (tensors, 3..20usize).prop_flat_map(|(tensors, kernel_count)| {
        let count = tensors.len() as u32;
        let uses = prop::collection::btree_set(0..count, 1..=USES_MAX);
        let kernels = prop::collection::vec((1..400u32, uses), kernel_count);
        kernels.prop_map(move |kernels| {
            let kernels = kernels
                .into_iter()
                .map(|(time, uses)| Kernel {
                    seconds: f64::from(time) / 100.0,
                    uses: uses.into_iter().collect(),
                })
                .collect();
            let tensors = tensors
                .iter()
                .map(|&(bytes, is_global)| Tensor {
                    bytes,
                    class: Class::Activation,
                    is_global,
                    ..Tensor::default()
                })
                .collect();
            Trace::new(kernels, tensors).expect("each kernel names a tensor once")
        })
    })
}

/// Moves by numbers that are cut to what the trace has.
fn moves() -> impl Strategy<Value = Vec<(u32, u8, u32, i32)>> {
    prop::collection::vec((any::<u32>(), 0..3u8, any::<u32>(), -3..3i32), 0..60)
}

fn plan(list: &[(u32, u8, u32, i32)], trace: &Trace, machine: &Machine) -> Plan {
    let moves = list
        .iter()
        .map(|&(tensor, action, after, priority)| Move {
            tensor: tensor % trace.tensors().len() as u32,
            action: match action {
                0 => Action::Fetch,
                1 if machine.host_bytes > 0 => Action::Evict(Tier::Host),
                _ => Action::Evict(Tier::Ssd),
            },
            after: after % trace.kernels().len() as u32,
            priority: f64::from(priority),
        })
        .collect();
    Plan::new(moves, trace, machine).expect("every move was cut to the trace")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_plan_runs_within_the_memory_and_no_step_beats_the_bound(
        trace in traces(),
        machine in machines(),
        list in moves(),
    ) {
        let plan = plan(&list, &trace, &machine);
        let seconds = kernel_seconds(&trace, 0);
        let run = || simulator::run(&trace, &machine, &seconds, STEP_COUNT, &plan);
        let timeline = run().expect("every kernel fits");
        prop_assert!(timeline.resident_bytes().iter().all(|one| one.1 <= machine.device_bytes));
        let again = run().expect("every kernel fits");
        prop_assert_eq!(timeline.ends(), again.ends(), "a replay went otherwise");
        // A step is its kernels and their waits.
        let total = timeline.ends().last().expect("there are kernels");
        let waits: f64 = timeline.stalls().iter().map(|one| one.seconds).sum();
        let kernels = trace.ideal_seconds() * STEP_COUNT as f64;
        prop_assert!((total - waits - kernels).abs() < 1e-6 * total);
        let least = least_step_seconds(&trace, &machine);
        prop_assert!(timeline.steady_seconds() >= least * (1.0 - 1e-9));
    }

    #[test]
    fn a_plan_that_was_found_is_judged_by_the_simulator_and_not_behind_no_plan(
        trace in traces(),
        machine in machines(),
    ) {
        let none = Found::judge(&trace, &machine, Plan::none(&trace)).expect("every kernel fits");
        let found = search(&trace, &machine, 3).expect("every kernel fits");
        prop_assert!(found.seconds <= none.seconds * (1.0 + 1e-6));
        let again = Found::judge(&trace, &machine, found.plan.clone()).expect("every kernel fits");
        prop_assert!((found.seconds - again.seconds).abs() < 1e-12 * again.seconds);
        let pruned = prune(&trace, &machine, found.clone(), 20).expect("every kernel fits");
        prop_assert!(pruned.seconds <= found.seconds);
        prop_assert!(pruned.written_bytes <= found.written_bytes);
    }
}

/// Forward makes ten activations of 100 bytes, backward takes them back; five fit. The drives carry
/// one in the time of a kernel, so a good plan hides all of it, and no plan waits.
#[test]
fn a_plan_hides_what_the_drives_can_carry() {
    let uses = (0..10u32).chain((0..10).rev());
    let kernels = uses.map(|one| Kernel { seconds: 1.0, uses: vec![one] }).collect();
    let tensor =
        Tensor { bytes: 100, class: Class::Activation, is_global: false, ..Tensor::default() };
    let trace = Trace::new(kernels, vec![tensor; 10]).expect("it is a trace");
    let machine = Machine { ssd: Rates { out: 100.0, back: 100.0 }, ..machine(700, 0) };
    assert_eq!(trace.live_bytes()[9], 1000);
    let none = Found::judge(&trace, &machine, Plan::none(&trace)).expect("it fits");
    let found = search(&trace, &machine, 20).expect("it fits");
    assert!(none.seconds > 20.5, "without a plan a step takes {} s", none.seconds);
    assert!(found.seconds < 20.0 + 1e-6, "a step takes {} s", found.seconds);
    assert!((300..=700).contains(&found.written_bytes), "{} bytes", found.written_bytes);
}

/// A plan that moves a tensor away and back for nothing, on a device that holds all.
#[test]
fn moves_for_nothing_are_left_out() {
    let uses = (0..4u32).chain((0..4).rev());
    let kernels = uses.map(|one| Kernel { seconds: 1.0, uses: vec![one] }).collect();
    let tensor =
        Tensor { bytes: 100, class: Class::Activation, is_global: false, ..Tensor::default() };
    let trace = Trace::new(kernels, vec![tensor; 4]).expect("it is a trace");
    let machine = machine(400, 0);
    let evict = Action::Evict(Tier::Ssd);
    let moves = [(0, evict, 0), (0, Action::Fetch, 3), (1, evict, 1), (1, Action::Fetch, 4)];
    let moves = moves
        .iter()
        .map(|&(tensor, action, after)| Move { tensor, action, after, priority: 0.0 })
        .collect();
    let plan = Plan::new(moves, &trace, &machine).expect("it is a plan");
    let found = Found::judge(&trace, &machine, plan).expect("it fits");
    assert_eq!(found.written_bytes, 200);
    let pruned = prune(&trace, &machine, found, 10).expect("it fits");
    assert_eq!(pruned.plan.moves(), &[]);
    assert_eq!(pruned.written_bytes, 0);
}

#[test]
fn a_kernel_that_cannot_fit_is_named() {
    let tensor =
        Tensor { bytes: 100, class: Class::Activation, is_global: false, ..Tensor::default() };
    let kernels =
        vec![Kernel { seconds: 1.0, uses: vec![0] }, Kernel { seconds: 1.0, uses: vec![0, 1] }];
    let trace = Trace::new(kernels, vec![tensor; 2]).expect("it is a trace");
    let machine = machine(150, 0);
    let stuck = Found::judge(&trace, &machine, Plan::none(&trace)).expect_err("200 bytes in 150");
    assert_eq!(stuck.kernel, 1);
}

/// What `moves` of three activations of 100 bytes do to a step: kernels of a second make them and
/// take them back in reverse, then nothing is needed for three. The drives write `rate` bytes a
/// second and read 1000.
fn written_back(
    rate: f64,
    in_flight_bytes: Option<u64>,
    moves: &[(u32, Action, u32)],
) -> (f64, [u64; 4], u64) {
    let uses = (0..3u32).chain((0..3).rev());
    let mut kernels: Vec<_> = uses.map(|one| Kernel { seconds: 1.0, uses: vec![one] }).collect();
    kernels.push(Kernel { seconds: 3.0, uses: Vec::new() });
    let tensor =
        Tensor { bytes: 100, class: Class::Activation, is_global: false, ..Tensor::default() };
    let trace = Trace::new(kernels, vec![tensor; 3]).expect("it is a trace");
    let writeback = in_flight_bytes.map(|in_flight_bytes| Writeback { in_flight_bytes });
    let ssd = Rates { out: rate, back: 1000.0 };
    let machine = Machine { ssd, writeback, ..machine(10_000, 0) };
    let moves = moves
        .iter()
        .map(|&(tensor, action, after)| Move { tensor, action, after, priority: f64::from(after) })
        .collect();
    let plan = Plan::new(moves, &trace, &machine).expect("it is a plan");
    let judged = judge(&trace, &machine, plan).expect("it fits");
    (judged.step_s, judged.moved_bytes, judged.most.peak_bytes)
}

const OUT: Action = Action::Evict(Tier::Ssd);

#[test]
fn a_begun_write_is_made_and_nobody_waits_for_it() {
    // The first is written from 1 s to 3 s, the second from 3 s to 5 s. It is needed at 4 s.
    let moves = [(0, OUT, 0), (1, OUT, 1)];
    let (plain_s, plain_bytes, _) = written_back(50.0, None, &moves);
    assert!((plain_s - 10.2).abs() < 1e-6, "the second is waited for and read back: {plain_s} s");
    assert_eq!(plain_bytes, [200, 0, 200, 0]);
    let (step_s, bytes, peak_bytes) = written_back(50.0, Some(1), &moves);
    assert!((step_s - 9.1).abs() < 1e-6, "the second is in memory when it is needed: {step_s} s");
    assert_eq!((bytes, peak_bytes), ([200, 0, 100, 0], 300));
    // At 30 bytes a second the turn of the second comes at 4.33 s, and no hook looks before 5 s.
    let (step_s, bytes, _) = written_back(30.0, Some(1), &moves);
    assert!((step_s - 9.0).abs() < 1e-6, "both are in memory when they are needed: {step_s} s");
    assert_eq!(bytes, [100, 0, 0, 0], "the second write is cancelled");
    let (step_s, bytes, _) = written_back(30.0, Some(1000), &moves);
    assert!((step_s - 9.0).abs() < 1e-6, "both are in memory when they are needed: {step_s} s");
    assert_eq!(bytes, [200, 0, 0, 0], "given at 2 s, it is written");
}

#[test]
fn a_fetch_cancels_no_write_that_waits_and_memory_is_free_when_the_next_kernel_begins() {
    let moves = [(0, OUT, 0), (1, OUT, 1), (1, Action::Fetch, 2), (0, Action::Fetch, 2)];
    assert_eq!(
        written_back(50.0, None, &moves).1,
        [100, 0, 100, 0],
        "the fetch takes the write back"
    );
    let (step_s, bytes, peak_bytes) = written_back(50.0, Some(1), &moves);
    assert!((step_s - 9.0).abs() < 1e-6, "the fetches have time: {step_s} s");
    assert_eq!((bytes, peak_bytes), ([200, 0, 100, 0], 300));
}
