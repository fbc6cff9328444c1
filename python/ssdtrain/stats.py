"""The figures of a session: a frozen snapshot, and a report for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ssdtrain.machine.huge_pages import SMALL_PAGES_REMEDY, has_small_pages
from ssdtrain.machine.process_memory import known_bytes
from ssdtrain.planning.recompute import BlockCounts
from ssdtrain.reasons import Reason
from ssdtrain.residency import Residency
from ssdtrain.sharing import ClassStats, Figures
from ssdtrain.sizes import shown_bytes, shown_count, shown_rate
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.device_bound import shown_bound
from ssdtrain.transfer.staged import OnGpus

__all__ = ["Stats", "snapshot", "with_tenants"]

OF_THE_MOMENT = frozenset(
    {
        "resident_bytes",
        "disk_used_bytes",
        "disk_reserved_bytes",
        "process_bytes",
        "has_settled",
        "has_small_pages",
        "is_surprising",
        "resident_bound_bytes",
        "pinned_bytes",
        "device_bound_bytes",
        "device_excess_bytes",
        "ring_bytes",
        "recompute_expected_s",
        "recompute_measured_s",
    }
)
"""Fields of a state, whose differences mean nothing; those of peaks neither."""

STALL_SHARE_LITTLE = 0.01
"""A session that waits for less of the time is limited by computing."""
OFFLOADED_SHARE_MUCH = 0.9
"""If this share of the eligible bytes was offloaded, computing is the limit: backward needs the
rest too soon for any disk."""

GAINED_SHARE_LITTLE = 0.1
"""The report calls a smaller share of the bytes of saved tensors hardly a gain."""
SEEN_SHARE_LITTLE = 0.02
"""The same of a smaller share of the memory of the process, or of GPUs."""
LOST_SHARE_LITTLE = 0.01
"""The report gives no advice about a loss of a smaller share of the time in the block."""

DEAR_REMEDY = "leave the block out, unless the step does not fit without it"
ACTIVATIONS = "activations"
REASON_BELOW = "the last line tells why"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a session. Sizes in bytes, times in seconds, since the session began.

    Each saved storage ends in one of four ways, and is counted then: *rematerialized* (neither kept
    nor written, because it can be made again from others), *offloaded* (written,
    or copied to pinned memory to stay there; its memory freed), *forwarded* (on its way to the
    disk, or there, but served from memory because it was still held), or *kept*: by plan, for its
    size, or because its write was cancelled or failed.
    """

    bytes_offloaded: int
    bytes_forwarded: int
    bytes_kept: int
    tensors_offloaded: int
    tensors_forwarded: int
    tensors_kept: int
    bytes_rematerialized: int
    tensors_rematerialized: int
    bytes_written: int
    """Bytes that reached the drive, with the widening to its block size."""
    bytes_read: int
    write_busy_s: float
    """Time in which at least one write was in flight."""
    read_busy_s: float
    stall_s: float
    """Time in which a computing thread waited for activations: the exposed part of their I/O."""
    stall_count: int
    elapsed_s: float
    """Time since the session began, whatever was done in it."""
    bytes_eligible: int
    """Saved bytes that may leave memory by their kind and size."""
    write_failed_count: int
    """Writes that failed, or for which the disk had no space; their tensors were kept."""
    write_refused_count: int
    """Writes that ``max_disk_bytes`` did not allow; their tensors were kept."""
    resident_bytes: int
    """Saved bytes in memory now: kept, being written, read ahead or handed to a node. Under
    ``max_resident_bytes`` also what is reserved for updates of an optimizer that shares it."""
    resident_bytes_peak: int
    saved_resident_bytes_peak: int
    """Most saved bytes in memory at once, without reserved bytes of an optimizer or weights, since
    the first plan was settled."""
    saved_bytes_peak: int
    """Most saved bytes that were needed at once since then, in memory or not: the peak without
    ssdtrain, if no block was computed again."""
    disk_used_bytes: int
    """Bytes of tensors on the disk now."""
    disk_reserved_bytes: int
    """Size of the files that have these tensors."""
    engines: tuple[tuple[str, str], ...]
    """Directory and engine of each spill file."""
    pinned_bytes: int
    """Memory of the CPU that is pinned for copies from and to GPUs."""
    from_gpu_bytes: int
    """Copied from GPUs' tensors, to pinned memory or to a ring on the GPU."""
    staying_bytes: int
    """Of these, bytes that stay in pinned memory by plan (`max_host_bytes`)."""
    to_gpu_bytes: int
    """Copied back."""
    from_gpu_s: float
    """Time of these copies on the GPUs' links, without their waits."""
    to_gpu_s: float
    """The same of the copies back."""
    full_gpu_wait_s: float
    """Time in which threads waited because the memory for a GPU's tensors was full, while the GPU
    was behind them: such a wait costs nothing."""
    full_disk_wait_s: float
    """Time in which they waited there for the disk; only under ``max_resident_bytes``."""
    full_stayed_count: int
    """Tensors that stayed on their GPU because that memory was full."""
    away_bytes_peak: int
    """Most saved bytes that had no memory on their GPU at once. The sum over GPUs, as below."""
    device_bytes_peak: int
    """Most memory of GPUs in tensors at once (``torch.cuda.max_memory_allocated``), since the
    process began or the program reset it."""
    device_bound_bytes: int
    """``max_device_bytes``; 0 without it."""
    device_excess_bytes: int
    """Bytes above it at the peak of the last step that has ended."""
    ring_bytes: int
    """Memory of GPUs that their tensors go through by GPUDirect Storage, past the CPU's."""
    direct_written_bytes: int
    """Bytes that nvidia-fs wrote from GPUs since their first tensor, for all processes."""
    direct_read_bytes: int
    """Bytes that it read."""
    process_bytes: int
    """Memory of the whole process now (``VmRSS``); 0 if the system does not tell."""
    process_bytes_peak: int
    """Its peak since the process began (``VmHWM``)."""
    has_settled: bool
    """True once the first plan was settled, after three steps of its kind."""
    resident_bound_bytes: int
    """``max_resident_bytes``; 0 without it."""
    has_small_pages: bool
    """True if torch's tensors are not on huge pages, because ssdtrain was imported too late."""
    hooks_s: float = 0.0
    """Time in hooks of tensors that may leave, without waits. It costs nothing while a GPU has
    work."""
    rematerialize_s: float = 0.0
    """Time of the operations that made tensors again; on a GPU the time in which Python began
    them."""
    recipes_differing_count: int = 0
    """Recipes that made other bits than were saved when they were proved. They are not used."""
    gpu_stall_s: float = 0.0
    """Time in which GPUs waited for tensors that came back, by their own clocks, in steps that have
    ended there. Waits of threads meanwhile are in ``stall_s``."""
    blocks_called: int = 0
    """Calls of blocks that ``ssdtrain.checkpoint`` marked, under ``max_resident_bytes``."""
    blocks_recomputed: int = 0
    """Calls that backward computes again."""
    bytes_not_written: int = 0
    """Bytes that these calls did not save, so that no write was needed."""
    recomputed_s: float = 0.0
    """Time of the second runs."""
    recompute_expected_s: float = 0.0
    """How long forward and backward of the last step with such blocks should have taken; 0 before
    the first choice."""
    recompute_measured_s: float = 0.0
    """How long they took, with waits for the disk."""
    reason: str | None = None
    """The cause why little or nothing was offloaded, with advice; ``None`` if much was."""
    is_surprising: bool = False
    """True if the user could expect more."""
    classes: tuple[ClassStats, ...] = ()
    """The figures of activations and of each other class that shares the store; empty if there is
    no other."""

    @property
    def exposed_s(self) -> float:
        """Time in which threads waited for I/O, of all classes."""
        others_s = sum(figures.stall_s for figures in self.classes if figures.name != ACTIVATIONS)
        return self.stall_s + self.full_disk_wait_s + others_s

    @property
    def hidden_s(self) -> float:
        """I/O time in which no thread waited for it."""
        return max(0.0, self.write_busy_s + self.read_busy_s - self.exposed_s)

    @property
    def limit(self) -> str:
        """The bottleneck of the session.

        ``"compute"`` if nearly all eligible bytes were offloaded or made again, and hardly a thread
        or GPU waited. Else the link that was busy for longest: ``"the disk's writes"``,
        ``"the disk's reads"``, ``"the PCIe copies to the host"`` or ``"the PCIe copies to the
        GPU"``. Without a disk and without such copies it is ``"compute"``.
        """
        stall_s = max(self.stall_s + self.full_disk_wait_s, self.gpu_stall_s)
        has_waited = stall_s > STALL_SHARE_LITTLE * self.elapsed_s
        left_bytes = self.bytes_offloaded + self.bytes_rematerialized
        if not has_waited and left_bytes >= OFFLOADED_SHARE_MUCH * self.bytes_eligible:
            return "compute"
        busy_s = {}
        if self.engines:
            busy_s["the disk's writes"] = self.write_busy_s
            busy_s["the disk's reads"] = self.read_busy_s
        if self.pinned_bytes:
            # Without pinned memory the copies are on the GPU, and its link is that of the disk.
            busy_s["the PCIe copies to the host"] = self.from_gpu_s
            busy_s["the PCIe copies to the GPU"] = self.to_gpu_s
        return max(busy_s, key=lambda link: busy_s[link], default="compute")

    def since(self, earlier: Stats) -> Stats:
        """Return the changes after ``earlier``, a snapshot of the same session.

        Counts, bytes and times are differences. States, such as the bytes in memory or on the disk
        now, and peaks are those of this snapshot.
        """
        changes = {}
        for field in fields(self):
            now = getattr(self, field.name)
            is_state = field.name in OF_THE_MOMENT or field.name.endswith("_peak")
            if isinstance(now, int | float) and not is_state:
                changes[field.name] = now - getattr(earlier, field.name)
        before = {figures.name: figures for figures in earlier.classes}
        classes = [it.since(before.get(it.name, ClassStats(name=""))) for it in self.classes]
        return replace(self, classes=tuple(classes), **changes)

    def as_dict(self) -> dict[str, int | float | str]:
        """Return all figures by name, in a flat form that JSON and every logger take.

        Names with ``bytes`` are sizes in bytes, names that end in ``_s`` are times in seconds;
        values of names that begin with ``is`` or ``has`` are 0 or 1, and ``reason`` may be empty.
        Each class that shares the store has its own names: ``optimizer_state_bytes_written``.
        """
        values: dict[str, int | float | str] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "classes"
        }
        for class_stats in self.classes:
            prefix = class_stats.name.replace(" ", "_")
            figures = asdict(class_stats)
            del figures["name"]
            values.update({f"{prefix}_{name}": value for name, value in figures.items()})
        values |= {name: int(value) for name, value in values.items() if isinstance(value, bool)}
        values["reason"] = self.reason or ""
        values["engines"] = self._engines()
        values["hidden_s"] = self.hidden_s
        values["limit"] = self.limit
        return values

    def _engines(self) -> str:
        return ", ".join(f"{name} in {place}" for place, name in self.engines)

    def _shown_blocks(self) -> str:
        text = (
            f"{self.blocks_recomputed} of {self.blocks_called} computed again in "
            f"{self.recomputed_s:.3f} s, {shown_bytes(self.bytes_not_written)} not written"
        )
        if not self.recompute_expected_s:
            return text + "; still measuring"
        expected, measured = self.recompute_expected_s, self.recompute_measured_s
        return text + f"; a step of {expected:.3f} s was expected, the last took {measured:.3f} s"

    def __str__(self) -> str:
        """Return the report for a person."""
        offloaded = f"{shown_bytes(self.bytes_offloaded)} offloaded in {self.tensors_offloaded}"
        forwarded = f"{shown_bytes(self.bytes_forwarded)} forwarded in {self.tensors_forwarded}"
        kept = f"{shown_bytes(self.bytes_kept)} kept in {shown_count(self.tensors_kept, 'tensor')}"
        written, read = shown_bytes(self.bytes_written), shown_bytes(self.bytes_read)
        written += f" written{shown_rate(self.bytes_written, self.write_busy_s)}"
        read += f" read{shown_rate(self.bytes_read, self.read_busy_s)}"
        times = f"{self.hidden_s:.3f} s hidden, {self.exposed_s:.3f} s exposed"
        # The time is that of all classes, the count that of activations.
        stalls = shown_count(self.stall_count, "stall") + " of activations" * bool(self.classes)
        used, reserved = shown_bytes(self.disk_used_bytes), shown_bytes(self.disk_reserved_bytes)
        peak, now = shown_bytes(self.resident_bytes_peak), shown_bytes(self.resident_bytes)
        memory = f"{shown_bytes(self.process_bytes_peak)} of memory at the peak, "
        memory += f"{shown_bytes(self.process_bytes)} now, all included"
        rows = [
            f"ssdtrain: {self._shown_gain()}",
            f"  disks      {self._engines() or 'none, so nothing is written'}",
            f"  saved      {offloaded}, {forwarded}, {kept}",
            f"  resident   {peak} at the peak, {now} now",
            f"  process    {memory}",
            f"  drive      {written}, {read}",
            f"  on disk    {used} now, in files of {reserved}",
            f"  I/O time   {times}, {stalls}",
        ]
        if self.bytes_rematerialized or self.recipes_differing_count:
            rows.insert(3, f"  made again {self._shown_made()}")
        rows += [
            f"  {'' if number else 'of these':10} {figures}"
            for number, figures in enumerate(self.classes)
        ]
        if self.blocks_called:
            rows.append(f"  blocks     {self._shown_blocks()}")
        if self.pinned_bytes or self.ring_bytes:
            rows += self._gpu_rows()
        if bound := self.device_bound_bytes:
            rows.append(f"  GPU bound  {shown_bound(bound, self.device_excess_bytes)}")
        if self.write_failed_count:
            failed = shown_count(self.write_failed_count, "write")
            rows.append(f"  failures   {failed}; their tensors were kept")
        if self.write_refused_count:
            refused = shown_count(self.write_refused_count, "write")
            rows.append(f"  bound      {refused} beyond max_disk_bytes not made")
        if self.has_small_pages:
            rows.append(
                f"  pages      small, because ssdtrain was imported too late; {SMALL_PAGES_REMEDY}"
            )
        if self.reason is not None:
            rows.append(f"  because    {self.reason}")
        return "\n".join(rows)

    def _shown_gain(self) -> str:
        """Return the first line: gain and cost, with advice if hardly anything was gained."""
        if not self.saved_bytes_peak and not self.classes:
            text = "no saved tensor was taken here, so nothing was gained"
            return text if self.reason is None else f"{text}; {REASON_BELOW}"
        on_gpu, all_bytes = self.pinned_bytes or self.ring_bytes, self.process_bytes_peak
        gained_bytes = self.saved_bytes_peak - self.saved_resident_bytes_peak
        lost_s = max(self.exposed_s, self.gpu_stall_s)
        least = "at least " if self.blocks_recomputed else ""
        # The rows of the classes tell of weights and state.
        kind = "activations alone" if self.classes else "saved tensors"
        text = (
            f"{kind} took {shown_bytes(self.saved_resident_bytes_peak)} of memory at the "
            f"peak, and would take {least}{shown_bytes(self.saved_bytes_peak)} without ssdtrain"
        )
        if on_gpu:
            gained_bytes, all_bytes = self.away_bytes_peak, self.device_bytes_peak
            text = f"without ssdtrain GPUs would hold up to {shown_bytes(gained_bytes)} more"
        else:
            lost_s += self.hooks_s + self.rematerialize_s
        share = lost_s / max(self.elapsed_s, 1e-9)
        text += f"; hooks and waits took {lost_s:.3f} s of {self.elapsed_s:.3f} s ({share:.1%})"
        # Weights and state that leave memory are a gain, too.
        if self.classes or self.blocks_recomputed:
            return text
        is_much = gained_bytes >= GAINED_SHARE_LITTLE * self.saved_bytes_peak
        if is_much and gained_bytes >= SEEN_SHARE_LITTLE * all_bytes:
            # A GPU computes on meanwhile; without a directory nothing but recipes takes time; and a
            # bound asks for memory at any time.
            freed = gained_bytes / (all_bytes + gained_bytes)
            if on_gpu or not self.engines or self.resident_bound_bytes or share <= freed:
                return text
            return f"{text}, but only {freed:.1%} of the memory was freed: {DEAR_REMEDY}"
        advice = "leave the block out"
        if self.reason is not None:
            advice = f"{REASON_BELOW}, and what to change"
        elif self.write_refused_count:
            refused = shown_count(self.write_refused_count, "write")
            advice = f"raise max_disk_bytes, into which {refused} did not fit"
        elif not self.has_settled:
            advice = "the first three steps of a kind measure and prove, so look after ten"
        elif share >= LOST_SHARE_LITTLE:
            advice += ", or raise min_bytes so that it takes less time"
        return f"hardly anything was gained: {text}; {advice}"

    def _shown_made(self) -> str:
        size = shown_bytes(self.bytes_rematerialized)
        tensors = shown_count(self.tensors_rematerialized, "tensor")
        took = f"their operations took {self.rematerialize_s:.3f} s"
        text = f"{size} in {tensors}, neither kept nor written; {took}"
        if self.recipes_differing_count:
            recipes = shown_count(self.recipes_differing_count, "recipe")
            text += f"; {recipes} made other bits in the proof, and not used since"
        return text

    def _gpu_rows(self) -> list[str]:
        rows = []
        if self.pinned_bytes:
            down = f"{shown_bytes(self.from_gpu_bytes)} copied from it"
            up = f"{shown_bytes(self.to_gpu_bytes)} back"
            down += shown_rate(self.from_gpu_bytes, self.from_gpu_s)
            up += shown_rate(self.to_gpu_bytes, self.to_gpu_s)
            pinned = shown_bytes(self.pinned_bytes)
            rows.append(f"  GPU        {down}, {up}, through {pinned} of pinned memory")
            if self.staying_bytes:
                staying = shown_bytes(self.staying_bytes)
                rows.append(f"  host       {staying} of these stayed in pinned memory by plan")
        if self.ring_bytes:
            rows.append(
                f"  GPU direct {shown_bytes(self.from_gpu_bytes)} taken from it, "
                f"{shown_bytes(self.to_gpu_bytes)} back, by GPUDirect Storage through "
                f"{shown_bytes(self.ring_bytes)} of its memory; nvidia-fs counted "
                f"{shown_bytes(self.direct_written_bytes)} written, "
                f"{shown_bytes(self.direct_read_bytes)} read"
            )
        if self.full_gpu_wait_s or self.full_disk_wait_s or self.full_stayed_count:
            stayed = shown_count(self.full_stayed_count, "tensor")
            rows.append(
                f"  GPU full   {self.full_gpu_wait_s:.3f} s of waits for the GPU, ahead of which "
                f"nothing is lost, {self.full_disk_wait_s:.3f} s for the disk; {stayed} stayed"
            )
        rows.append(f"  GPU stalls {self.gpu_stall_s:.3f} s of waits for tensors on their way")
        peak, away = shown_bytes(self.device_bytes_peak), shown_bytes(self.away_bytes_peak)
        rows.append(f"  GPU peak   {peak} in tensors; up to {away} more without offload")
        rows.append(f"  limit      {self.limit}")
        return rows


def with_tenants(
    stats: Stats, tenants: Mapping[str, Figures], activations: Callable[[], Figures]
) -> Stats:
    """Return a snapshot with the figures of each class, if there are other classes."""
    if not tenants:
        return stats
    by_class = {ACTIVATIONS: activations(), **tenants}
    written = sum(figures.bytes_written for figures in by_class.values())
    read = sum(figures.bytes_read for figures in by_class.values())
    classes = []
    for name, figures in by_class.items():
        busy_s = stats.write_busy_s * figures.bytes_written / max(1, written)
        busy_s += stats.read_busy_s * figures.bytes_read / max(1, read)
        hidden_s = max(0.0, busy_s - figures.stall_s)
        classes.append(ClassStats(name=name, hidden_s=hidden_s, **asdict(figures)))
    return replace(stats, classes=tuple(classes))


def snapshot(
    residency: Residency,
    stalls: Stalls,
    *,
    resident_bytes: int,
    write_failed_count: int,
    write_refused_count: int,
    store: Mapping[str, object],
    on_gpus: OnGpus,
    gpu_stall_s: float,
    hooks_s: float,
    has_settled: bool,
    rematerialize_s: float,
    recipes_differing_count: int,
    elapsed_s: float,
    bytes_eligible: int,
    reason: Reason | None,
    blocks: BlockCounts,
) -> Stats:
    """Join the counts of a session with those of its store (``_core.Store.stats``)."""

    def number(key: str) -> int:
        value = store.get(key, 0)
        assert isinstance(value, int)
        return value

    engines: Any = store.get("engines", ())
    ended = residency.account.ended()
    return Stats(
        bytes_offloaded=ended["offloaded"][0],
        bytes_forwarded=ended["forwarded"][0],
        bytes_kept=ended["kept"][0],
        tensors_offloaded=ended["offloaded"][1],
        tensors_forwarded=ended["forwarded"][1],
        tensors_kept=ended["kept"][1],
        bytes_rematerialized=ended["rematerialized"][0],
        tensors_rematerialized=ended["rematerialized"][1],
        bytes_written=number("bytes_written"),
        bytes_read=number("bytes_read"),
        write_busy_s=number("write_busy_ns") / 1e9,
        read_busy_s=number("read_busy_ns") / 1e9,
        stall_s=stalls.total_s,
        stall_count=stalls.count,
        elapsed_s=elapsed_s,
        bytes_eligible=bytes_eligible,
        write_failed_count=write_failed_count,
        write_refused_count=write_refused_count,
        resident_bytes=resident_bytes,
        resident_bytes_peak=residency.account.peak_bytes,
        saved_resident_bytes_peak=residency.account.saved_peak_bytes,
        saved_bytes_peak=residency.account.alive_peak_bytes,
        disk_used_bytes=number("disk_used_bytes"),
        disk_reserved_bytes=number("disk_reserved_bytes"),
        engines=tuple((str(place), str(name)) for place, name in engines),
        **asdict(on_gpus),
        gpu_stall_s=gpu_stall_s,
        hooks_s=hooks_s,
        has_settled=has_settled,
        resident_bound_bytes=residency.limit_bytes or 0,
        rematerialize_s=rematerialize_s,
        recipes_differing_count=recipes_differing_count,
        **asdict(blocks),
        process_bytes=known_bytes("VmRSS"),
        process_bytes_peak=known_bytes("VmHWM"),
        has_small_pages=has_small_pages(),
        reason=None if reason is None else reason.text,
        is_surprising=reason is not None and reason.is_warning,
    )
