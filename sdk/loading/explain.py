"""The text of ``LLM.explain()``: what runs where and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.api.config import EngineConfig
from sdk.loading.quant_report import LayerReport, quant_report
from sdk.loading.sampling_defaults import SamplingDefaults
from sdk.memory.images import why_no_images
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import why_one_group
from sdk.models.configs.config import ModelConfig

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner
    from sdk.loading.device import Device


def explain(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    defaults: SamplingDefaults,
    runner: ModelRunner,
    warnings: tuple[str, ...],
    other_layers: tuple[LayerReport, ...] = (),
    device: Device | None = None,
) -> str:
    """The text of :meth:`sdk.LLM.explain`."""
    ops = runner.ops
    lines = [
        f"model      {config.model} ({model.model_type}, {model.num_layers} layers)",
        f"device     {ops.device}, {ops.context.num_threads} threads, "
        f"compute={ops.context.compute}, "
        f"activations {str(ops.activations).removeprefix('torch.')}, "
        f"backends {', '.join(ops.context.backend_names)}",
    ]
    if device is not None:
        became = f"the CPU: {device.reason}" if device.reason else "the card: every check passed"
        lines.append(f"           device='auto' is {became}")
    if config.dtype not in ("auto", str(ops.activations).removeprefix("torch.")):
        lines.append(f"           dtype={config.dtype!r}: activations are at least that precise")
    declined = ops.context.declined_backends
    lines += [f"           no {name} backend: {reason}" for name, reason in declined]
    lines += _steps(runner)
    if config.speculative_config is not None:
        lines.append(f"drafts     {config.speculative_config}, {plan.draft_tokens} per step")
    lines += _images(config, model)
    lines.append(f"sampling   {defaults}")
    lines += [f"memory     {line}" for line in str(plan).splitlines()]
    if why := why_one_group(config, model):
        lines.append(f"           layers with a window keep all tokens: {why}")
    if (store := runner.weights.weight_store) is not None:
        lines.append(f"weights    cache: {store}")
    lines.append("linear layers")
    report = quant_report(runner.model.linears(), others=other_layers)
    lines += [f"  {line}" for line in str(report).splitlines()]
    lines.append("other operators")
    operators = []
    for problem, choice in ops.context.chosen():
        head = f"head_dim {problem.head_dim}" if problem.head_dim else ""
        operators.append(f"  {problem.op:<18} {choice.name} {problem.kv_dtype} {head}".rstrip())
        operators += [f"  {'':<18} not {name}: {reason}" for name, reason in choice.declined]
    lines += dict.fromkeys(operators)  # with a window and without
    lines += [f"warning    {warning}" for warning in warnings]
    return "\n".join(lines)


def _steps(runner: ModelRunner) -> list[str]:
    how = runner.strategy
    decode, prompts = how.eager_reason, how.eager_prompts_reason
    most = how.most_tokens_in_pieces
    if decode == prompts and not most:
        replayed = "replayed from one recorded graph"
        return [f"steps      {replayed if decode is None else _eagerly(decode)}"]
    pieces = (
        f"up to {most} tokens replayed in pieces between attentions, above operator by operator"
    )
    decoding = "replayed from graphs"
    if decode is not None:
        decoding = f"in pieces, like prompts: {decode}" if most else _eagerly(decode)
    return [
        f"steps      decoding: {decoding}",
        f"           with prompts: {pieces if prompts is None else _eagerly(prompts)}",
        *(f"           except some sizes: {why}" for why in how.failed_captures),
    ]


def _eagerly(reason: str) -> str:
    return f"operator by operator: {reason}"


def _images(config: EngineConfig, model: ModelConfig) -> list[str]:
    """How a vision model reads images, or why it does not."""
    vision = model.vision
    if vision is None:
        return []
    if (why := why_no_images(config, model)) is not None:
        return [f"images     none: {why}"]
    tower = vision.tower
    return [
        f"images     {vision.family}: {tower.num_layers} layers of {tower.hidden_size} over "
        f"patches of {vision.patch} pixels, at most {vision.max_tokens} tokens an image"
    ]
