"""What an ``LLM`` is made of. Its requests run on one engine in this process
(:mod:`sdk.requests.served_engine`), on replicas in other ones (:mod:`sdk.cluster.replicas.served`),
or a script answers them (:mod:`sdk.testing.served_script`)."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sdk.api.config import EngineConfig
from sdk.engine.running_requests import RequestInfo
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.models.architecture import WITHOUT_HEAD
from sdk.models.vision.family import VISION, WHOLE
from sdk.requests.adapters import Adapters
from sdk.requests.beam_searches import BeamSearches
from sdk.requests.driving.job_driver import JobDriver
from sdk.requests.job_maker import JobMaker
from sdk.requests.progress import Advice
from sdk.requests.prompts.images import ImageReader
from sdk.requests.prompts.reader import Prompt, PromptReader

if TYPE_CHECKING:  # loaded with a model
    from sdk.engine.rank.runner import ModelRunner
    from sdk.engine.snapshot import Snapshot
    from sdk.loading.load import ModelFacts
    from sdk.loading.quant_report import QuantReport
    from sdk.loading.sampling_defaults import SamplingDefaults
    from sdk.memory.plan import MemoryPlan
    from sdk.models.configs.config import ModelConfig
    from sdk.requests.pooling.calls import PoolingRequests


class Prefixes(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    def snapshot(self, prompt: Prompt) -> Snapshot: ...
    def snapshot_of(self, request_id: str) -> Snapshot: ...
    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int: ...
    def pin(self, prompt: Prompt) -> int: ...
    def unpin(self, prompt: Prompt) -> bool: ...
    def forget(self) -> bool: ...


class Memory(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    @property
    def plan(self) -> MemoryPlan: ...
    def hold_vocabulary(self) -> None: ...
    def trim(self) -> None: ...
    def resize(self, memory: int | str) -> MemoryPlan: ...
    def sleep(self, level: int) -> None: ...
    def wake_up(self) -> None: ...


class Monitor(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    def metrics(self) -> dict[str, float]: ...
    def stats(self) -> EngineStats: ...
    def set_slo(self, slo: SLO | str | None) -> None: ...
    def list_requests(self) -> list[RequestInfo]: ...
    def trace(self, path: str | PathLike[str]) -> Trace: ...
    def close(self) -> None: ...


class Frontend(NamedTuple):
    """What turns calls into jobs, wherever these run. ``pooling`` makes what only calls need that
    generate nothing."""

    reader: PromptReader
    job_maker: JobMaker
    pooling: Callable[[], PoolingRequests]
    beam_searches: BeamSearches
    defaults: SamplingDefaults


def frontend_of(facts: ModelFacts, adapters: Adapters) -> Frontend:
    """The frontend for a model."""
    config, model, max_model_len = facts.config, facts.model_config, facts.plan.max_model_len
    reader = PromptReader(
        facts.tokenizer,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        chat_template=config.chat_template,
        hidden_size=model.hidden_size if config.enable_prompt_embeds else None,
        images=image_reader_of(facts),
    )
    jobs = JobMaker(
        reader,
        facts.defaults.params,
        vocab_size=model.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        max_model_len=max_model_len,
        results=facts.results,
        adapters=adapters,
        classifier=facts.classifier,
        encoder=None if model.causal else model.model_type,
        has_head=not facts.values.get(WITHOUT_HEAD),
        closed_schemas=config.disable_additional_properties,
    )

    def pooling() -> PoolingRequests:
        from sdk.requests.pooling.calls import PoolingRequests

        head, hidden = facts.embedding_head, model.output_size
        return PoolingRequests(jobs, reader, facts.classifier, head, Advice(), hidden)

    return Frontend(
        reader,
        jobs,
        pooling,
        BeamSearches(jobs, reader, facts.eos_token_ids, max_model_len, config.on_progress),
        facts.defaults,
    )


def image_reader_of(facts: ModelFacts) -> ImageReader | None:
    """What reads images for a model; ``None``: it has no encoder of them, no tokenizer, or prompts
    may have none.

    :raises UnsupportedError: the files ask for another way of preprocessing.
    """
    vision = facts.model_config.vision
    if facts.plan.images is None or vision is None or facts.tokenizer is None:
        return None
    from sdk.images.processors import image_processor  # with a model that reads images

    config = facts.headers.config
    whole = {**config.get(WHOLE, config), VISION: config[VISION]}
    processor = image_processor(whole, facts.headers.processor)
    return ImageReader.of(facts.config, processor, vision.token_id, dual=vision.dual)


class Served(Protocol):
    """The parts of an :class:`sdk.LLM` that depend on where its requests run."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def frontend(self) -> Frontend: ...
    @property
    def driver(self) -> JobDriver: ...
    @property
    def prefixes(self) -> Prefixes: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def monitoring(self) -> Monitor: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...

    def expert_load(self) -> dict[int, list[int]]:
        """See :meth:`sdk.LLM.expert_load`."""

    def rebalance_experts(self) -> int:
        """See :meth:`sdk.LLM.rebalance_experts`."""

    def model_runner(self) -> ModelRunner:
        """Rank 0's; a new one after a sleep that freed the weights.

        :raises RequestError: there is none in this process.
        """

    def explain(self) -> str:
        """See :meth:`sdk.LLM.explain`."""

    def quant_report(self) -> QuantReport:
        """See :meth:`sdk.LLM.quant_report`."""

    def fork(self, **options: Any) -> Served:
        """See :meth:`sdk.LLM.fork`."""
