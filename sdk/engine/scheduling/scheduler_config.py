"""The limits of one scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sdk.api.errors import RequestError
from sdk.api.scheduling_policy import POLICIES, PolicyName, SchedulingPolicy
from sdk.engine.pages.frames import WindowGroup as WindowGroup
from sdk.engine.pages.states import StateSlots as StateSlots
from sdk.engine.scheduling.tower_limits import TowerLimits
from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.tiers import KEPT_PAGES

#: With this many tokens, reading the weights once takes a tenth of a step on a CPU
#: (sdk/requests/driving/step_sizes.py).
SHORT_STEP = 64
#: On a GPU the weights take longer than this many tokens (H100, scheduler.py).
SHORT_STEP_GPU = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler. ``num_pages`` includes the reserved page 0; lengths are in tokens.

    :raises RequestError: two limits contradict each other.
    """

    num_pages: int
    page_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: PolicyName | SchedulingPolicy = "fcfs"
    #: Options of the built-in policies.
    tenant_weights: Mapping[str, float] | None = None
    priority_aging: float | None = None
    #: Tokens of prompts in a step while requests that overtake others come (prompt_steps.py).
    short_step_tokens: int = SHORT_STEP
    #: Which cached page is evicted first.
    prefix_eviction: Literal["lru", "cost"] = "lru"
    kv_type: str = "auto"
    #: Bits of each tier of the KV cache; without tiers, of its only type.
    kv_bits: tuple[int, ...] = (16,)
    #: Pages of a request that stay in the first tier: at its beginning, full ones at its end.
    kv_keep: tuple[int, int] = KEPT_PAGES
    #: Slots of the swap space, which extends the prefix cache and needs it. With window groups or
    #: states: how many of them a page takes, a frame of each group, and a state.
    num_swap_pages: int = 0
    swap_parts: tuple[int, ...] = (1,)
    #: Pages at the start, including page 0. ``None``: all of ``num_pages``.
    first_pages: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    #: Prompt tokens that may be scored (``prompt_logprobs``) in a step in which others decode.
    max_scored_tokens: int = 2**31
    #: Memory for the log-probabilities of all unfinished requests.
    max_result_bytes: int = 2**63
    #: Slots of low-rank adapters, and the bytes that all adapters together may take.
    adapter_slots: int = 0
    adapter_bytes: int = 0
    #: Window groups, in the order of ``AttentionBatch.windows``. Without any, and without states,
    #: a page contains all that there is of its tokens.
    windows: tuple[WindowGroup, ...] = ()
    states: StateSlots | None = None
    #: With window groups or states: the bytes of a page in the layers that keep all tokens.
    page_bytes: int = 0
    #: What pages, frames and slots may take together. ``None``: each kind as many as it has places.
    cache_bytes: int | None = None
    #: The tower of a model that sees images; ``None``: there is none.
    images: TowerLimits | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not isinstance(self.policy, SchedulingPolicy) and self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {list(POLICIES)}, got {self.policy!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request decodes in every step"
            )
        if self.num_swap_pages and not self.enable_prefix_caching:
            raise ValueError("num_swap_pages needs enable_prefix_caching=True")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise RequestError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}): a prompt runs in one step"
            )
        self._check_groups()
        whole = self.images is not None and not self.images.vision.dual
        if whole and not self.enable_chunked_prefill:
            raise ValueError("images need enable_chunked_prefill=True")

    @property
    def has_groups(self) -> bool:
        """Whether there is memory besides pages: frames of window groups, slots of states."""
        return bool(self.windows) or self.states is not None

    @property
    def first_limit(self) -> int | None:
        """Page ids that have memory at first, including page 0. ``None``: all of ``num_pages``."""
        if not self.has_groups or self.cache_bytes is None or not self.page_bytes:
            return self.first_pages
        return min(self.num_pages, self.cache_bytes // self.page_bytes + 1)

    def _check_groups(self) -> None:
        if not self.has_groups:
            return
        if len(self.kv_bits) > 1:
            raise ValueError("window groups and recurrent states do not work with tiers")
        expected = 1 + len(self.windows) + (self.states is not None)
        if self.num_swap_pages and (len(self.swap_parts) != expected or min(self.swap_parts) < 1):
            raise ValueError(
                f"swap_parts: expected {expected} positive numbers, got {self.swap_parts}"
            )
        if self.page_bytes < 0:  # 0: all layers have windows or states
            raise ValueError(f"page_bytes must not be negative, got {self.page_bytes}")
        for group in self.windows:
            if group.window < 1 or group.frame_bytes < 1 or group.num_frames < 2:
                raise ValueError(f"windows: every number must be positive, got {group}")
        states = self.states
        if states is not None and (
            min(states.slot_bytes, states.num_slots - 1) < 1
            or states.drafts < 0
            or (states.num_rounded and min(states.rounded_bytes, states.num_rounded - 1) < 1)
        ):
            raise ValueError(f"states: every number must be positive, got {states}")
