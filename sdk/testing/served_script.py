"""The parts of a fake ``LLM``: an engine whose tokens come from a script, and no model."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError, UnsupportedError
from sdk.api.params import SamplingParams
from sdk.engine.engine import Engine
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.engine.scheduling.tower_limits import BLOCK_ROWS, TowerLimits
from sdk.loading.sampling_defaults import SamplingDefaults
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.family import vision_of
from sdk.requests.beam_searches import BeamSearches
from sdk.requests.driving.driver import Driver
from sdk.requests.driving.monitoring import Monitoring
from sdk.requests.pooling.calls import PoolingRequests
from sdk.requests.prompts.images import ImageReader
from sdk.requests.prompts.reader import Prompt
from sdk.requests.served import Frontend
from sdk.testing.fake_executor import ScriptedExecutor
from sdk.testing.fake_jobs import FakeReader, ScriptedJobs
from sdk.testing.fake_tokenizer import END, IMAGE_MODEL, VOCAB_SIZE, FakeTokenizer
from sdk.testing.script import Script

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner
    from sdk.engine.snapshot import Snapshot
    from sdk.loading.quant_report import QuantReport
    from sdk.memory.plan import MemoryPlan
    from sdk.models.configs.config import ModelConfig

_PAGE_SIZE = 16
_NO_EXPERTS = "a fake model has no experts"


class ServedScript:
    """See :class:`sdk.requests.served.Served`. What needs weights raises an
    :class:`UnsupportedError`."""

    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        config: EngineConfig,
        script: Script,
        tokenizer: FakeTokenizer,
        executor: ScriptedExecutor,
        clock: Callable[[], float],
        default_params: SamplingParams,
        images: ImageReader | None = None,
    ) -> None:
        """``config``: with a ``max_model_len``."""
        self.config = config
        limits = _limits(config, images)
        max_model_len = limits.max_model_len
        engine = Engine(Scheduler(limits, clock), executor, tokenizer, vocab_size=VOCAB_SIZE)
        self.driver = Driver(engine, max_waiting=config.max_waiting)
        self.monitoring = Monitoring(self.driver)
        self.prefixes = _CachedPrefixes(self.driver)
        self.memory = _NoMemory(self.driver, self.prefixes)
        reader = FakeReader(
            tokenizer, vocab_size=VOCAB_SIZE, max_model_len=max_model_len, images=images
        )
        self.jobs = ScriptedJobs(reader, default_params, script, clock, max_model_len)
        self.frontend = Frontend(
            reader,
            self.jobs,
            lambda: PoolingRequests(self.jobs, reader, None),
            _NoBeams(self.jobs, reader, frozenset({END}), max_model_len, None),
            SamplingDefaults(default_params, "a fake model"),
        )

    @property
    def model_config(self) -> ModelConfig:
        """See :class:`sdk.requests.served.Served`."""
        needs_weights("model_config")

    def expert_load(self) -> dict[int, list[int]]:
        """See :class:`sdk.requests.served.Served`."""
        raise RequestError(_NO_EXPERTS)

    def rebalance_experts(self) -> int:
        """See :class:`sdk.requests.served.Served`."""
        raise RequestError(_NO_EXPERTS)

    def model_runner(self) -> ModelRunner:
        """See :class:`sdk.requests.served.Served`."""
        needs_weights("model_runner")

    def explain(self) -> str:
        """See :class:`sdk.requests.served.Served`."""
        needs_weights("explain")

    def quant_report(self) -> QuantReport:
        """See :class:`sdk.requests.served.Served`."""
        needs_weights("quant_report")

    def fork(self, **options: Any) -> ServedScript:
        """See :class:`sdk.requests.served.Served`."""
        needs_weights("fork")


def _limits(config: EngineConfig, images: ImageReader | None) -> SchedulerConfig:
    """A scheduler's limits; there are pages for all slots at full length, and 64 images are kept.
    The tower has no weights either: what its steps would compute is left out."""
    slots, max_model_len = config.max_num_seqs, config.max_model_len
    assert max_model_len is not None
    return SchedulerConfig(
        num_pages=1 - (-max_model_len // _PAGE_SIZE) * slots,
        page_size=_PAGE_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=max(max_model_len, slots),
        eos_token_ids=frozenset({END}),
        policy=config.scheduling_policy,
        tenant_weights=config.tenant_weights,
        images=None
        if images is None
        else TowerLimits(
            rows=64 * BLOCK_ROWS,
            vision=_vision(images),
            max_patches=1 << 30,
            per_prompt=config.most_images,
        ),
    )


def _vision(images: ImageReader) -> VisionConfig:
    found = vision_of({**IMAGE_MODEL, "image_token_index": images.token_id})
    assert found is not None
    return found


class _CachedPrefixes:
    """See :class:`sdk.requests.served.Prefixes`. Pages are counted, but they hold nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def snapshot(self, prompt: Prompt) -> Snapshot:
        needs_weights("snapshot")

    def snapshot_of(self, request_id: str) -> Snapshot:
        needs_weights("snapshot")

    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int:
        needs_weights("restore")

    def pin(self, prompt: Prompt) -> int:
        needs_weights("pin")

    def unpin(self, prompt: Prompt) -> bool:
        needs_weights("unpin")

    def forget(self) -> bool:
        return self._driver.between_steps(self._driver.engine.reset_prefix_cache)


class _NoMemory:
    """See :class:`sdk.requests.served.Memory`."""

    def __init__(self, driver: Driver, prefixes: _CachedPrefixes) -> None:
        self._driver = driver
        self._prefixes = prefixes

    @property
    def plan(self) -> MemoryPlan:
        needs_weights("memory_plan")

    def hold_vocabulary(self) -> None:
        """Nothing: no vocabulary is read for a structure."""

    def trim(self) -> None:
        self._driver.check_usable()
        self._prefixes.forget()

    def resize(self, memory: int | str) -> MemoryPlan:
        needs_weights("resize")

    def sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise RequestError(f"sleep: expected level 1 or 2, found {level!r:.80}")

        def check_idle() -> None:
            if self._driver.has_work:
                raise RequestError("sleep: requests are unfinished: wait for them or abort() them")

        self._driver.sleep(check_idle, f"this LLM sleeps (level {level}): call wake_up() first")

    def wake_up(self) -> None:
        self._driver.wake(lambda: None)


class _NoBeams(BeamSearches):
    """A script has one answer, not the most probable ones."""

    def search(self, *_: object) -> NoReturn:
        needs_weights("beam_search")


def needs_weights(name: str) -> NoReturn:
    """:raises UnsupportedError: always; says what to use instead."""
    raise UnsupportedError(
        f"FakeLLM: {name} needs a model; use LLM(tiny_model(folder)) from sdk.testing"
    )
