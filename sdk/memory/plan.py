"""Memory plans: what an engine will occupy, calculated from file headers before it is loaded.

Counted against ``memory=``: the packed weights, the KV pages, the tokenizer, the workspace of the
largest step, on a GPU its graphs and its kernels' scratch, and the peak of a load if that is more.
Not counted: the Python interpreter with torch and the libraries that a first model imports (about
230 MiB). ``docs/memory.md`` compares plans with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from sdk.api.sizes import GIB, format_bytes
from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup
from sdk.kernels.dataclass import dataclass
from sdk.quant.caches import pages_in_window

if TYPE_CHECKING:
    from sdk.api.config import EngineConfig
    from sdk.memory.expert_memory import ExpertShare
    from sdk.memory.image_memory import ImageMemory

#: Without a budget the KV cache takes this much, or one request of full length if that is more.
DEFAULT_KV_BYTES = GIB
#: Assumed bytes per second of a disk: SATA drives reach half of it, NVMe drives a multiple.
DISK_BANDWIDTH = 1e9
#: The share of the read bandwidth that decoding one stream of a small 4-bit model reaches.
DECODE_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class KernelShare:
    """The matrices of one format: their number, their bytes, and the kernel that runs them."""

    format: str
    kernel: str
    matrices: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the model that fits.

    ``options`` are the changed keywords of :class:`sdk.LLM`, ``plan`` is the plan with them (ready
    for ``LLM(plan=...)``). ``loss`` is the expected KL divergence in nats compared with what was
    asked for: the mean of the models in ``quant/expected_loss.json``. ``keeps_limits``: the number
    of requests, their length and the size of steps are as asked for.
    """

    options: Mapping[str, Any]
    plan: MemoryPlan
    loss: float
    keeps_limits: bool

    @property
    def is_eager(self) -> bool:
        """Whether it saves the memory of graphs by not recording steps."""
        return "enforce_eager" in self.options

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        text = (
            f"{given} needs {format_bytes(self.plan.total)}: "
            f"context {self.plan.max_model_len}, expected loss {self.loss:.4f} nats"
        )
        if self.is_eager:
            text += ", slower: steps are not recorded"
        if (experts := self.plan.experts) is not None:
            return (
                f"{text}, slower: {experts.resident / experts.total:.0%} of the experts stay in "
                f"memory, about {format_bytes(experts.usual)} are read for a token, {experts.basis}"
            )
        if not self.plan.offloaded:
            return text
        speed = self.plan.tokens_per_second(math.inf)
        return (
            f"{text}, slow: {format_bytes(self.plan.offloaded)} are read for every token, "
            f"about {speed:.2g} tokens/s with a disk of {DISK_BANDWIDTH / 1e9:g} GB/s"
        )


#: The smallest place of a cache with frames or states is this many slots of the swap space, and the
#: largest at most that many.
_SLOTS_OF_SMALLEST, _SLOTS_OF_LARGEST = 4, 256


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The most bytes that an engine occupies. ``str()`` gives the breakdown as a table.

    With ``replicas`` the parts are those of one, and ``total`` is that of all; those with one rank
    each share the weights. ``problem`` says why the plan does not fit and is empty if it does.
    ``recorded_tokens``: of the largest step that a GPU records, whose memory is ``graphs``.
    ``alternatives`` would fit, best first. ``LLM(plan=plan)`` loads exactly this plan.

    ``page_bytes``: of the layers that keep all tokens. ``windows``: the memory of layers that keep
    those in their window, with one frame for padding, if it is separate; ``states``: that of
    recurrent states. On a CPU these are shares at the start: memory moves between them as requests
    need it. ``row_drafts``: the most draft tokens of one request. ``experts``: if only some stay in
    memory, which are part of ``weights``. ``hand_over``: the part of ``workspace`` that hand-overs
    between replicas take.
    """

    budget: int | None
    weights: int
    workspace: int
    page_bytes: int
    page_size: int
    num_pages: int
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    tokenizer: int = 0
    structures: int = 0
    loading: int = 0
    read: int = 0
    offloaded: int = 0
    layers_away: int = 0
    graphs: int = 0
    recorded_tokens: int = 0
    scratch: int = 0
    draft_tokens: int = 0
    drafting_weights: int = 0
    adapters: int = 0
    images: ImageMemory | None = None
    windows: tuple[WindowGroup, ...] = ()
    states: StateSlots | None = None
    row_drafts: int = 0
    experts: ExpertShare | None = None
    hand_over: int = 0
    replicas: int = 1
    problem: str = ""
    config: EngineConfig | None = field(default=None, repr=False)
    kernels: tuple[KernelShare, ...] = field(default=(), compare=False)
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def kv_cache(self) -> int:
        """Pages, frames of window groups and slots of states together."""
        slots = 0 if self.states is None else self.states.nbytes
        return self.num_pages * self.page_bytes + sum(map(_frames_bytes, self.windows)) + slots

    @property
    def swap_pages(self) -> int:
        """Slots of ``swap_slot_bytes`` that fit the swap space; they are not part of ``total``."""
        space = 0 if self.config is None else self.config.swap_space
        assert not isinstance(space, str)  # EngineConfig has parsed it
        return space // self.swap_slot_bytes if self.swap_slot_bytes else 0

    @property
    def _place_bytes(self) -> list[int]:
        """Bytes of a page, of a frame of each window group, and of a state."""
        states = [] if (one := self.states) is None else [one.rounded_bytes or one.slot_bytes]
        return [self.page_bytes, *(group.frame_bytes for group in self.windows), *states]

    @property
    def swap_slot_bytes(self) -> int:
        """Bytes of a slot of the swap space: a page; with frames or states a part of one, so that
        rounding up takes at most a quarter of the smallest place."""
        sizes = [size for size in self._place_bytes if size]
        if len(self._place_bytes) == 1 or not sizes:
            return self.page_bytes
        return max(-(-min(sizes) // _SLOTS_OF_SMALLEST), -(-max(sizes) // _SLOTS_OF_LARGEST))

    @property
    def swap_parts(self) -> tuple[int, ...]:
        """How many slots of the swap space a page takes, a frame of each window group, a state."""
        unit = max(self.swap_slot_bytes, 1)
        return tuple(max(-(-size // unit), 1) for size in self._place_bytes)

    @property
    def fixed(self) -> int:
        """What serving takes whatever the number of pages, without the tokenizer."""
        images = 0 if self.images is None else self.images.total
        return self.weights + self.workspace + self.graphs + self.scratch + self.adapters + images

    @property
    def serving(self) -> int:
        """The peak memory once the model is loaded."""
        return self.fixed + self.kv_cache + self.tokenizer + self.structures

    @property
    def total(self) -> int:
        """The peak memory at any time: while serving, or briefly while loading."""
        one = max(self.serving, self.loading + self.tokenizer)
        return one + (self.replicas - 1) * (self.serving - self.shared)

    @property
    def shared(self) -> int:
        """The part of ``serving`` that all replicas have together: the weights, unless each replica
        has several ranks, which read them themselves."""
        if self.config is not None and self.config.num_ranks > 1:
            return 0
        return self.weights - self.drafting_weights

    @property
    def _shared_note(self) -> str:
        if self.config is None or not self.config.weight_cache or self.offloaded or self.experts:
            return ""
        return "; mapped, and shared with other processes, once the cache has them"

    @property
    def kv_tokens(self) -> int:
        """Tokens whose pages the KV cache holds, for all requests together. Layers with a window
        keep those of each request's window."""
        return self.num_pages * self.page_size

    @property
    def full_requests(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once."""
        pages = -(-self.max_model_len // self.page_size)
        found = [self.num_pages / pages, self.max_num_seqs]
        for group in self.windows:
            frames = pages_in_window(group.window, 2 + self.row_drafts, self.page_size)
            found.append((group.num_frames - 1) / min(frames, pages))
        if self.states is not None:
            found.append((self.states.num_slots - 1) / (1 + self.row_drafts))
        return min(found)

    @property
    def largest_adapters(self) -> str:
        """What the room for adapters is for."""
        slots = 0 if self.config is None else self.config.adapter_slots
        return f"at most {slots} at a time, and one being loaded"

    @property
    def largest_step(self) -> str:
        drafts = f" and {self.draft_tokens} draft tokens" if self.draft_tokens else ""
        return f"largest step, {self.max_num_seqs} requests{drafts}"

    def tokens_per_second(
        self, bandwidth: float, context: int = 0, disk: float = DISK_BANDWIDTH
    ) -> float:
        """The expected decoding speed of one stream after ``context`` tokens.

        ``bandwidth`` is in bytes per second: ``sdk.kernels.cpu.probe.read_bandwidth(threads)``
        measures it for a CPU in 0.1 s. A token reads the weights and the keys and values before it;
        in ``docs/bench/benchmarks.md`` that reaches 55 to 78 % of the bandwidth. Offloaded weights
        are read at ``disk`` bytes per second, an estimate unless given. They are faster while the
        system still has them in its page cache. Experts that are not in memory are read while
        others are multiplied, but a layer waits for its own: the time is between the longer of both
        and their sum. How many bytes they are is an estimate, whose assumption ``experts.basis``
        names.
        """
        on_disk = self.read * self.offloaded // max(self.weights + self.offloaded, 1)
        nbytes = self.read - on_disk + context * self.page_bytes // self.page_size
        for group in self.windows:
            nbytes += min(context, group.window) * group.frame_bytes // self.page_size
        if self.states is not None:
            nbytes += 2 * self.states.slot_bytes  # read and written
        computing = max(nbytes, 1) / (DECODE_SHARE * bandwidth)
        if self.experts is not None:
            return 1 / math.hypot(computing, self.experts.usual / disk)
        return 1 / (computing + on_disk / disk)

    def __str__(self) -> str:
        lines = [
            f"{name:<10} {format_bytes(size):>10}  {note}".rstrip()
            for name, size, note in self._rows()
        ]
        if self.swap_pages:
            lines.append(self._swap_row())
        lines.append(
            f"context    {self.max_model_len:>10}  tokens a request, "
            f"{self.full_requests:.1f} such requests at once"
        )
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self) if self.fits else f"{self}\n{self.problem}")

    def _repr_html_(self) -> str:
        from sdk.api.display import html_table

        rows = [(name, format_bytes(size), note) for name, size, note in self._rows()]
        if self.swap_pages:
            rows.append(("swap space", *self._swap_space()))
        at_once = f"{self.full_requests:.1f} such requests at once"
        rows.append(("context", f"{self.max_model_len}", f"tokens a request, {at_once}"))
        if not self.fits:
            rows.append(("does not fit", "", self.problem))
        rows += [("instead", "", str(one)) for one in self.alternatives]
        return html_table(rows)

    def _rows(self) -> list[tuple[str, int, str]]:
        """The parts and the total, each with a note."""
        rows = [
            ("weights", self.weights, _kernel_names(self.kernels) + self._shared_note),
            (
                "KV cache",
                self.kv_cache,
                f"{self.kv_tokens} tokens at {self.page_bytes // self.page_size} bytes "
                f"({self.kv_dtype}), pages of {self.page_size}",
            ),
            ("workspace", self.workspace, self.largest_step),
            ("tokenizer", self.tokenizer, ""),
            (
                "total",
                self.total,
                "no budget set" if self.budget is None else f"budget {format_bytes(self.budget)}",
            ),
        ]
        rows[2:2] = self._rows_of_groups()
        if self.offloaded:
            rows.insert(1, ("offloaded", self.offloaded, "weights read again in every step: slow"))
        if self.experts is not None:
            share = self.experts.resident / self.experts.total
            note = (
                f"of these are experts: {share:.0%} of all, the others are read from the cache of "
                f"weights, about {format_bytes(self.experts.usual)} for a token, "
                f"{self.experts.basis}"
            )
            rows.insert(1, ("", self.experts.resident, note))
        if self.drafting_weights:
            rows.insert(1, ("", self.drafting_weights, "of these are the weights that draft"))
        if self.graphs:
            rows.insert(-2, ("graphs", self.graphs, "activations and logits of recorded steps"))
        if self.scratch:
            rows.insert(
                -2, ("scratch", self.scratch, "of kernels: dequantized weights, partial sums")
            )
        if self.adapters:
            rows.insert(-1, ("adapters", self.adapters, self.largest_adapters))
        if self.images is not None:
            rows.insert(-1, ("images", self.images.total, _images_note(self.images)))
        if self.structures:
            rows.insert(-1, ("structures", self.structures, "the vocabulary of structured output"))
        if self.replicas > 1:
            more = (self.replicas - 1) * (self.serving - self.shared)
            note = ", which share the weights" if self.shared else ""
            rows.insert(-1, ("replicas", more, f"{self.replicas - 1} more of the same{note}"))
        if self.loading > self.serving - self.tokenizer:
            rows.insert(-1, ("loading", self.loading, "briefly, more than serving takes"))
        return rows

    def _rows_of_groups(self) -> list[tuple[str, int, str]]:
        """The parts of the KV cache that layers have which do not keep all tokens."""
        rows = [
            (
                "",
                _frames_bytes(group),
                f"of these for layers with a window of {group.window}: "
                f"{(group.num_frames - 1) * self.page_size} tokens at "
                f"{group.frame_bytes // self.page_size} bytes",
            )
            for group in self.windows
        ]
        if self.states is not None:
            count, size = self.states.num_slots - 1, self.states.slot_bytes
            rows.append(("", count * size, f"of these {count} recurrent states, {size} bytes each"))
        if self.states is not None and self.states.num_rounded:
            count, size = self.states.num_rounded - 1, self.states.rounded_bytes
            note = f"of these {count} snapshots of states in 16 bits, {size} bytes each"
            rows.append(("", count * size, note))
        return rows

    def _swap_row(self) -> str:
        size, note = self._swap_space()
        return f"swap space {size:>10}  {note}"

    def _swap_space(self) -> tuple[str, str]:
        count, types = self.swap_pages, self.kv_dtype.split(">")
        small = f", {count << len(types) - 1} of {types[-1]}" if len(types) > 1 else ""
        what = f"{count} pages of {types[0]}{small}"
        if len(self._place_bytes) > 1:
            kinds = "frames" if self.states is None else "frames and states"
            kinds = kinds if self.windows else "states"
            what = f"for pages, {kinds}, {count} parts of {format_bytes(self.swap_slot_bytes)}"
        return format_bytes(count * self.swap_slot_bytes), f"not part of the total: {what}"


def _images_note(images: ImageMemory) -> str:
    tower, work = format_bytes(images.weights), format_bytes(images.workspace)
    return f"the tower {tower}, its workspace {work}, rows of {images.rows} tokens"


def _frames_bytes(group: WindowGroup) -> int:
    return (group.num_frames - 1) * group.frame_bytes


def _kernel_names(shares: tuple[KernelShare, ...]) -> str:
    """``q4_1, q6_k: cpu.linear``."""
    formats: dict[str, list[str]] = {}
    for share in shares:
        formats.setdefault(share.kernel, []).append(share.format)
    return "; ".join(f"{', '.join(names)}: {kernel}" for kernel, names in formats.items())
