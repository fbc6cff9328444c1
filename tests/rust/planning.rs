//! What holds for every trace, machine and plan: the simulator's rules, the bound, the planner.

use proptest::prelude::*;
use ssdtrain_plan::bound::least_step_seconds;
use ssdtrain_plan::machine::{Machine, Rates, Tier};
use ssdtrain_plan::moves::{Action, Move, Plan};
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

/// A machine on which every kernel fits, but rarely all that lives.
fn machines() -> impl Strategy<Value = Machine> {
    (0..3000u64, prop_oneof![Just(0), 0..4000u64])
        .prop_map(|(more, host)| machine(USES_MAX as u64 * TENSOR_BYTES_MAX + more, host))
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
