"""Memory as arithmetic: what an engine will occupy, known from file headers before it is loaded.

Counted against ``memory=``: the packed weights, the key-value pages and the largest workspace of a
step. Not counted: the Python interpreter with torch (about 220 MiB before any model) and the
tokenizer (about 20 MiB for 50,000 tokens, 40 MiB for 262,144).
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass

from sdk.errors import OutOfMemoryError, RequestError

GIB = 2**30
#: Without a budget the KV cache takes this much, or one request of full length if that is more.
DEFAULT_KV_BYTES = GIB
#: Python objects of the engine and its requests; 3.1 MiB were measured with 64 requests.
ENGINE_BYTES = 4 * 2**20
#: Kernels may reorder a weight into a little more than its file: 3.6 % for q3_k, whose 6-bit scales
#: become bytes; SmolLM2 Q4_1 gains nothing, Gemma Q4_K_M 0.15 %.
PACKING = 1.04

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
        raise RequestError(f"{name}: expected a size such as '2GiB' or '500MB', found {value!r}")
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
    """Bytes the machine can still give, as the kernel estimates; all of RAM where it does not."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
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

    ``experts_per_token`` and ``expert_width`` are those of a mixture of experts.
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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine occupies at most, in bytes. ``str()`` gives the sums as a table."""

    budget: int | None
    weights: int
    workspace: int
    page_bytes: int
    page_size: int
    num_pages: int
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int

    @property
    def kv_cache(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.kv_cache

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds, all requests together."""
        return self.num_pages * self.page_size

    @property
    def full_requests(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once."""
        pages_per_request = -(-self.max_model_len // self.page_size)
        return min(self.num_pages / pages_per_request, self.max_num_seqs)

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights, ""),
            (
                "KV cache",
                self.kv_cache,
                f"{self.kv_tokens} tokens at {self.page_bytes // self.page_size} bytes "
                f"({self.kv_dtype}), pages of {self.page_size}",
            ),
            ("workspace", self.workspace, f"largest step, {self.max_num_seqs} requests"),
            (
                "total",
                self.total,
                "no budget set" if self.budget is None else f"budget {format_bytes(self.budget)}",
            ),
        ]
        lines = [
            f"{name:<10} {format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows
        ]
        lines.append(
            f"context    {self.max_model_len:>10}  tokens a request, "
            f"{self.full_requests:.1f} such requests at once"
        )
        return "\n".join(lines)


def workspace_bytes(demand: Demand, seqs: int, tokens: int) -> int:
    """The largest step's scratch: activations of its tokens and the logits of its requests.

    A token has about six rows of hidden and three of intermediate size alive at once (residual,
    norm, q/k/v, attention, output; gate, up, product), in float32, and for each of its experts
    gate, up, product and output; the sampler holds the logits twice (itself and log-probabilities).
    """
    expert = 3 * demand.expert_width + demand.hidden_size
    row = 6 * demand.hidden_size + 3 * demand.intermediate_size + demand.experts_per_token * expert
    activations = tokens * row * 4
    return ENGINE_BYTES + activations + min(seqs, tokens) * demand.vocab_size * 4 * 2


def plan_memory(
    demand: Demand,
    *,
    budget: int | None,
    kv_budget: int | None,
    max_model_len: int | None,
    available: int,
) -> MemoryPlan:
    """Turn a demand and the user's limits into pages and a context length.

    ``budget`` bounds weights, workspace and KV together, ``kv_budget`` the KV alone. Without
    ``max_model_len`` the context is the model's own, or what the KV can hold if that is less.

    :raises OutOfMemoryError: with the sums, and three changes that would help.
    :raises RequestError: ``max_model_len`` exceeds the model's context.
    """
    if max_model_len is not None and max_model_len > demand.model_context:
        raise RequestError(
            f"max_model_len: the model's context is {demand.model_context} tokens, "
            f"found {max_model_len}"
        )
    weights = int(demand.weights * PACKING)
    workspace = workspace_bytes(demand, demand.max_num_seqs, demand.max_num_batched_tokens)
    limit = available if budget is None else budget
    room = limit - weights - workspace
    want_context = max_model_len or demand.model_context
    pages_per_request = -(-want_context // demand.page_size)
    cap = pages_per_request * demand.max_num_seqs
    if kv_budget is not None:
        pages = min(kv_budget // demand.page_bytes, cap)
    elif budget is not None:
        pages = min(max(room, 0) // demand.page_bytes, cap)
    else:
        default = max(DEFAULT_KV_BYTES // demand.page_bytes, pages_per_request)
        pages = min(default, cap, max(room, 0) // 2 // demand.page_bytes)
    context = want_context
    if max_model_len is None:
        context = min(context, pages * demand.page_size)
    plan = MemoryPlan(
        budget=budget,
        weights=weights,
        workspace=workspace,
        page_bytes=demand.page_bytes,
        page_size=demand.page_size,
        num_pages=pages,
        kv_dtype=demand.kv_dtype,
        max_model_len=max(context, 1),
        max_num_seqs=demand.max_num_seqs,
    )
    if pages * demand.page_size < max(context, 1) or plan.total > limit:
        raise OutOfMemoryError(_too_small(plan, demand, limit, want_context, kv_budget))
    return plan


def _too_small(
    plan: MemoryPlan, demand: Demand, limit: int, context: int, kv_budget: int | None
) -> str:
    """The sums, and the three changes that free most."""
    needed_kv = -(-context // demand.page_size) * demand.page_bytes
    name = "available memory" if plan.budget is None else "budget"
    lines = [
        "the model does not fit:",
        f"  weights    {format_bytes(plan.weights):>10}",
        f"  workspace  {format_bytes(plan.workspace):>10}",
        f"  KV cache   {format_bytes(needed_kv):>10}  one request of {context} tokens",
        f"  {name}     {format_bytes(limit)}",
    ]
    if kv_budget is not None:
        lines.append(f"  kv_cache_memory_bytes {format_bytes(kv_budget)}")
    short = max(context // 4, 1)
    short_kv = -(-short // demand.page_size) * demand.page_bytes
    few = workspace_bytes(demand, 4, 64)
    least = plan.weights + few + short_kv
    enough = f"memory={format_bytes(least)!r}"
    if kv_budget is not None:
        enough = f"kv_cache_memory_bytes={format_bytes(needed_kv)!r}"
    lines += [
        "what would help:",
        f"  max_model_len={short} needs {format_bytes(short_kv)} of KV cache for a request",
        f"  max_num_seqs=4, max_num_batched_tokens=64 needs {format_bytes(few)} of workspace",
        f"  {enough}, or a smaller or more quantized model",
    ]
    return "\n".join(lines)
