"""Memory as arithmetic: what an engine will occupy, known from file headers before it is loaded.

Counted against ``memory=``: the packed weights, the key-value pages, the tokenizer, the largest
workspace of a step, on a GPU what its graphs hold and its kernels ask for, and what a load holds
for a moment where that is more. Not counted: the Python interpreter with torch and the libraries a
first model imports (about 230 MiB).
``docs/memory.md`` has the sums beside what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdk.memory.sizes import GIB, format_bytes

if TYPE_CHECKING:
    from sdk.config import EngineConfig

#: Without a budget the KV cache takes this much, or one request of full length if that is more.
DEFAULT_KV_BYTES = GIB
#: Bytes a second of a disk nobody has measured: SATA's drives give half of it, NVMe's a multiple.
DISK_BANDWIDTH = 1e9
#: Of the read bandwidth, what decoding one stream of a small 4-bit model gets out of it.
DECODE_SHARE = 0.7


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
