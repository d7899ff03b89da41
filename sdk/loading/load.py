"""Turns options into a running engine: reads the headers, plans the memory, then loads."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError, LoadCancelled, SdkError, UnsupportedError
from sdk.api.load_progress import reporting
from sdk.api.memory_pool import Lease, MemoryPool
from sdk.api.sizes import cache_bytes
from sdk.api.speculative_config import SpeculativeConfig
from sdk.engine.engine import Engine
from sdk.engine.executor import Ranks
from sdk.engine.model_key import ModelKey, key_of_fork, model_key
from sdk.engine.pages.disk_space import disk_folder
from sdk.engine.pages.elastic import ElasticPages
from sdk.engine.pages.prefix_store import PrefixStore
from sdk.engine.rank.kv_cache import kv_spec
from sdk.engine.rank.rank_model import RankModel
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.rank.runner_config import DraftingWeights, RunnerConfig
from sdk.engine.scheduling.results import ResultBudget
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SHORT_STEP, SHORT_STEP_GPU, SchedulerConfig
from sdk.engine.stage_times import StageTimes
from sdk.executors.local import LocalExecutor
from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import torch, type_name
from sdk.kernels.sized_graphs import MOST_TOKENS
from sdk.kernels.system import SYSTEM
from sdk.loading.alternatives import checked_plan
from sdk.loading.around import part_around
from sdk.loading.checks import named_tokenizer
from sdk.loading.device import Device, answers_folder, card_for, check_certain
from sdk.loading.embedding_head import embedding_head
from sdk.loading.load_warnings import load_warnings, other_stages, unread_keys
from sdk.loading.quant_report import LayerReport
from sdk.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from sdk.loading.set_aside import (
    pages_set_aside,
    places_set_aside,
    snapshots_set_aside,
    states_set_aside,
)
from sdk.memory.images import tower_limits, why_no_images
from sdk.memory.plan import MemoryPlan
from sdk.memory.planning import activations_of
from sdk.memory.resolve import (
    check_cards_alike,
    compute_of,
    config_values,
    device_of,
    model_config,
    open_model,
    ranks_here,
    threads_of,
)
from sdk.memory.split import stage_layers
from sdk.models.classifier import Classifier, classifier_of
from sdk.models.classifier_heads import with_layers
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint, LoadedCheckpoint
from sdk.quant.embedding_head import EmbeddingHead
from sdk.quant.spec import kv_bits
from sdk.quant.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sdk.engine.rank.adapters import RankAdapters
    from sdk.engine.scheduling.drafts import Drafter, Drafts
    from sdk.loading.adapters import AdapterOpener

logger = logging.getLogger("sdk")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of an engine before its weights are read."""

    config: EngineConfig
    path: str
    #: The model's config with Hugging Face's names, and the same as the engine reads it.
    values: Mapping[str, Any]
    model_config: ModelConfig
    plan: MemoryPlan
    runner_config: RunnerConfig
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    defaults: SamplingDefaults
    classifier: Classifier | None
    kv_scales: int
    results: ResultBudget
    headers: LoadedCheckpoint
    #: What ``device="auto"`` became; ``None``: the device was given.
    device: Device | None = None
    #: What the files say about embeddings, or why that is not supported.
    embedding_head: EmbeddingHead | str | None = None
    #: Keys of the config or of the metadata without an effect, because nothing reads them.
    unread_keys: tuple[str, ...] = ()

    def key(self) -> ModelKey:
        """The key of the model's files as they are now."""
        config = self.config
        return model_key(
            Path(self.path),
            self.model_config,
            self.plan.max_model_len,
            quantization=config.quantization,
            overrides=config.hf_overrides or {},
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A running engine and its parts."""

    facts: ModelFacts
    engine: Engine
    executor: Ranks[ModelRunner]
    kept: PrefixStore
    elastic: ElasticPages
    lease: Lease | None
    #: Of the files that were read.
    model_key: ModelKey
    warnings: tuple[str, ...]
    #: The linear layers of the stages before the last one.
    other_layers: tuple[LayerReport, ...]
    #: ``None``: requests cannot have adapters.
    open_adapter: AdapterOpener | None
    #: Whether another engine has read the weights: see :func:`fork`.
    is_fork: bool = False

    @property
    def runner(self) -> ModelRunner:
        """Rank 0's runner; a new one after a sleep that freed the weights."""
        return self.executor.runner


def load(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Loaded:
    """Build the engine; on any error everything built so far is freed.

    ``checkpoint`` replaces the one that ``config`` names, and is closed.
    """
    if config.device != "auto" or checkpoint is not None:
        return _load(config, checkpoint)
    asked, device = card_for(config)
    if asked is not None:
        try:
            return _load(asked, None, device)
        except (CheckpointError, LoadCancelled):
            raise
        except Exception as error:  # whatever it is, the CPU can do without the card
            name = "" if isinstance(error, SdkError) else f"{type(error).__name__}: "
            device = Device(f"{name}{error}", warns=True)
        gc.collect()  # what the error's trace has kept
        with contextlib.suppress(RuntimeError):  # if the driver has given up
            torch.cuda.empty_cache()
    return _load(config, None, device)


def _load(
    config: EngineConfig, checkpoint: Checkpoint | None, device: Device | None = None
) -> Loaded:
    """:func:`load` on the device that the options name; ``device``: why."""
    with contextlib.ExitStack() as undo:
        checkpoint = checkpoint or open_model(config)
        undo.callback(checkpoint.close)
        memory = checked_plan(config, checkpoint)
        config = memory.config or config
        if (lease := _lease(config, checkpoint, memory)) is not None:
            undo.callback(lease.close)
        facts = replace(read_facts(config, checkpoint, memory), device=device)
        opened = [checkpoint]

        def own_weights(given: RunnerConfig, mesh: Mesh) -> RankModel:
            # the first start uses the open checkpoint
            return RankModel.load(given, mesh, opened.pop() if opened else None)

        with reporting("load", "B", config.on_progress) as report:
            checkpoint.on_bytes = report
            loaded = start(facts, own_weights, lease)
        undo.pop_all()
    return loaded


def fork(first: Loaded, weights: RankModel, config: EngineConfig) -> Loaded:
    """Another engine with the ``weights`` and the tokenizer of the first one.

    ``config``: see :func:`sdk.loading.fork.fork_config`. On any error everything built so far is
    freed.
    """
    from sdk.loading.fork import fork_plan

    headers, model = first.facts.headers, first.facts.model_config
    memory = fork_plan(config, headers)
    config = memory.config or config
    facts = replace(
        first.facts,
        config=config,
        plan=memory,
        runner_config=_runner_config(config, headers, model, memory),
        defaults=sampling_defaults(config, headers),
        results=_results(memory, model),
    )

    def shared_weights(given: RunnerConfig, mesh: Mesh) -> RankModel:
        return weights.share(given, mesh, headers)

    lengths = first.facts.plan.max_model_len, memory.max_model_len
    key = key_of_fork(first.model_key, model, *lengths)
    return replace(start(facts, shared_weights, key=key), is_fork=True)


def read_facts(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan) -> ModelFacts:
    """What the headers of a checkpoint say about an engine with this plan."""
    model, values = model_config(config, checkpoint), config_values(config, checkpoint)
    tokenizer = _tokenizer(config, checkpoint)
    SYSTEM.trim_heap()  # building the tokenizer left 16 to 22 MiB; this may be the peak
    return ModelFacts(
        config=config,
        path=str(checkpoint.path),
        values=values,
        model_config=model,
        plan=memory,
        runner_config=_runner_config(config, checkpoint, model, memory),
        tokenizer=tokenizer,
        eos_token_ids=frozenset(_eos(checkpoint) if tokenizer is None else tokenizer.eos_token_ids),
        defaults=sampling_defaults(config, checkpoint),
        classifier=with_layers(checkpoint, classifier_of(values), values, model.output_size),
        kv_scales=len(checkpoint.kv_scales),
        results=_results(memory, model),
        headers=LoadedCheckpoint(checkpoint),
        embedding_head=embedding_head(checkpoint, model.output_size),
        unread_keys=unread_keys(checkpoint, values),
    )


def _results(memory: MemoryPlan, model: ModelConfig) -> ResultBudget:
    return ResultBudget.for_plan(memory.total, model.vocab_size, model.output_size)


def start(
    facts: ModelFacts,
    own_weights: Callable[[RunnerConfig, Mesh], RankModel],
    lease: Lease | None = None,
    key: ModelKey | None = None,
) -> Loaded:
    """Start the ranks and the engine; ``own_weights``: those of the rank in this process. ``key``:
    of the weights (default: of the files).

    On any error everything built so far is freed.
    """
    config, memory, model = facts.config, facts.plan, facts.model_config
    with contextlib.ExitStack() as undo:
        executor = _executor(facts, own_weights)
        undo.callback(executor.close)
        executor.start()
        if facts.device is not None and facts.device.on_card:
            check_certain(executor.runner)
        if lease is not None:
            lease.give_back(memory.total - memory.serving)
        if key is None:
            key = facts.key()  # after the load: 1 ms, but up to 60 ms before the file is in memory
        scheduler = _scheduler(facts)
        vocab = model.layer_rows or model.vocab_size
        engine = Engine(scheduler, executor, facts.tokenizer, vocab_size=vocab, seed=config.seed)
        engine.stage_times = _set_steps_in_flight(scheduler, executor)
        if facts.runner_config.expert_bytes:
            from sdk.loading.expert_numbers import expert_numbers

            engine.expert_numbers = partial(expert_numbers, lambda: executor.runner)
        engine.no_images = why_no_images(config, model)
        others = other_stages(executor, config)
        open_adapter = _with_adapters(engine, facts, executor)
        has_windows, ranks = bool(memory.windows), facts.config.tensor_parallel_size
        spec = kv_spec(model, memory.page_size, memory.kv_dtype, ranks=ranks, windows=has_windows)
        if facts.runner_config.num_rounded:
            spec = spec.with_rounded_states
        elastic = ElasticPages(scheduler, executor)
        if facts.runner_config.device != "cpu":
            engine.prepare = elastic.prepare
        loaded = Loaded(
            facts=facts,
            engine=engine,
            executor=executor,
            elastic=elastic,
            lease=lease,
            kept=PrefixStore(scheduler, executor, spec, ranks),
            model_key=key,
            warnings=tuple(
                load_warnings(
                    executor,
                    others,
                    facts.headers,
                    facts.model_config,
                    device=facts.device,
                    unread_keys=facts.unread_keys,
                    tokenizer=facts.tokenizer,
                )
            ),
            other_layers=others.layers,
            open_adapter=open_adapter,
        )
        undo.pop_all()
    return loaded


def _lease(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan) -> Lease | None:
    pool = config.memory if isinstance(config.memory, MemoryPool) else None
    return None if pool is None else pool.lease(str(checkpoint.path), memory.total)


def _set_steps_in_flight(scheduler: Scheduler, executor: Ranks[ModelRunner]) -> StageTimes | None:
    """As many as there are stages, whose times this returns; else as many as the rank can have."""
    scheduler.pages_ahead, scheduler.batches_in_flight = executor.runner.ahead
    if executor.stages == 1:
        return None
    scheduler.batches_in_flight, scheduler.min_concurrent_tokens = executor.stages, 0
    return executor.stage_times


def _with_adapters(
    engine: Engine,
    facts: ModelFacts,
    executor: Ranks[ModelRunner],
) -> AdapterOpener | None:
    """Let the requests of an engine have adapters, if the options ask for that."""
    slots = engine.scheduler.adapters
    if slots is None:
        return None
    from sdk.engine.adapter_loader import AdapterLoader
    from sdk.loading.adapters import AdapterOpener

    def own_rank() -> RankAdapters:
        adapters = executor.runner.adapters
        assert adapters is not None
        return adapters

    config = facts.config
    ranks, stages = config.num_ranks, config.pipeline_parallel_size
    engine.adapters = AdapterLoader(slots, executor, own_rank, ranks, stages)
    return AdapterOpener(config, facts.values, own_rank, slots.max_bytes)


def _scheduler(facts: ModelFacts) -> Scheduler:
    config, runner, memory = facts.config, facts.runner_config, facts.plan
    limits = SchedulerConfig(
        num_pages=runner.num_pages,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        tenant_weights=config.tenant_weights,
        priority_aging=config.priority_aging,
        short_step_tokens=SHORT_STEP if runner.device == "cpu" else SHORT_STEP_GPU,
        prefix_eviction=config.prefix_eviction,
        kv_type=memory.kv_dtype,
        kv_bits=kv_bits(memory.kv_dtype),
        kv_keep=config.kv_keep,
        num_swap_pages=runner.num_swap_pages,
        swap_parts=runner.swap_parts,
        first_pages=memory.num_pages + 1,
        eos_token_ids=facts.eos_token_ids,
        max_scored_tokens=facts.results.scored_tokens,
        max_result_bytes=facts.results.nbytes,
        adapter_slots=runner.adapter_slots,
        adapter_bytes=memory.adapters,
        windows=tuple(
            group._replace(num_frames=count)
            for group, count in zip(memory.windows, runner.num_frames, strict=True)
        ),
        states=memory.states
        and memory.states._replace(num_slots=runner.num_states, num_rounded=runner.num_rounded),
        page_bytes=memory.page_bytes,
        cache_bytes=memory.kv_cache if runner.device == "cpu" else None,
        images=tower_limits(config, facts.model_config, memory.images),
    )
    scheduler = Scheduler(limits)
    drafting = runner.drafting
    longest = None if drafting is None else drafting.max_model_len
    head = None if drafting is None else drafting.head
    # a head without a layer predicts only this many tokens
    most = None if head is None or head.has_layer else head.num_heads
    scheduler.drafts = _drafts(config, memory, longest, most)
    return scheduler


def _drafts(
    config: EngineConfig, memory: MemoryPlan, longest: int | None, most: int | None
) -> Drafts | None:
    speculative = config.speculative_config
    if speculative is None:
        return None
    from sdk.engine.scheduling.draft_lengths import DraftLengths
    from sdk.engine.scheduling.drafts import Drafts, FirstMatch, RankDrafter
    from sdk.engine.scheduling.forced_tokens import ForcedTokens
    from sdk.engine.scheduling.prompt_lookup import LOOKUP_BYTES, PromptLookup

    assert isinstance(speculative, SpeculativeConfig)  # EngineConfig has parsed it
    drafters: list[Drafter] = [ForcedTokens()]
    if (least := speculative.least_match) is not None:
        shares = config.enable_prefix_caching
        drafters.append(
            PromptLookup(least, speculative.prompt_lookup_max, LOOKUP_BYTES, shares=shares)
        )
    if longest is not None:
        drafters.append(RankDrafter(longest))
    lengths = DraftLengths() if speculative.adaptive else None
    asked = speculative.num_speculative_tokens
    return Drafts(FirstMatch(drafters), min(asked, most or asked), lengths, memory.draft_tokens)


def _runner_config(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, memory: MemoryPlan
) -> RunnerConfig:
    device = _device(config)
    return RunnerConfig(
        model=str(checkpoint.path.absolute()),  # actors of Ray have another working directory
        num_pages=pages_set_aside(config, memory) + 1,  # page 0 is never allocated
        num_frames=tuple(places_set_aside(config, memory, *one[1:]) for one in memory.windows),
        num_states=states_set_aside(config, memory),
        num_rounded=snapshots_set_aside(config, memory),
        page_size=memory.page_size,
        kv_dtype=memory.kv_dtype,
        max_model_len=memory.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        max_draft_tokens=memory.draft_tokens,
        drafting=_drafting_weights(config, checkpoint, memory),
        num_threads=max(threads_of(config) // ranks_here(config), 1),
        device=device,
        compute=compute_of(config),
        activations=type_name(activations_of(config, checkpoint)),
        enforce_eager=config.enforce_eager,
        recorded_tokens=memory.recorded_tokens or MOST_TOKENS,
        deterministic=config.deterministic,
        hf_overrides=dict(config.hf_overrides or {}),
        quantization=config.quantization,
        num_swap_pages=memory.swap_pages,
        swap_parts=memory.swap_parts,
        swap_path=config.swap_path,
        kv_keep=config.kv_keep,
        stage_layers=stage_layers(config, checkpoint, model),
        adapter_slots=config.adapter_slots,
        max_adapter_rank=config.max_lora_rank,
        adapter_dtype="int8" if config.lora_dtype == "int8" else None,
        redundant_experts=config.redundant_experts,
        image_rows=0 if memory.images is None else memory.images.rows,
        mmproj=None if config.mmproj is None else str(Path(config.mmproj).absolute()),
        weight_cache=cache_bytes(config.weight_cache),
        answers_folder=None if device == "cpu" else answers_folder(),
        **_offload_options(config, model, memory),
    )


def _drafting_weights(
    config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan
) -> DraftingWeights | None:
    speculative = config.speculative_config
    assert isinstance(speculative, SpeculativeConfig | None)  # EngineConfig has parsed it
    if speculative is not None and speculative.method == "self":
        path, overrides = str(checkpoint.path.absolute()), config.hf_overrides or {}
        return DraftingWeights(
            path, speculative.scheme, memory.max_model_len, hf_overrides=overrides
        )
    if speculative is None or not speculative.has_weights:
        return None
    from sdk.memory.drafting import check_same_vocabulary, opened_draft_model, opened_head
    from sdk.memory.drafting_heads import next_token_head

    longest = memory.max_model_len
    target = model_config(config, checkpoint)
    if speculative.is_own_head:
        own = next_token_head(checkpoint, target)
        path = str(checkpoint.path.absolute())
        return DraftingWeights(path, config.quantization, longest, has_pages=True, head=own)
    if speculative.is_head:
        with opened_head(config, speculative, target) as (_, files, head):
            if head.has_layer:
                longest = min(longest, head.model.max_position)
            path, scheme = str(files.path.absolute()), speculative.scheme
            return DraftingWeights(path, scheme, longest, has_pages=head.has_layer, head=head)
    with opened_draft_model(config, speculative) as (_, drafting, model):
        check_same_vocabulary(checkpoint.tokenizer, drafting.tokenizer)
        longest = min(longest, model.max_position)
        path, scheme = str(drafting.path.absolute()), speculative.scheme
        return DraftingWeights(path, scheme, longest, has_pages=True)


def _device(config: EngineConfig) -> str:
    """With a GPU's number: the one that is current in this thread. Of several ranks each has its
    own.
    """
    device = device_of(config)
    if device == "cpu":
        return device
    if config.num_ranks > 1:
        check_cards_alike(config.num_ranks)
        return device
    return f"{device}:{torch.cuda.current_device()}"


def _offload_options(
    config: EngineConfig, model: ModelConfig, memory: MemoryPlan
) -> dict[str, Any]:
    """The runner's fields for weights that do not all stay in memory."""
    if memory.experts is not None:
        return {
            "expert_bytes": memory.experts.resident,
            "least_experts": memory.experts.least,
            "packed_bytes": memory.weights - memory.experts.resident + memory.experts.total,
        }
    if not memory.offloaded:
        return {}
    if memory.layers_away:
        return {"host_from": model.num_layers - memory.layers_away}
    ranks = config.tensor_parallel_size
    return {
        "disk_bytes": -(-memory.offloaded // ranks),
        "resident_bytes": -(-memory.weights // ranks),
        "disk_folder": disk_folder(config.disk_offload_path),
    }


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.pre_tokenizer is not None and checkpoint.format != "gguf":
        raise UnsupportedError(
            f"{checkpoint.path}: pre_tokenizer={config.pre_tokenizer!r}: expected a GGUF file, "
            "found safetensors files, whose tokenizer.json says how texts are split; leave it out"
        )
    if config.skip_tokenizer_init:
        return None
    found: Tokenizer | None = named_tokenizer(config)
    if found is None:
        found = checkpoint.tokenizer
    if found is not None and config.chat_template is not None:
        found.template_source(config.chat_template)  # an error now, not with the first conversation
    return found


def _eos(checkpoint: Checkpoint) -> list[int]:
    """The ids that end an answer if there is no tokenizer."""
    for facts in (checkpoint.generation_config, checkpoint.config):
        ids = facts.get("eos_token_id")
        if isinstance(ids, int):
            return [ids]
        if isinstance(ids, list):
            return [token for token in ids if isinstance(token, int)]
    return []


def _executor(
    facts: ModelFacts, own_weights: Callable[[RunnerConfig, Mesh], RankModel]
) -> Ranks[ModelRunner]:
    """Ranks of other processes read the model's files themselves."""
    config, runner_config = facts.config, facts.runner_config

    def own(given: RunnerConfig, mesh: Mesh) -> ModelRunner:
        compiling = partial(reporting, "compile", " kernels", config.on_progress)
        return ModelRunner(given, mesh, replace(own_weights(given, mesh), compiling=compiling))

    if config.num_ranks == 1:
        return LocalExecutor(own, runner_config)
    made: Ranks[ModelRunner] = part_around("ranks")(facts, own)
    return made
