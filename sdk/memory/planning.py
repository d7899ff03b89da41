"""The memory plan of an engine, from its options and the headers of the model's files."""

from __future__ import annotations

from dataclasses import replace

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.api.machine import installed_memory
from sdk.api.memory_pool import MemoryPool
from sdk.api.sizes import format_bytes
from sdk.api.speculative_config import SpeculativeConfig
from sdk.engine.rank.kv_cache import kv_spec
from sdk.engine.scheduling.scheduler_config import WindowGroup
from sdk.kernels.lazy_torch import torch
from sdk.kernels.registry import facts_of
from sdk.kernels.scratch import Scratch
from sdk.kernels.sized_graphs import MOST_TOKENS
from sdk.memory import resolve
from sdk.memory.demand import (
    MemoryDemand,
    MemoryLimits,
    WeightBytes,
    hand_over_bytes,
    with_experts,
    with_offload,
)
from sdk.memory.expert_memory import with_uses
from sdk.memory.fitting import plan_memory
from sdk.memory.images import image_memory, image_options
from sdk.memory.plan import MemoryPlan
from sdk.memory.products import products_of
from sdk.memory.resolve import (
    check_layer_inputs,
    check_states,
    compute_of,
    config_values,
    encoder_options,
    model_config,
    step_pages,
    why_one_group,
)
from sdk.memory.shares import least_for_one
from sdk.memory.split import NoRanks, largest_part, stage_layers, within_cards
from sdk.memory.weights import adapter_bytes, end_bytes, matrix_formats, weight_bytes
from sdk.models.configs.activation_type import activation_type
from sdk.models.configs.config import ModelConfig
from sdk.models.experts.placement import check_spread
from sdk.models.parallel import Mesh
from sdk.quant.caches import StateCache
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.spec import KVSpec

#: An encoder's context is halved until the plan fits, but is not less than this many tokens unless
#: its length was asked for.
_SHORT_TEXT = 512


def _check_split(config: EngineConfig, model: ModelConfig) -> None:
    """Reject a number of ranks that cannot split the model, before any of them starts."""
    size = config.tensor_parallel_size
    if config.enable_expert_parallel and model.experts is None:
        raise RequestError(
            "enable_expert_parallel: expected a mixture of experts, but this model has none: leave "
            "the option out"
        )
    mesh = Mesh(0, size, NoRanks())
    mesh.heads(model.num_heads, model.num_kv_heads)
    for layer in range(model.num_layers if model.layer_caches or model.layer_heads else 0):
        mesh.heads(model.heads_of(layer), model.attention_of(layer).kv_heads)
    mesh.columns(model.intermediate_size)
    if model.experts is not None and model.experts.shared_width:
        mesh.columns(model.experts.shared_width)
    if model.experts is not None and config.redundant_experts is not None:
        check_spread(model.experts.count, size, config.redundant_experts)
    elif model.experts is not None and config.lockstep_engines > 1:
        engines = config.lockstep_engines
        check_spread(model.experts.count, engines, config.num_redundant_experts)
    elif model.experts is not None:
        mesh.columns(model.experts.width)
    mesh.vocabulary(model.vocab_size)


def activations_of(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The type of activations between kernels: always float32 on a CPU."""
    device = resolve.device_of(config)
    best = facts_of(device).matrix_type(device)
    if best == torch.float32:
        return best
    return activation_type(
        config_values(config, checkpoint),
        best,
        exact=compute_of(config) == "exact",
        stored="float16" if matrix_formats(config, checkpoint)[0] == {"f16"} else "",
        asked="" if config.dtype == "auto" else config.dtype,
    )


def plan_for(
    config: EngineConfig, checkpoint: Checkpoint, weights: WeightBytes | None = None
) -> MemoryPlan:
    """The plan without alternatives; ``problem`` is set if it does not fit.

    ``weights``: those of ``config`` and ``checkpoint``, if they are known. The options of the plan
    are those of the engine: a step of an encoder holds its longest text.
    """
    model = model_config(config, checkpoint)
    config = image_options(config, model)
    check_layer_inputs(config, model)
    check_states(config, model)
    if model.causal:
        if why_one_group(config, model):
            return _plan(config, checkpoint, model, weights)
        made = _plan(config, checkpoint, model, weights, windows=True)
        if all(made.max_model_len <= group.window for group in made.windows):
            return _plan(config, checkpoint, model, weights)  # nothing ever leaves a window
        return made
    made = _plan(encoder_options(config, model), checkpoint, model, weights)
    context = model.max_position
    while not made.fits and config.max_model_len is None and context > _SHORT_TEXT:
        context //= 2
        shorter = replace(config, max_model_len=context)
        tried = _plan(encoder_options(shorter, model), checkpoint, model, weights)
        made = tried if tried.fits else made
    return made


def _plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    weights: WeightBytes | None,
    *,
    windows: bool = False,
) -> MemoryPlan:
    """``windows``: layers with a window have memory of their own."""
    activations = activations_of(config, checkpoint)
    pool = config.memory if isinstance(config.memory, MemoryPool) else None
    budget = _bytes(config.memory) if pool is None else pool.free
    kv_budget = _bytes(config.kv_cache_memory_bytes)
    limit = resolve.available_to(config) if budget is None else budget
    weights = weights or weight_bytes(config, checkpoint)
    demand = _demand(config, model, weights, activations, windows=windows)
    demand = replace(demand, images=image_memory(config, checkpoint, model))
    stages = stage_layers(config, checkpoint, model)
    part = 1.0
    if config.device == "cuda" and config.num_ranks > 1:
        part = largest_part(config, model, weights, stages)
        if budget is None:  # else all ranks together have as much as was asked for
            limit = int(limit / (config.num_ranks * part))
    if stages and model.tie_word_embeddings:
        demand = replace(demand, weights=_with_copy(weights, end_bytes(config, checkpoint)))
    demand = replace(demand, scratch=_scratch(config, model, checkpoint, activations))
    if config.speculative_config is not None:
        from sdk.memory.drafting import with_drafts

        demand = with_drafts(demand, config, checkpoint)
    whole, replicas = budget, config.data_parallel_size
    if replicas > 1:
        shared = demand.weights.total - demand.drafting_weights if config.num_ranks == 1 else 0
        limit = _part(limit, shared, replicas)
        budget = None if budget is None else _part(budget, shared, replicas)
        kv_budget = None if kv_budget is None else kv_budget // replicas
    if config.disk_offload or config.cpu_offload:
        demand = with_offload(demand, config, MemoryLimits(limit, kv_budget, config.max_model_len))
    else:
        room = MemoryLimits(limit, kv_budget, config.max_model_len)
        demand = with_experts(demand, config, room, resolve.threads_of(config))
        if demand.experts is not None:
            overrides = config.hf_overrides or {}
            known = with_uses(demand.experts, checkpoint.path, config.quantization, overrides)
            demand = replace(demand, experts=known)
    made = plan_memory(
        demand,
        budget=budget,
        kv_budget=kv_budget,
        max_model_len=config.max_model_len,
        available=limit,
    )
    if replicas > 1:
        problem = made.problem and f"each of {replicas} replicas: {made.problem}"
        made = replace(made, budget=whole, replicas=replicas, problem=problem)
    if pool is not None:
        made = _of_one_request(made, demand)
    if made.fits and budget is not None and config.device != "cuda":
        made = _within_machine(made, budget, resolve.hosts_of(config))
    elif made.fits and config.device == "cuda" and config.num_ranks > 1:
        made = within_cards(made, part, config.num_ranks)
    return replace(made, config=config)


def _of_one_request(made: MemoryPlan, demand: MemoryDemand) -> MemoryPlan:
    """A model in a memory pool owns the memory of one request, and borrows more as pages. Without
    pages it owns what all its requests need."""
    own = -(-made.max_model_len // made.page_size)
    if not made.page_bytes or not made.fits:
        return made
    made = replace(made, num_pages=min(made.num_pages, own))
    if not made.windows and made.states is None:
        return made
    tokens = min(demand.max_num_batched_tokens, made.max_model_len)
    windows, states = least_for_one(demand, own, tokens)
    return replace(made, windows=windows, states=states)


def _part(limit: int, shared: int, replicas: int) -> int:
    """What one of several replicas may take, including what all of them share."""
    return shared + (limit - shared) // replicas if limit > shared else limit


def _with_copy(weights: WeightBytes, embedding: int) -> WeightBytes:
    """The first and the last stage both have an embedding that is also the head."""
    return replace(
        weights,
        total=weights.total + embedding,
        loading=weights.loading + embedding,
        early=weights.early + embedding,
    )


def _within_machine(made: MemoryPlan, budget: int, hosts: int) -> MemoryPlan:
    """The plan, with a problem if the machine has less memory than the budget."""
    installed = installed_memory() * hosts
    if budget > installed:
        whose, row = "this machine's memory", "machine"
        if hosts > 1:
            whose, row = f"the memory of {hosts} machines like this one", "machines"
        breakdown = (
            f"the budget is larger than {whose}:\n"
            f"  budget     {format_bytes(budget):>10}\n"
            f"  {row:<9}  {format_bytes(installed):>10}  or the container's limit\n"
            f"  planned    {format_bytes(made.total):>10}"
        )
        return replace(made, problem=breakdown)
    return made


def _demand(
    config: EngineConfig,
    model: ModelConfig,
    weights: WeightBytes,
    activations: torch.dtype,
    *,
    windows: bool = False,
) -> MemoryDemand:
    dtype = config.kv_policy or config.kv_cache_dtype
    on_cards = resolve.device_of(config) != "cpu"
    if dtype == "auto":
        # An encoder has the pages of one step, which a CPU need not convert to read them.
        exact = compute_of(config) == "exact" or not (model.causal or on_cards)
        dtype = "float32" if exact else "float16"
    _check_split(config, model)
    speculative = config.speculative_config
    assert isinstance(speculative, SpeculativeConfig | None)  # EngineConfig has parsed it
    # The budget contains the pages of all ranks, on this machine or on several. With more ranks
    # than heads some heads are stored twice.
    spec = kv_spec(
        model,
        config.block_size,
        dtype,
        lambda count: max(count, config.tensor_parallel_size),
        ranks=config.tensor_parallel_size,
        windows=windows,
    )
    page_bytes = spec.page_bytes
    groups = tuple(
        WindowGroup(window, spec.region_bytes(1 + group), 0)
        for group, window in enumerate(spec.windows)
    )
    slot_bytes, rounded_bytes = _bytes_of_states(config, model, spec)
    # On a CPU the memory of a recorded step is its workspace.
    eager = config.enforce_eager or not on_cards
    return MemoryDemand(
        weights=weights,
        model=model,
        page_bytes=page_bytes,
        page_size=config.block_size,
        kv_dtype=dtype,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        activation_bytes=activations.itemsize,
        has_tokenizer=not config.skip_tokenizer_init,
        steps_with_embeds=config.enable_prompt_embeds and eager and not config.enforce_eager,
        adapter_bytes=adapter_bytes(config, model, activations),
        ranks=config.tensor_parallel_size,
        stages=config.pipeline_parallel_size,
        on_cards=on_cards,
        whole_experts=config.redundant_experts is not None,
        lockstep=config.lockstep_engines,
        hand_over_bytes=_hand_over_bytes(config, spec, groups, rounded_bytes or slot_bytes),
        captured_tokens=0 if eager else min(config.step_tokens, MOST_TOKENS),
        num_pages=None if model.causal else step_pages(config),
        windows=groups,
        slot_bytes=slot_bytes,
        rounded_bytes=rounded_bytes,
        row_drafts=0 if speculative is None else speculative.num_speculative_tokens,
    )


def _hand_over_bytes(
    config: EngineConfig, spec: KVSpec, groups: tuple[WindowGroup, ...], state_bytes: int
) -> int:
    if not config.prefill_replicas:
        return 0
    kept = spec if config.state_snapshot_dtype == "auto" else spec.with_rounded_states
    states = (one.nbytes for one in kept.caches if isinstance(one, StateCache))
    largest = max(states, default=0)
    return hand_over_bytes(spec.page_bytes, spec.page_size, groups, state_bytes, largest)


def _bytes_of_states(config: EngineConfig, model: ModelConfig, spec: KVSpec) -> tuple[int, int]:
    """Of the states of one sequence on all ranks, and of a snapshot in 16 bits if there are such.

    :raises RequestError: they were asked for, and the model has no states.
    """
    ranks, region = config.tensor_parallel_size, spec.num_regions - 1
    slot_bytes = ranks * spec.region_bytes(region)
    if config.state_snapshot_dtype == "auto":
        return slot_bytes, 0
    if not slot_bytes:
        raise RequestError(
            f"state_snapshot_dtype={config.state_snapshot_dtype!r}: {model.model_type} has no "
            "recurrent states; leave it out"
        )
    return slot_bytes, ranks * spec.with_rounded_states.region_bytes(region)


def _scratch(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, activations: torch.dtype
) -> Scratch | None:
    products = products_of(
        model,
        matrix_formats(config, checkpoint),
        activations,
        exact=compute_of(config) == "exact",
        fixed=config.deterministic,
    )
    device = resolve.device_of(config)
    return facts_of(device).scratch_of(products, device)


def _bytes(value: int | str | MemoryPool | None) -> int | None:
    assert not isinstance(value, str | MemoryPool)  # EngineConfig has parsed it
    return value
