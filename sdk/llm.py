"""``LLM``: the one class an application needs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sdk.api.display import Explanation, html_table, llm_facts
from sdk.api.errors import RequestError
from sdk.api.lora import LoRAInfo, LoRALike, LoRARequest
from sdk.api.near_misses import no_attribute
from sdk.api.options import EngineOptions, engine_config, takes_options
from sdk.api.outputs import Estimate
from sdk.api.params import SamplingParams
from sdk.engine.running_requests import RequestInfo
from sdk.kernels.system import SYSTEM
from sdk.loading.around import part_around
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.generation_methods import GenerationMethods
from sdk.requests.job_runner import JobRunner, Stepping
from sdk.requests.pooling.methods import AsyncPoolingMethods, PoolingMethods
from sdk.requests.prompts.kinds import Message
from sdk.requests.prompts.reader import Prompt, PromptLike, is_conversation
from sdk.tokenizer import LLMTokenizer

if TYPE_CHECKING:  # Self, Unpack: in typing from Python 3.11 on; the others come with a model
    from typing_extensions import Self, Unpack

    from sdk.engine.snapshot import Snapshot
    from sdk.loading.quant_report import QuantReport
    from sdk.memory.plan import MemoryPlan
    from sdk.models.configs.config import ModelConfig
    from sdk.requests.pooling.calls import PoolingRequests
    from sdk.requests.served import Served


class LLM(GenerationMethods, PoolingMethods, AsyncPoolingMethods):
    """A model loaded into this process, and the engine that serves it.

    ``model`` is a GGUF file, a folder with safetensors and ``config.json``, or a hub id. The
    options are those of :class:`sdk.api.options.EngineOptions`. The most important ones are
    ``memory="2GiB"`` (a hard budget for weights, KV cache and workspace), ``max_model_len``,
    ``num_threads`` and ``compute="exact"``.

    One object serves sync, async and streaming callers from any thread and any event loop. Use it
    as a context manager, or call :meth:`close`; otherwise the garbage collector closes it.
    ``LLM(plan=plan)`` loads what :meth:`plan` planned, or one of its alternatives.

    :raises CheckpointError: the file is missing, damaged or of an unsupported kind.
    :raises OutOfMemoryError: the budget cannot hold the model; nothing has been loaded.
    :raises RequestError: an option has a bad value. :raises TypeError: an option is unknown.
    """

    @takes_options
    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        plan: MemoryPlan | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        from sdk.loading.alternatives import planned_config

        self.config = config = planned_config(plan, model, **options)
        if config.data_parallel_size == 1:
            from sdk.loading.load import load
            from sdk.requests.served_engine import ServedEngine

            self._open(ServedEngine(load(config)))
        else:
            self._open(part_around("replicas")(config))

    @classmethod
    def _on(cls, served: Served) -> LLM:
        """An LLM whose parts exist."""
        llm = cls.__new__(cls)
        llm.config = served.config
        llm._open(served)
        return llm

    def _open(self, served: Served) -> None:
        self.load_warnings = served.warnings
        self._served = served
        self._driver, self._monitoring = served.driver, served.monitoring
        self._prefixes, self._memory = served.prefixes, served.memory
        self._runner = served.model_runner
        frontend = served.frontend
        self._reader, self._job_maker, self._defaults = (
            frontend.reader,
            frontend.job_maker,
            frontend.defaults,
        )
        self._beam_searches = frontend.beam_searches
        self._default_params = self._defaults.params
        self.max_model_len = self._reader.max_model_len
        self._stepping = Stepping(self._driver, self._job_maker)
        self._job_runner = JobRunner(
            self._driver,
            self._job_maker,
            self._reader,
            self.config.on_progress,
            self._monitoring.list_requests,
            read_ahead=2 * self.config.max_num_seqs * self.config.data_parallel_size,
        )
        self._job_maker.before_structures = self._memory.hold_vocabulary
        self._close = weakref.finalize(self, self._driver.close)

    @cached_property
    def _pooling(self) -> PoolingRequests:  # type: ignore[override]
        return self._served.frontend.pooling()

    @staticmethod
    @takes_options
    def plan(model: str | PathLike[str], **options: Unpack[EngineOptions]) -> MemoryPlan:
        """Plan the memory of ``LLM(model, **options)`` from the file's headers alone.

        A plan that does not fit has ``fits == False``, the memory breakdown in ``problem`` and
        options that fit in ``alternatives``.
        """
        from sdk.loading.alternatives import plan

        return plan(engine_config(model, **options))

    @takes_options
    def fork(self, **options: Unpack[EngineOptions]) -> LLM:
        """A second ``LLM`` with the weights of this one, which are in memory once.

        It has its own requests, KV cache, threads and options: those of this one, except for
        ``options``. It adds its KV cache and workspace to the memory of the process; ``memory``
        limits these (default: a KV cache of as many bytes). No file is read. Each of the two can be
        closed first; the weights are freed with the last one. On a CPU only.

        :raises RequestError: an option needs other weights, or this engine cannot share its own:
            several ranks or replicas, ``disk_offload``, a memory pool, a GPU, transformers' code.
        :raises OutOfMemoryError: the budget or the machine has no room for it.
        """
        return LLM._on(self._served.fork(**options))

    def quantize(self, out: str | PathLike[str], scheme: str | None = None, **options: Any) -> Path:
        """Quantize this model's checkpoint into ``out``: see :func:`sdk.quantize`."""
        from sdk.loaders.hub.hub import HubAccess
        from sdk.loaders.open import locate
        from sdk.quantizing import quantize  # imports the writers

        config = self.config
        hub = HubAccess(config.revision, config.local_files_only, config.download_dir)
        model = locate(config.model, config.filename, hub)
        return quantize(model, out, scheme, **options)

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

        def __call__(self, *args: Any, **given: Any) -> NoReturn:
            raise TypeError(
                "an LLM is not called like a function: use generate(prompts), chat(messages) or "
                "stream(prompt)"
            )

    def __repr__(self) -> str:
        if "_driver" not in vars(self):  # not loaded yet
            return object.__repr__(self)
        shown = [text for name, text in llm_facts(self) if name != "warning"]
        return f"LLM({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return html_table([*llm_facts(self), ("more", "print(llm.explain()), llm.memory_plan")])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled: it has threads and memory of this process; pass the model's "
            "path and options, and make an LLM there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and give back memory, threads and processes. Idempotent."""
        try:
            self._driver.close()  # not self._close, which would not run again after an interrupt
        finally:
            self._close.detach()
            self._monitoring.close()
            self._reader.close()
            self._job_maker.close()
            SYSTEM.trim_heap()

    # ---- scheduling ------------------------------------------------------------------------------

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """Give a tenant another weight, from now on; ``None``: requests without a tenant.

        A tenant of weight 4 gets four times the tokens of one of weight 1, the default, while both
        have requests. See ``docs/scheduling.md``.

        :raises RequestError: ``scheduling_policy`` is not ``"fair"``, or a bad value.
        """
        self._driver.set_tenant_weight(tenant, weight)

    def estimate(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> Estimate:
        """Seconds until the first token and the end of a request, if it came now. Nothing runs.

        Looks ahead from the running and waiting requests, cached prefixes, measured times of steps
        and the lengths of the last answers. ``docs/scheduling.md`` says how good it is. A shortage
        of pages and requests that come later are not foreseen. Without ``ignore_eos`` the end is a
        guess, because nobody knows how long an answer becomes.

        :raises RequestError: a prompt or a parameter is invalid.
        """
        params = sampling_params or self._default_params
        read = self._reader.read_one("estimate", prompt, params, template)
        return self._driver.estimate(read, params, priority)

    # ---- saved prefixes --------------------------------------------------------------------------

    def snapshot(
        self,
        prompt: PromptLike | Sequence[Message] | None = None,
        *,
        request_id: str | None = None,
        **template: Any,
    ) -> Snapshot:
        """Copy the keys and values of a prompt, a conversation or an unfinished request.

        Parts of the prompt that are not cached are computed. Only whole pages are copied: up to
        ``block_size - 1`` tokens at the end are left out.

        :raises RequestError: neither or both arguments are given, the prompt is shorter than a
            page, or the request is unknown.
        :raises OutOfMemoryError: the KV cache cannot hold the prompt next to the running requests.
        """
        if (prompt is None) == (request_id is None):
            raise RequestError("snapshot: expected either a prompt or a request_id")
        if request_id is not None:
            return self._prefixes.snapshot_of(request_id)
        return self._prefixes.snapshot(self._read_one("snapshot", prompt, template))

    def restore(
        self,
        snapshot: Snapshot | str | PathLike[str],
        *,
        cache_salt: str | None = None,
        pin: bool = False,
    ) -> int:
        """Put a snapshot, or a saved one, into the prefix cache between two steps.

        Returns how many tokens of its prompt are in the cache now. Without ``pin`` only free pages
        are used, and they are evicted when requests need them.

        :raises SnapshotError: it is damaged, or belongs to another model.
        :raises OutOfMemoryError: it cannot be pinned because it does not fit; with a breakdown.
        """
        return self._prefixes.restore(snapshot, cache_salt, pin=pin)

    def pin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> int:
        """Keep the whole pages of a prompt in the cache until :meth:`unpin`, computed if needed.

        Returns how many tokens they hold. Requests cannot use these pages for anything else.

        :raises OutOfMemoryError: too few pages would be left; with a breakdown.
        """
        return self._prefixes.pin(self._read_one("pin", prompt, template, lora_request))

    def unpin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> bool:
        """Remove the pin of exactly this prompt, or of a snapshot's tokens. ``False``: no pin."""
        return self._prefixes.unpin(self._read_one("unpin", prompt, template, lora_request))

    def _read_one(
        self, method: str, prompt: Any, template: Mapping[str, Any], lora: LoRALike | None = None
    ) -> Prompt:
        """Read one prompt or conversation; the latter without the opening of an answer."""
        if method != "unpin":  # which computes nothing
            self._job_runner.advice.blocking(method)
        if is_conversation(prompt):
            template = {"add_generation_prompt": False, **template}
        read = self._reader.read_one(method, prompt, self._default_params, template)
        return self._job_maker.adapted([read], lora)[0]

    # ---- adapters --------------------------------------------------------------------------------

    def add_lora(
        self,
        lora: LoRARequest | str,
        path: str | PathLike[str] | None = None,
        *,
        pin: bool = False,
    ) -> LoRARequest:
        """Load an adapter: ``add_lora("sql", "path/to/adapter")``, or with a ``LoRARequest``.

        Then ``lora_request="sql"`` selects it. It needs ``enable_lora=True``. If running requests
        use all slots (``max_loras``), a request loads it later. ``pin``: see :meth:`pin_lora`.

        :raises CheckpointError: the files are missing, damaged, or for another model.
        :raises UnsupportedError: the adapter is of a kind that is not supported.
        :raises RequestError: the name is taken, or a limit is exceeded.
        """
        return self._job_maker.adapters.add(lora, path, pin=pin)

    def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """Forget an adapter, by its name or number. Requests that use it finish first.

        Returns ``False`` if there is none.
        """
        return self._job_maker.adapters.remove(lora)

    def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """Load an adapter and keep it in memory until :meth:`remove_lora`.

        :raises RequestError: it was not added, or requests use all slots now.
        """
        return self._job_maker.adapters.pin(lora)

    def list_loras(self) -> list[LoRAInfo]:
        """All adapters that were added, or came with a request."""
        return self._job_maker.adapters.list()

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def model_config(self) -> ModelConfig:
        """The model's config as the engine reads it."""
        return self._served.model_config

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory this LLM may use."""
        return self._memory.plan

    def trim(self) -> None:
        """Forget cached prefixes and give back the memory of all unused KV pages."""
        self._memory.trim()

    def resize(self, memory: int | str) -> MemoryPlan:
        """Change the budget while requests run: fewer or more KV pages, up to four times as many.

        Requests that lose their pages start over when there is room, with the same answers.
        After an error nothing has changed.

        :raises OutOfMemoryError: not even one page fits, or the machine has too little memory.
        :raises RequestError: an unfinished request or the pinned prefixes need more.
        """
        return self._memory.resize(memory)

    def sleep(self, level: int = 1) -> None:
        """Give memory back for a while: level 1 the KV cache, level 2 the weights too.

        Requests are rejected until :meth:`wake_up`.

        :raises RequestError: requests are unfinished, or ``level`` is neither 1 nor 2.
        """
        self._memory.sleep(level)

    def wake_up(self) -> None:
        """Accept requests again; no effect unless it sleeps.

        After ``sleep(2)`` this reads the weights from the model's files again.

        :raises CheckpointError: the files have changed since it was loaded; it stays asleep.
        :raises OutOfMemoryError: its memory pool has too little free memory now.
        """
        self._memory.wake_up()

    # ---- information -----------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """What runs where and why: memory, each layer's kernel, and why faster ones reject it.

        A string; a notebook shows a table.
        """
        self._driver.check_usable()
        return Explanation(self._served.explain())

    def quant_report(self) -> QuantReport:
        """Format, bits, bytes and kernel of every linear layer, and why faster ones reject it."""
        self._driver.check_usable()
        return self._served.quant_report()

    def get_metrics(self) -> dict[str, float]:
        """Numbers of the engine since it started, flat: see docs/metrics.md for every name."""
        return self._monitoring.metrics()

    def stats(self) -> EngineStats:
        """Histograms and counts: of all requests, by tenant and by adapter, and of the steps.

        The difference of two snapshots' histograms has the values in between.
        """
        return self._monitoring.stats()

    def set_slo(self, slo: SLO | str | None) -> None:
        """Count answers that keep a service level objective, from now on (see :class:`sdk.SLO`).

        ``slo``: also as a text, ``"ttft=0.5,tpot=0.05"``, in seconds. ``None``: none.

        :raises RequestError: it is something else.
        """
        self._monitoring.set_slo(slo)

    def expert_load(self) -> dict[int, list[int]]:
        """The rows that were routed to each expert, by layer, since the engine was loaded or since
        the last :meth:`rebalance_experts`. A token counts once for each of its experts.

        :raises RequestError: the engine does not spread its experts (``enable_expert_parallel``).
        """
        return self._served.expert_load()

    def rebalance_experts(self) -> int:
        """Spread experts over the ranks by their load (:meth:`expert_load`), and give the copies of
        ``num_redundant_experts`` to the busiest ones. Returns how many experts moved.

        Runs between two steps, which wait: ranks load what they get from the model's files. While a
        layer moves, its new experts are in memory in addition to the old ones; the plan counts
        them. Answers stay the same, also of unfinished requests. Afterwards counting begins again.
        ``sleep(2)`` forgets the placement.

        :raises CheckpointError: the files have changed or cannot be read; all experts stay usable.
        :raises RequestError: the engine does not spread its experts (``enable_expert_parallel``).
        """
        return self._served.rebalance_experts()

    def list_requests(self) -> list[RequestInfo]:
        """The unfinished requests, oldest first, one entry for each of a request's answers.

        A consistent view between two steps that does not wait for a step in progress.
        """
        return self._monitoring.list_requests()

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record steps and requests until ``stop()`` or ``close()``, for https://ui.perfetto.dev.

        ``with llm.trace("trace.json"): ...`` also ends it. The file is written then, in Chrome's
        trace event format, compressed if its name ends in ``.gz``. The last 100,000 steps and
        10,000 answers are kept.

        :raises RequestError: the file cannot be written, or a trace is recorded already.
        """
        return self._monitoring.trace(path)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached and pinned prefixes. Always succeeds, so always ``True``."""
        self._driver.check_usable()
        return self._prefixes.forget()

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' calls. :raises RequestError: it has none."""
        self._driver.check_usable()
        if self._reader.tokenizer is None:
            raise RequestError(
                "this LLM has no tokenizer: load it with tokenizer=FOLDER, and without "
                "skip_tokenizer_init"
            )
        return LLMTokenizer(self._reader.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without ``sampling_params``; ``explain()`` names the source."""
        return self._default_params
