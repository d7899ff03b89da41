"""Memory as arithmetic: what an engine will occupy, known from file headers before it is loaded.

Counted against ``memory=``: the packed weights, the key-value pages, the tokenizer, the largest
workspace of a step, on a GPU what its graphs hold and its kernels ask for, and what a load holds
for a moment where that is more. Not counted: the Python interpreter with torch and the libraries a
first model imports (about 230 MiB).
``docs/memory.md`` has the sums beside what was measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdk.control_groups import group_memory
from sdk.errors import RequestError
from sdk.quant.shown import shown

if TYPE_CHECKING:
    from sdk.config import EngineConfig
    from sdk.kernels.scratch import Scratch

GIB = 2**30
#: Without a budget the KV cache takes this much, or one request of full length if that is more.
DEFAULT_KV_BYTES = GIB
#: Bytes a second of a disk nobody has measured: SATA's drives give half of it, NVMe's a multiple.
DISK_BANDWIDTH = 1e9
#: Of the read bandwidth, what decoding one stream of a small 4-bit model gets out of it.
DECODE_SHARE = 0.7
#: The engine, its threads and Python objects, and the ends of huge pages that weights do not fill:
#: 7 to 12 MiB were measured with 1 to 32 requests; and for each word of the vocabulary, whose list
#: passes through memory once.
ENGINE_BYTES = 9 * 2**20
ENGINE_WORD_BYTES = 36
#: What a tokenizer takes for each word: 17 MiB for 49,152 of them, 49 for 262,144.
TOKENIZER_WORD_BYTES = 160
TOKENIZER_BYTES = 8 * 2**20
#: Logits beside those that a step draws from take at most this much, see :func:`scored_rows`.
SCORED_BYTES = 8 * 2**20
_SCORED_ROWS = 128

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object, name: str = "size") -> int:
    """``"2GiB"``, ``"500 MB"`` or a number -> bytes. :raises RequestError: naming ``name``."""
    count: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found and found[2].upper() in _UNITS:
            count = float(found[1]) * _UNITS[found[2].upper()]
    if count is None or not 1 <= count < 2**63:
        raise RequestError(
            f"{name}: expected a size such as '2GiB' or '500MB', at least a byte, "
            f"found {shown(value)}"
        )
    return int(count)


def format_bytes(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def available_memory() -> int:
    """Bytes this process can still get: the kernel's estimate, or less where a container's limit
    leaves less; all of RAM where the system estimates nothing."""
    machine = _ram()
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
    group = group_memory()
    return machine if group is None else min(machine, group.available)


def installed_memory() -> int:
    """Bytes of RAM this machine has, or those that a container's limit allows of it."""
    group = group_memory()
    return _ram() if group is None else min(_ram(), group.limit)


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def release_free_memory() -> None:
    """Hand the C allocator's free pages back to the system.

    glibc keeps what was freed for the next allocation: 20 to 80 MiB after a load or a close of a
    100 MB model. Elsewhere this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the plan is made from. Sizes in bytes; ``page_bytes`` over all layers and ranks.

    ``weights`` as kernels hold them, ``loading`` what a load has in memory at its peak, ``read``
    what one token reads of the weights. ``weights`` are without those ``offloaded``; ``movable``
    can be, ``window`` is what of them is in memory at a time, ``packing`` while they are packed,
    ``early`` what a load has in memory before it comes to them, ``layers`` the bytes of each where
    they go as a whole (of a GPU). ``experts_per_token`` and ``expert_width`` are those of a mixture
    of experts; ``captured_tokens`` those of the largest step that a GPU records, or 0;
    ``activation_bytes``: of a number that one kernel hands to the next; ``scratch``: what a GPU's
    kernels ask for in a step.
    """

    weights: int
    page_bytes: int
    page_size: int
    kv_dtype: str
    model_context: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    experts_per_token: int = 0
    expert_width: int = 0
    activation_bytes: int = 4
    loading: int = 0
    read: int = 0
    has_tokenizer: bool = True
    offloaded: int = 0
    layers_away: int = 0
    movable: int = 0
    window: int = 0
    packing: int = 0
    early: int = 0
    layers: tuple[int, ...] = ()
    captured_tokens: int = 0
    scratch: Scratch | None = None

    @property
    def tokenizer(self) -> int:
        if not self.has_tokenizer:
            return 0
        return TOKENIZER_BYTES + TOKENIZER_WORD_BYTES * self.vocab_size


@dataclass(frozen=True, slots=True)
class KernelShare:
    """Matrices of one format: how many, their bytes, the kernel that multiplies with them."""

    format: str
    kernel: str
    matrices: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the model that fits.

    ``options`` are the changed keywords of :class:`sdk.LLM`, ``plan`` what comes of them (ready for
    ``LLM(plan=...)``). ``loss`` is the KL divergence in nats that they are expected to cost beside
    what was asked for: the mean of the models in ``quant/expected_loss.json``. ``keeps_limits``: as
    many requests, as long and as large steps as asked.
    """

    options: Mapping[str, Any]
    plan: MemoryPlan
    loss: float
    keeps_limits: bool

    @property
    def is_eager(self) -> bool:
        """Whether steps that would be recorded are not, for the memory their graphs hold."""
        return "enforce_eager" in self.options

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        text = (
            f"{given} needs {format_bytes(self.plan.total)}: "
            f"context {self.plan.max_model_len}, expected loss {self.loss:.4f} nats"
        )
        if self.is_eager:
            text += ", slower: no steps are recorded"
        if not self.plan.offloaded:
            return text
        speed = self.plan.tokens_per_second(math.inf)
        return (
            f"{text}, slow: {format_bytes(self.plan.offloaded)} are read for every token, "
            f"about {speed:.2g} tokens/s where a disk gives {DISK_BANDWIDTH / 1e9:g} GB/s"
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine occupies at most, in bytes. ``str()`` gives the sums as a table.

    ``problem`` says why it does not fit, empty where it does; ``alternatives`` would fit, best
    first. ``LLM(plan=plan)`` loads just this.
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
    loading: int = 0
    read: int = 0
    offloaded: int = 0
    layers_away: int = 0
    graphs: int = 0
    scratch: int = 0
    problem: str = ""
    config: EngineConfig | None = field(default=None, repr=False)
    kernels: tuple[KernelShare, ...] = field(default=(), compare=False)
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def kv_cache(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def swap_pages(self) -> int:
        """Pages of ``page_bytes`` that the swap space has room for; no part of ``total``."""
        space = 0 if self.config is None else self.config.swap_space
        assert not isinstance(space, str)  # EngineConfig has parsed it
        return space // self.page_bytes

    @property
    def fixed(self) -> int:
        """What serving takes however many pages there are, but for the tokenizer."""
        return self.weights + self.workspace + self.graphs + self.scratch

    @property
    def serving(self) -> int:
        """The most there is once the model is loaded."""
        return self.fixed + self.kv_cache + self.tokenizer

    @property
    def total(self) -> int:
        """The most there is at any time: serving, or for a moment of the load."""
        return max(self.serving, self.loading + self.tokenizer)

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds, all requests together."""
        return self.num_pages * self.page_size

    @property
    def full_requests(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once."""
        pages_per_request = -(-self.max_model_len // self.page_size)
        return min(self.num_pages / pages_per_request, self.max_num_seqs)

    def tokens_per_second(
        self, bandwidth: float, context: int = 0, disk: float = DISK_BANDWIDTH
    ) -> float:
        """What one stream is expected to decode behind ``context`` tokens.

        ``bandwidth`` in bytes per second: ``sdk.kernels.cpu.probe.read_bandwidth(threads)`` has
        that of a CPU in 0.1 s. A token reads the weights and the keys and values before it;
        ``docs/benchmarks.md`` has 55 to 78 % of what memory gives. Weights that are not in memory
        come at ``disk`` bytes per second, an estimate unless it is given; while the system still
        has them in its cache of files they are faster.
        """
        away = self.read * self.offloaded // max(self.weights + self.offloaded, 1)
        nbytes = self.read - away + context * self.page_bytes // self.page_size
        return 1 / (max(nbytes, 1) / (DECODE_SHARE * bandwidth) + away / disk)

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights, _kernel_names(self.kernels)),
            (
                "KV cache",
                self.kv_cache,
                f"{self.kv_tokens} tokens at {self.page_bytes // self.page_size} bytes "
                f"({self.kv_dtype}), pages of {self.page_size}",
            ),
            ("workspace", self.workspace, f"largest step, {self.max_num_seqs} requests"),
            ("tokenizer", self.tokenizer, ""),
            (
                "total",
                self.total,
                "no budget set" if self.budget is None else f"budget {format_bytes(self.budget)}",
            ),
        ]
        if self.offloaded:
            rows.insert(1, ("elsewhere", self.offloaded, "weights read again in every step: slow"))
        if self.graphs:
            rows.insert(-2, ("graphs", self.graphs, "activations and logits of recorded steps"))
        if self.scratch:
            rows.insert(-2, ("scratch", self.scratch, "of kernels: decoded weights, partial sums"))
        if self.loading + self.tokenizer == self.total:
            rows.insert(-1, ("loading", self.loading, "for a moment, more than serving takes"))
        lines = [
            f"{name:<10} {format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows
        ]
        if self.swap_pages:
            lines.append(self._swap_row())
        lines.append(
            f"context    {self.max_model_len:>10}  tokens a request, "
            f"{self.full_requests:.1f} such requests at once"
        )
        return "\n".join(lines)

    def _swap_row(self) -> str:
        count, types = self.swap_pages, self.kv_dtype.split(">")
        small = f", {count << len(types) - 1} of {types[-1]}" if len(types) > 1 else ""
        return (
            f"swap space {format_bytes(count * self.page_bytes):>10}  beside the total: "
            f"{count} pages of {types[0]}{small}"
        )


def _kernel_names(shares: tuple[KernelShare, ...]) -> str:
    """``q4_1, q6_k: cpu.linear``."""
    formats: dict[str, list[str]] = {}
    for share in shares:
        formats.setdefault(share.kernel, []).append(share.format)
    return "; ".join(f"{', '.join(names)}: {kernel}" for kernel, names in formats.items())


def scored_rows(vocab_size: int) -> int:
    """Rows of logits beside those that a step draws from: of a prompt or a benchmark being scored,
    or copies for logits processors."""
    return min(_SCORED_ROWS, max(SCORED_BYTES // (4 * vocab_size), 1))


def workspace_bytes(demand: Demand, seqs: int, tokens: int) -> int:
    """The largest step's scratch: activations of its tokens and the logits of its requests.

    A token has about six rows of hidden and three of intermediate size alive at once (residual,
    norm, q/k/v, attention, output; gate, up, product), and for each of its experts gate, up,
    product and output. The residual and what is added to it are float32 whatever the others are.
    Beside the logits stand those of the prompt's tokens that are scored, or copies for logits
    processors, some rows at a time.
    """
    expert = 3 * demand.expert_width + demand.hidden_size
    short = 4 * demand.hidden_size + 3 * demand.intermediate_size
    short += demand.experts_per_token * expert
    row = 2 * demand.hidden_size * 4 + short * demand.activation_bytes
    logits = min(seqs, tokens) * demand.vocab_size * 4
    engine = ENGINE_BYTES + ENGINE_WORD_BYTES * demand.vocab_size
    engine += demand.window if demand.offloaded else 0
    return engine + tokens * row + logits + SCORED_BYTES


def scratch_bytes(demand: Demand, seqs: int, tokens: int, context: int) -> int:
    """What a GPU's kernels ask for in the largest step, and what graphs keep for those of the
    largest recorded one: they have a pool of their own."""
    if demand.scratch is None:
        return 0
    rows = min(max(seqs, scored_rows(demand.vocab_size)), tokens)
    asked = demand.scratch.nbytes(tokens, rows, context) + demand.scratch.kept(min(seqs, tokens))
    captured = min(demand.captured_tokens, tokens)
    if captured:
        asked += demand.scratch.nbytes(max(captured, min(seqs, tokens)), min(seqs, tokens), context)
    return asked


def graph_bytes(demand: Demand, seqs: int, tokens: int) -> int:
    """What the recorded steps of a GPU hold beside the workspace of those that are not.

    One pool has the activations of the largest, and logits; outside of it lie hidden states and
    logits of decode steps, and of the others hidden states and an attention's queries and result.
    """
    captured = min(demand.captured_tokens, tokens)
    if not captured:
        return 0
    rows = min(seqs, tokens)
    largest = workspace_bytes(demand, 0, max(captured, rows)) - workspace_bytes(demand, 0, 0)
    hidden, vocab = demand.hidden_size, demand.vocab_size
    attention = 2 * captured * hidden * demand.activation_bytes
    return largest + 4 * (rows * (hidden + 2 * vocab) + captured * hidden) + attention
