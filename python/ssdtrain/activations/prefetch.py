"""What is rare in following the order of return: learning from what has ended, and making room.

What each tensor goes through is in the compiled part (`_core.Rounds`), which asks this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ssdtrain._core import Round, Rounds, SavedTensor
from ssdtrain.activations.followed import Followed, Scope
from ssdtrain.activations.names import needing
from ssdtrain.errors import SsdtrainError
from ssdtrain.notices import Held, Notices, log
from ssdtrain.planning.policy import Item, Policy, Rates
from ssdtrain.planning.recording import Recording
from ssdtrain.reasons import ONE_NODE, PlannedRound
from ssdtrain.residency import WIDENING_BYTES, Residency
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Prefetcher"]

FORWARD = -1
"""The phase of a round that a forward packed."""
RECORDED_MAX = 16
"""Kinds of rounds of which the last one can be saved as a trace."""
AWAITED_MAX = 256
"""Ended rounds to whose ends a GPU has not come; of further ones nothing is learned."""
ONE_NODE_SHARE_MIN = 0.9
ONE_NODE_TENSORS_MIN = 4
"""A node that saves so much of a round, and so many tensors, is a graph compiled as a whole."""


class Prefetcher:
    """Learns from the rounds, and makes room for reads; under the session's lock.

    Args:
        transfer: What reads the bytes, and tells what the disk did of late.
        policy: Told of each round that has ended; its plans say how early a slow disk must begin.
        residency: How much more may be read ahead.
        stalls: The waits of the session, which are no part of a step's time.
        notices: Where a finding about the user's model is said.
        look: Called whenever rounds have ended, to say what went wrong out of sight meanwhile.

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
        """The rounds, and what is read ahead."""
        self.failure: str | None = None
        """Always ``None``: what is read ahead can be dropped; see ``residency.MemoryUser``."""
        self.is_one_node = False
        """Whether one node saves nearly all of a round."""
        self.recorded: dict[int, Recording] = {}
        """By signature, the last round that was learned from; the newest one last."""
        self._followed = Followed()
        self._ended: deque[Round] = deque()
        """Rounds that have ended and were not learned from, the oldest one first."""
        self.gpu_stall_s = 0.0
        """How long GPUs waited for loads, in the rounds that were learned from."""
        self.hooks_s = 0.0
        """Time in the hooks of tensors of the CPU, in the rounds that have ended, without waits."""
        residency.add_user(self)

    # What the rounds ask.

    def learn(self, finished: list[Round]) -> None:
        """Let the policy plan with the rounds that have ended."""
        self._look()
        self.hooks_s += sum(one.hooks_s for one in finished)
        # What a backward packed, as in reentrant checkpoints, teaches nothing.
        forwards = [one for one in finished if one.phase == FORWARD]
        self._ended.extend(forwards[: AWAITED_MAX - len(self._ended)])
        self.learn_from_ended()

    def learn_from_last(self) -> None:
        """Learn also from the round after which none may come, if its backward has ended."""
        self.learn(self.rounds.take_ended())

    def learn_from_ended(self) -> None:
        """Learn from the rounds in their order, as far as GPUs have come to their ends."""
        rates = self._transfer.rates()
        while self._ended:
            # Taken out first: a handler of a signal may come here as well.
            first = self._ended.popleft()
            if self.rounds.is_awaited(first):
                self._ended.appendleft(first)
                return
            self._learn_from(first, rates)

    def _learn_from(self, one: Round, rates: Rates) -> None:
        learned = self.rounds.learned(one)
        if one.is_skimmed:
            return
        items = list(map(Item._make, learned.items))
        if not items:
            return
        if learned.is_of_gpu:
            self.gpu_stall_s += learned.stall_s
        whole_s = max(item.needed_s for item in items) - items[0].packed_s
        # Of the whole time of the round, with its stalls.
        stall_share = learned.stall_s / max(whole_s + learned.stall_s, 1e-9)
        if one.is_partial:
            self._learn_from_partial(one, rates, stall_share)
            return
        if one.signature not in self._policy.plans:
            self._warn_of_one_node(one)
        self._policy.learn(one.signature, items, rates, stall_share)
        self._pin(one.signature)
        if self._policy.is_settled(one.signature):
            self.rounds.set_guide(one)
            self._followed.note_whole(
                one.opening,
                one.signature,
                saved_bytes=sum(item.nbytes for item in items),
                leaving_bytes=self._policy.plans[one.signature].leaving_bytes,
            )
        self.recorded.pop(one.signature, None)
        self.recorded[one.signature] = Recording(items, learned.began_s, learned.ended_s)
        if len(self.recorded) > RECORDED_MAX:
            del self.recorded[next(iter(self.recorded))]

    def _learn_from_partial(self, one: Round, rates: Rates, stall_share: float) -> None:
        """Plan with the stalls and rates of a round of which only what leaves was followed.

        When what stays was packed and needed the last round that was followed in whole has told.
        """
        self._followed.note_partial(one.opening, one.signature)
        whole = self.recorded.get(one.signature)
        if whole is not None:
            self._policy.learn(one.signature, whole.items, rates, stall_share)
            self._pin(one.signature)

    def _pin(self, signature: int) -> None:
        """Pin the memory in which tensors of GPUs stay by plan."""
        plan = self._policy.plans.get(signature)
        for gpu, nbytes in {} if plan is None else plan.pinned_bytes.items():
            try:
                self._transfer.pin_for_tier(gpu, nbytes)
            except SsdtrainError as error:
                self._policy.forgo_host_memory()
                self._notices.say("max_host_bytes", "no tensor stays in pinned memory: %s", error)
                return

    def scope(self, opening: int, gpu: int | None) -> Scope:
        """Say how much is followed of the round that begins now; ``gpu`` has its first tensor."""
        scope = "whole" if gpu is None else self._followed.scope(opening)
        # Rounds that are followed let the next plans have more, after stalls.
        if scope == "skimmed" and self._policy.would_plan_anew():
            return "partial"
        return scope

    def usual_round(self) -> PlannedRound | None:
        """Return the round that keeps most by its plan, of the last of each kind.

        If several keep as much, such as nothing, it is the one that saves most.
        """
        known = [one for signature in self.recorded if (one := self._planned(signature))]
        return max(known, key=lambda one: (one.staying_bytes, one.saved_bytes), default=None)

    def _planned(self, signature: int) -> PlannedRound | None:
        """Return the last round of a kind, with what its plan was made of."""
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
        )

    def make_room(self, saved: SavedTensor, nbytes: int) -> None:
        """Make room under the bound for the read of a tensor that is needed now."""
        if self._residency.room_bytes() < nbytes:
            self.give_way()
        self._residency.admit(
            nbytes, lambda: needing(saved.dtype, saved.size), lambda: _bytes_to_read(saved.mates())
        )

    def note_refused(self, error: SsdtrainError | torch.OutOfMemoryError) -> None:
        """Log that a read could not begin ahead of its need."""
        log.debug("did not read ahead: %s", error)

    def _warn_of_one_node(self, finished: Round) -> None:
        """Say if offloading cannot lower the peak: one node saves nearly all, at its end."""
        heaviest_bytes, tensors_count, all_bytes = finished.heaviest_node()
        is_one = heaviest_bytes >= ONE_NODE_SHARE_MIN * all_bytes
        if is_one and tensors_count >= ONE_NODE_TENSORS_MIN:
            self.is_one_node = True
            self._notices.say("one node", "%s", ONE_NODE)

    # What the residency asks.

    def wait_for_room(self) -> bool:
        """Return ``False``: when a read ends, no memory is freed; see ``residency.MemoryUser``."""
        return False

    def give_way(self) -> None:
        """Give up what was read ahead."""
        self.rounds.give_way()

    def held(self) -> list[Held]:
        """Return nothing: reads ahead are given up for room; see ``residency.MemoryUser``."""
        return []


def _bytes_to_read(mates: list[SavedTensor]) -> int:
    """Return the memory that a node needs beside what is read now, to have all its tensors.

    In another run they lie at other addresses, and each read may be a little larger.
    """
    records = {id(mate.record): mate.record for mate in mates}.values()
    handles = [one.handle for one in records if one.source is None and one.storage() is None]
    unread = [one.slot_bytes for one in handles if one is not None and not one.is_here()]
    return sum(unread) + WIDENING_BYTES * (1 + len(handles))
