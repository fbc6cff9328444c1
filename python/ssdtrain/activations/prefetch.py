"""Learns from rounds that have ended, and makes room for reads.

The compiled part (`_core.Rounds`) follows each tensor, and calls the `Prefetcher` for these rare
cases.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch

from ssdtrain._core import Learned, Round, Rounds, SavedTensor
from ssdtrain.activations.followed import Followed, Scope
from ssdtrain.activations.names import needing
from ssdtrain.activations.rematerializer import is_away, missing_bytes
from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.process_memory import release_free_memory
from ssdtrain.machine.torch_internals import queue_callback
from ssdtrain.notices import Held, Notices, log
from ssdtrain.planning.policy import Item, Policy, Rates
from ssdtrain.planning.recording import Recording
from ssdtrain.planning.rematerialize import NO_PRESSURE, Pressure
from ssdtrain.reasons import ONE_NODE, PRICE, PlannedRound
from ssdtrain.residency import WIDENING_BYTES, Residency
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.device_bound import DeviceBound
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Prefetcher"]

FORWARD = -1
"""The phase of a round that a forward packed."""
RECORDED_MAX = 16
"""Kinds of rounds whose last round can be saved as a trace."""
AWAITED_MAX = 256
"""Ended rounds whose ends a GPU has not reached; further ones teach nothing."""
ONE_NODE_SHARE_MIN = 0.9
ONE_NODE_TENSORS_MIN = 4
"""A node that saves such a share of a round and so many tensors is a model compiled as a whole."""


class Prefetcher:
    """Learns from the rounds, and makes room for reads; under the session's lock.

    Args:
        transfer: Reads the bytes, and measures the disk.
        policy: Plans with each round that has ended: how early a read must begin.
        residency: Has the bound for reads ahead.
        stalls: The waits of the session, which are no part of a step's time.
        notices: Logs findings about the user's model.
        device: The bound of a GPU, if there is one.
        look: Called when rounds have ended, to log errors of other threads.

    """

    def __init__(
        self,
        transfer: HostTransfer,
        policy: Policy,
        residency: Residency,
        *,
        stalls: Stalls,
        notices: Notices,
        look: Callable[[], None],
        device: DeviceBound | None = None,
    ) -> None:
        self._look = look
        self._transfer = transfer
        self._policy = policy
        self._residency = residency
        self._notices = notices
        self.rounds = Rounds(
            transfer.store,
            transfer.gpus,
            residency.account,
            limit_bytes=residency.limit_bytes,
            policy=policy,
            stalls=stalls,
        )
        """The rounds, and their reads ahead."""
        self.failure: str | None = None
        """Always ``None``: reads ahead can be dropped; see ``residency.MemoryUser``."""
        self.has_settled = False
        """True once the plan of a kind of rounds was settled."""
        self.is_one_node = False
        """True if a single node saves nearly all of a round."""
        self.recorded: dict[int, Recording] = {}
        """By signature, the last round that was learned from; the newest last."""
        self._followed = Followed()
        self._ended: deque[tuple[Round, Pressure]] = deque()
        """Rounds that have ended and were not learned from, the oldest first."""
        self._stalls, self._device = stalls, device
        self._stalled_s = 0.0
        """The waits of the session when rounds had ended the last time."""
        self.gpu_stall_s = 0.0
        """How long GPUs waited for loads, in the rounds that were learned from."""
        self.hooks_s = 0.0
        """Time in the hooks of tensors of the CPU, in the rounds that have ended, without waits."""
        residency.add_user(self)

    # Called by the rounds.

    def learn(self, finished: list[Round]) -> None:
        """Let the policy plan with the rounds that have ended."""
        self._look()
        self.hooks_s += sum(ended.hooks_s for ended in finished)
        # Rounds that a backward packed, as in reentrant checkpoints, teach nothing.
        forwards = [ended for ended in finished if ended.phase == FORWARD]
        if forwards:
            pressure = self._pressure(len(forwards))
            for ended in forwards[: AWAITED_MAX - len(self._ended)]:
                self._ended.append((ended, pressure))
        self.learn_from_ended()

    def _pressure(self, count: int) -> Pressure:
        """Return what the bound has cost each of ``count`` rounds that have ended now."""
        limit_bytes = self._residency.limit_bytes
        if self._device is not None:
            return Pressure(
                self._device.limit_bytes,
                room_bytes=self._device.room_bytes,
                has_settled=not self._device.is_learning,
            )
        if limit_bytes is None:
            return NO_PRESSURE
        before_s, self._stalled_s = self._stalled_s, self._stalls.total_s
        return Pressure(limit_bytes, (self._stalled_s - before_s) / count)

    def learn_from_last(self) -> None:
        """Learn also from the last round, if its backward has ended."""
        self.learn(self.rounds.take_ended())

    def learn_from_ended(self) -> None:
        """Learn from the rounds in their order, up to the first whose end a GPU has not reached."""
        rates = self._transfer.rates()
        while self._ended:
            # Taken out first: the handler of a signal may call this as well.
            first, pressure = self._ended.popleft()
            if self.rounds.is_awaited(first):
                self._ended.appendleft((first, pressure))
                return
            self._learn_from(first, rates, pressure)

    def _learn_from(self, ended: Round, rates: Rates, pressure: Pressure) -> None:
        learned = self.rounds.learned(ended)
        if ended.is_skimmed:
            return
        items = list(map(Item._make, learned.items))
        if not items:
            # It proved recipes, which takes time of a GPU. Under a bound they serve the next round.
            if pressure.room_bytes < math.inf:
                self._learn_from_last_whole(ended, rates, None, pressure)
            return
        if learned.is_of_gpu:
            self.gpu_stall_s += learned.stall_s
            self._policy.note_copied(learned.copied)
        whole_s = max(item.needed_s for item in items) - items[0].packed_s
        # A GPU that waited for copies lets memory go later in the next round, and leaves no less.
        stall_share: float | None = learned.load_stall_s / max(whole_s + learned.stall_s, 1e-9)
        if not self._policy.is_by_last_plan(ended.signature, ended.plan_count):
            stall_share = None
        if ended.is_partial:
            if learned.is_of_gpu and whole_s > 0 and self._device is None:
                self._note_price(ended, ended.hooks_s / whole_s if learned.waits_for_python else 0)
            # The last whole round has told when the tensors that stay were packed and needed.
            self._followed.note_partial(ended.opening, ended.signature)
            self._learn_from_last_whole(ended, rates, stall_share, pressure)
        else:
            was_settled = self._policy.is_settled(ended.signature)
            self._record(ended, learned, items)
            self._learn_from_last_whole(ended, rates, stall_share, pressure)
            self._note_whole(ended, items, is_first=not was_settled)

    def _record(self, ended: Round, learned: Learned, items: list[Item]) -> None:
        """Keep a round that was followed in whole as the last of its kind."""
        self.recorded.pop(ended.signature, None)
        self.recorded[ended.signature] = Recording(items, learned.began_s, learned.ended_s)
        if len(self.recorded) > RECORDED_MAX:
            del self.recorded[next(iter(self.recorded))]
        if ended.signature not in self._policy.plans:
            self._warn_of_one_node(ended)

    def _note_whole(self, ended: Round, items: list[Item], *, is_first: bool) -> None:
        """Have the next rounds of this kind followed in parts, if it has its plan."""
        if self._policy.is_settled(ended.signature):
            if is_first:
                self._begin_peaks()
            self.rounds.set_guide(ended)
            self._followed.note_whole(
                ended.opening,
                ended.signature,
                saved_bytes=sum(item.nbytes for item in items),
                leaving_bytes=self._policy.plans[ended.signature].leaving_bytes,
            )

    def _begin_peaks(self) -> None:
        """Forget the memory of the first rounds, which took more: their plans let less go."""
        release_free_memory()
        if not self.has_settled:
            self.has_settled = True
            self._residency.account.begin_saved_peaks()

    def _learn_from_last_whole(
        self, ended: Round, rates: Rates, stall_share: float | None, pressure: Pressure
    ) -> None:
        """Plan with the moments of the last whole round, and with stalls and rates of now."""
        whole = self.recorded.get(ended.signature)
        if whole is not None:
            self._policy.learn(ended.signature, whole.items, rates, stall_share, pressure)
            self._pin(ended.signature)

    def _note_price(self, ended: Round, price_share: float) -> None:
        """Note the share of a round of a GPU that the hooks of what leaves took from it."""
        if self._followed.note_price(ended.opening, price_share):
            self._notices.say("price", PRICE, 100 * price_share)

    def _pin(self, signature: int) -> None:
        """Pin the memory in which tensors of GPUs stay by plan, and by bolder plans."""
        try:
            self._transfer.pin_for_tier(self._policy.pinned_bytes_max(signature))
        except SsdtrainError as error:
            self._policy.forgo_host_memory()
            self._notices.say("max_host_bytes", "no tensor stays in pinned memory: %s", error)

    def scope(self, opening: int) -> Scope:
        """Return how much of the new round is followed, by the key of its first tensor."""
        if self._device is not None:
            self._device.begin_round()
            if self._device.is_learning:
                # All tensors are looked at: more of them may leave, or have recipes to be proved.
                return "whole"
        scope = self._followed.scope(opening)
        # After stalls, followed rounds let the next plan keep more.
        if scope == "skimmed" and self._policy.would_plan_anew():
            return "partial"
        return scope

    def usual_round(self) -> PlannedRound | None:
        """Return the round whose plan keeps most; of equal ones that which saves most."""
        planned = [known for signature in self.recorded if (known := self._planned(signature))]
        return max(planned, key=lambda it: (it.staying_bytes, it.saved_bytes), default=None)

    def _planned(self, signature: int) -> PlannedRound | None:
        """Return the last round of a kind with the figures of its plan."""
        plan, basis = self._policy.plans.get(signature), self._policy.basis(signature)
        if plan is None or basis is None:
            return None
        items = self.recorded[signature].items
        staying = [item for item in items if item.key in plan.keep]
        staying_bytes = sum(item.nbytes for item in staying)
        byte_seconds = sum(item.nbytes * (item.needed_s - item.packed_s) for item in staying)
        return PlannedRound(
            saved_bytes=sum(item.nbytes for item in items),
            staying_bytes=staying_bytes,
            idle_s=byte_seconds / max(1, staying_bytes),
            rates=basis[0],
            caution=basis[1],
            plan_count=self._policy.plan_count(signature),
        )

    def begin_backward(self) -> None:
        """Have the peak of a GPU read when the backward that begins now has ended."""
        if self._device is not None:
            self._device.begin_backward()
            queue_callback(self._device.end_backward)

    def make_room(self, saved: SavedTensor, nbytes: int) -> None:
        """Make room under the bound for the read of a tensor that is needed now."""
        if self._residency.room_bytes() < nbytes:
            self.give_way()
        self._residency.admit(
            nbytes, lambda: needing(saved.dtype, saved.size), lambda: _bytes_to_read(saved.mates())
        )

    def make_room_to_make(self, saved: SavedTensor) -> None:
        """Make room under the bound for a tensor that is made again, and for its sources.

        They are an eighth of the bound at most. Where nothing else can leave memory, the bound is
        exceeded by them: the bytes of the tensor are nowhere.
        """
        self._residency.try_to_admit(missing_bytes([saved]))

    def note_refused(self, error: SsdtrainError | torch.OutOfMemoryError) -> None:
        """Log that a read could not begin ahead of its need."""
        log.debug("did not read ahead: %s", error)

    def _warn_of_one_node(self, finished: Round) -> None:
        """Warn if a single node saves nearly all: then offloading cannot lower the peak."""
        heaviest_bytes, tensors_count, all_bytes = finished.heaviest_node()
        is_heavy = heaviest_bytes >= ONE_NODE_SHARE_MIN * all_bytes
        if is_heavy and tensors_count >= ONE_NODE_TENSORS_MIN:
            self.is_one_node = True
            self._notices.say("one node", "%s", ONE_NODE)

    # Called by the residency.

    def wait_for_room(self) -> bool:
        """Return ``False``: when a read ends, no memory is freed; see ``residency.MemoryUser``."""
        return False

    def give_way(self) -> None:
        """Give up the reads ahead."""
        self.rounds.give_way()

    def held(self) -> list[Held]:
        """Return nothing: reads ahead are given up for room; see ``residency.MemoryUser``."""
        return []


def _bytes_to_read(mates: list[SavedTensor]) -> int:
    """Return the memory that a node needs for its other tensors.

    In another run they lie at other addresses, so each read may be a little larger.
    """
    count = len({id(mate.record) for mate in mates if is_away(mate)})
    return missing_bytes(mates) + WIDENING_BYTES * (1 + count)
