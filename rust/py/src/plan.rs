//! `Planner`: a step as Python's lists, and plans for it as an object; the GIL is free meanwhile.

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use ssdtrain_core::error::shown_bytes;
use ssdtrain_plan::baselines::{ssdtrain_cut, teraio};
use ssdtrain_plan::bound::least_step_seconds;
use ssdtrain_plan::greedy::Budget;
use ssdtrain_plan::machine::{Machine, Rates, SizeShares, Tier, Writeback};
use ssdtrain_plan::moves::{Action, Move, Plan};
use ssdtrain_plan::objective::{self, Judged, Request};
use ssdtrain_plan::recompute::{candidates, with_recomputed};
use ssdtrain_plan::timeline::Stuck;
use ssdtrain_plan::trace::{Class, Kernel, Places, Tensor, Trace};

pyo3::import_exception!(ssdtrain.errors, ConfigError);

/// A tensor: bytes, class; `true` if it lives across steps, if it may go to the drives, and if it
/// may go to the host; and the seconds that it takes to compute it again.
type Row = (u64, usize, bool, bool, bool, Option<f64>);

const CLASSES: [Class; 5] =
    [Class::Activation, Class::Weight, Class::Gradient, Class::OptimizerState, Class::Workspace];

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct PlanMachine(Machine);

#[pymethods]
impl PlanMachine {
    #[new]
    #[pyo3(signature = (*, device_bytes, host_bytes, ssd, bus, host, latency_s, duplex_share,
                        sizes, price, in_flight_bytes))]
    #[allow(clippy::too_many_arguments)] // Python names each.
    fn new(
        device_bytes: u64,
        host_bytes: u64,
        ssd: (f64, f64),
        bus: (f64, f64),
        host: (f64, f64),
        latency_s: f64,
        duplex_share: f64,
        sizes: [(u64, f64); 4],
        price: (f64, f64),
        in_flight_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let rates = |(out, back): (f64, f64)| Rates { out, back };
        let positive = [ssd, bus, host].iter().all(|pair| pair.0 > 0.0 && pair.1 > 0.0)
            && duplex_share > 0.0
            && sizes.iter().all(|pair| pair.1 > 0.0);
        let is_sorted = sizes.windows(2).all(|pair| pair[0].0 <= pair[1].0);
        let is_free = latency_s >= 0.0 && price.0 >= 0.0 && price.1 >= 0.0;
        if !(positive && is_sorted && is_free) {
            return Err(PyValueError::new_err(
                "rates and shares have to be above 0, sizes sorted, latency and price 0 or more",
            ));
        }
        Ok(Self(Machine {
            device_bytes,
            host_bytes,
            ssd: rates(ssd),
            bus: rates(bus),
            host: rates(host),
            latency_s,
            duplex_share,
            sizes: SizeShares(sizes),
            price: rates(price),
            writeback: in_flight_bytes.map(|in_flight_bytes| Writeback { in_flight_bytes }),
        }))
    }
}

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct StepPlan {
    judged: Judged,
    device_bytes: u64,
    bound_s: f64,
    bound_bytes: u64,
}

#[pymethods]
impl StepPlan {
    #[getter]
    fn step_s(&self) -> f64 {
        self.judged.step_s
    }

    #[getter]
    fn stall_s(&self) -> f64 {
        self.judged.stall_s
    }

    #[getter]
    fn recompute_s(&self) -> f64 {
        self.judged.recompute_s
    }

    #[getter]
    fn bound_s(&self) -> f64 {
        self.bound_s
    }

    #[getter]
    fn bound_bytes(&self) -> u64 {
        self.bound_bytes
    }

    #[getter]
    fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.judged.most.peak_bytes
    }

    #[getter]
    fn class_peak_bytes(&self) -> [u64; 5] {
        self.judged.most.class_peak_bytes
    }

    #[getter]
    fn host_peak_bytes(&self) -> u64 {
        self.judged.most.host_peak_bytes
    }

    #[getter]
    fn moved_bytes(&self) -> [u64; 4] {
        self.judged.moved_bytes
    }

    #[getter]
    fn recomputed(&self) -> Vec<u32> {
        self.judged.recomputed.clone()
    }

    #[getter]
    fn resident(&self) -> Vec<(f64, u64)> {
        self.judged.resident.clone()
    }

    /// Moves in the order of their kernels; a tensor beyond the step's is the second life of a
    /// tensor that is computed again.
    #[getter]
    fn moves(&self) -> Vec<(u32, &'static str, u32, f64)> {
        let moves = self.judged.plan.moves().iter();
        moves
            .map(|step_move| {
                let action = match step_move.action {
                    Action::Fetch => "fetch",
                    Action::Evict(Tier::Ssd) => "ssd",
                    Action::Evict(Tier::Host) => "host",
                };
                (step_move.tensor, action, step_move.after, step_move.priority)
            })
            .collect()
    }
}

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Planner(Trace);

fn refused(stuck: Stuck) -> PyErr {
    let (kernel, need) = (stuck.kernel, shown_bytes(stuck.need_bytes));
    ConfigError::new_err(format!(
        "the step does not fit: kernel {kernel} needs {need} more than there is room for"
    ))
}

impl Planner {
    fn step_plan(&self, machine: &Machine, slowdown_max: f64, judged: Judged) -> StepPlan {
        StepPlan {
            device_bytes: machine.device_bytes,
            bound_s: least_step_seconds(&self.0, machine),
            bound_bytes: objective::least_peak_bytes(&self.0, machine, slowdown_max),
            judged,
        }
    }

    fn budgets(&self, rows: Vec<(u64, Vec<u32>)>) -> PyResult<Vec<Budget>> {
        rows.into_iter()
            .map(|(bytes, members)| {
                let mut counts = vec![false; self.0.tensors().len()];
                for member in members {
                    *counts.get_mut(member as usize).ok_or_else(|| {
                        PyIndexError::new_err(format!(
                            "a budget names tensor {member}, which is not there"
                        ))
                    })? = true;
                }
                Ok(Budget { bytes, counts })
            })
            .collect()
    }
}

#[pymethods]
impl Planner {
    #[new]
    fn new(seconds: Vec<f64>, uses: Vec<Vec<u32>>, tensors: Vec<Row>) -> PyResult<Self> {
        if seconds.len() != uses.len() {
            return Err(PyValueError::new_err("each kernel has a time and uses"));
        }
        let kernels = seconds.into_iter().zip(uses);
        let kernels = kernels.map(|(seconds, uses)| Kernel { seconds, uses }).collect();
        let tensors = tensors
            .into_iter()
            .map(|(bytes, class, is_global, ssd, host, recompute_s)| {
                let class = *CLASSES
                    .get(class)
                    .ok_or_else(|| PyIndexError::new_err(format!("there is no class {class}")))?;
                let places = Places { ssd, host };
                Ok(Tensor { bytes, class, is_global, places, recompute_s })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let trace = Trace::new(kernels, tensors);
        Ok(Self(trace.map_err(|error| ConfigError::new_err(error.to_string()))?))
    }

    #[getter]
    fn ideal_s(&self) -> f64 {
        self.0.ideal_seconds()
    }

    fn live_bytes(&self) -> Vec<u64> {
        self.0.live_bytes()
    }

    #[pyo3(signature = (machine, *, budgets, drafts, tries, may_recompute))]
    fn least_step(
        &self,
        py: Python<'_>,
        machine: &PlanMachine,
        budgets: Vec<(u64, Vec<u32>)>,
        drafts: usize,
        tries: usize,
        may_recompute: bool,
    ) -> PyResult<StepPlan> {
        let budgets = self.budgets(budgets)?;
        let machine = &machine.0;
        let trace = &self.0;
        let found = py.detach(|| {
            let request =
                Request { trace, machine, budgets: &budgets, drafts, tries, may_recompute };
            Ok(self.step_plan(machine, 0.0, objective::least_step(&request)?))
        });
        found.map_err(refused)
    }

    #[pyo3(signature = (machine, *, budgets, drafts, tries, slowdown_max))]
    fn least_peak(
        &self,
        py: Python<'_>,
        machine: &PlanMachine,
        budgets: Vec<(u64, Vec<u32>)>,
        drafts: usize,
        tries: usize,
        slowdown_max: f64,
    ) -> PyResult<StepPlan> {
        let budgets = self.budgets(budgets)?;
        let (trace, may_recompute) = (&self.0, false);
        let found = py.detach(|| {
            let asked = &machine.0;
            let request =
                Request { trace, machine: asked, budgets: &budgets, drafts, tries, may_recompute };
            let (device_bytes, judged) = objective::least_peak(&request, slowdown_max)?;
            let machine = Machine { device_bytes, ..*asked };
            Ok(self.step_plan(&machine, slowdown_max, judged))
        });
        found.map_err(refused)
    }

    /// The most bytes of each of these groups of tensors that a plan for this step, on this
    /// machine, has in memory at once.
    fn peaks_of(
        &self,
        py: Python<'_>,
        machine: &PlanMachine,
        plan: &StepPlan,
        groups: Vec<(u64, Vec<u32>)>,
    ) -> PyResult<Vec<u64>> {
        let (groups, machine) = (self.budgets(groups)?, &machine.0);
        let peak =
            |group: &Budget| objective::peak_of(&self.0, machine, &plan.judged, &group.counts);
        py.detach(|| groups.iter().map(peak).collect::<Result<_, _>>()).map_err(refused)
    }

    /// Judges the plan of another system: `keep`, `ssdtrain`, `teraio` or `recompute`.
    fn judged(&self, py: Python<'_>, machine: &PlanMachine, system: &str) -> PyResult<StepPlan> {
        let machine = &machine.0;
        let trace = &self.0;
        let found = py.detach(|| {
            let plan = match system {
                "keep" => Plan::none(trace),
                "ssdtrain" => ssdtrain_cut(trace, machine),
                "teraio" => teraio(trace, machine),
                "recompute" => {
                    let chosen = candidates(trace);
                    let again = with_recomputed(trace, &chosen);
                    let mut judged = objective::judge(&again, machine, Plan::none(&again))?;
                    judged.recomputed = chosen.iter().map(|candidate| candidate.tensor).collect();
                    judged.recompute_s = again.ideal_seconds() - trace.ideal_seconds();
                    return Ok(Some(judged));
                }
                _ => return Ok(None),
            };
            objective::judge(trace, machine, plan).map(Some)
        });
        let judged = found.map_err(refused)?;
        let judged =
            judged.ok_or_else(|| PyValueError::new_err(format!("no plan is called {system:?}")))?;
        Ok(self.step_plan(machine, 0.0, judged))
    }

    /// Judges a plan that is given as the moves of a step.
    fn judged_moves(
        &self,
        py: Python<'_>,
        machine: &PlanMachine,
        moves: Vec<(u32, String, u32, f64)>,
    ) -> PyResult<StepPlan> {
        let (trace, machine) = (&self.0, &machine.0);
        let moves = moves.into_iter().map(|(tensor, name, after, priority)| {
            let action = match name.as_str() {
                "fetch" => Action::Fetch,
                "ssd" => Action::Evict(Tier::Ssd),
                "host" => Action::Evict(Tier::Host),
                _ => return Err(PyValueError::new_err(format!("no move is called {name:?}"))),
            };
            Ok(Move { tensor, action, after, priority })
        });
        let moves = moves.collect::<PyResult<Vec<_>>>()?;
        let plan = Plan::new(moves, trace, machine)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let judged = py.detach(|| objective::judge(trace, machine, plan)).map_err(refused)?;
        Ok(self.step_plan(machine, 0.0, judged))
    }
}
