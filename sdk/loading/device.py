"""Which device ``device="auto"`` takes: a card that is certain to be right, else the CPU.

Machines without a card must not pay for the question, so it is asked in the order of what it costs:
a driver (three looks at the file system), the options, the build of torch (one file is read), and
only then torch itself. The model is then loaded on the card, where every operator that it uses is
checked (``kernels/known_answers/check.py``). If anything is wrong, or runs on slow kernels, it is
loaded on the CPU instead, and the engine says why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError, SdkError
from sdk.api.memory_pool import MemoryPool
from sdk.kernels.backend import Choice
from sdk.kernels.dataclass import dataclass
from sdk.kernels.gpu_driver import gpu_driver
from sdk.kernels.lazy_torch import import_torch, torch
from sdk.kernels.self_check import failures
from sdk.loading.quant_report import quant_report

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner


class NotOnCardError(SdkError):
    """Why ``device="auto"`` gives up the card on which it has loaded a model."""


@dataclass(frozen=True, slots=True)
class Device:
    """What ``device="auto"`` became. ``reason``: why not the card; ``warns``: whether the caller
    should know, because a card is here that nothing in the options rules out."""

    reason: str
    warns: bool = False
    on_card: bool = False


def answers_folder() -> Path | None:
    """Where results of known-answer checks are kept; ``None``: this user has no home."""
    from sdk.api.machine import cache_folder

    try:
        return cache_folder() / "known_answers"
    except RuntimeError:
        return None


def card_for(config: EngineConfig) -> tuple[EngineConfig | None, Device]:
    """The options with ``device="cuda"`` if a card may be tried, else why not."""
    if gpu_driver() is None:
        return None, Device("no GPU driver is loaded")
    if (own := _ruled_out(config)) is not None:
        return None, Device(own)
    try:
        asked = replace(config, device="cuda")
    except RequestError as error:
        return None, Device(str(error))
    if (why := torch_without_cards()) is not None:
        return None, Device(why, warns=True)
    try:
        why = _unusable()
    except Exception as error:  # drivers and builds of torch fail in many ways
        why = f"{type(error).__name__}: {error}"
    return (None, Device(why, warns=True)) if why else (asked, Device("", on_card=True))


def _ruled_out(config: EngineConfig) -> str | None:
    """The option that asks for a CPU in words, if there is one that a card would accept."""
    if config.num_ranks > 1:
        return "several ranks and stages take cards with device='cuda' only"
    if isinstance(config.memory, MemoryPool):
        return "a MemoryPool is of this machine's memory; device='cuda' takes it for the card's"
    return None


def torch_without_cards() -> str | None:
    """Why the torch that is installed cannot use a card, from its files; ``None``: it may."""
    try:
        found = find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return "torch is not installed"
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # torch itself will say
    if re.search(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
        return None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    name = f"torch {version[1]}" if version else "torch"
    return f"{name} is built for CPUs alone: install its build for this GPU"


def _unusable() -> str | None:
    """Why the card cannot be used, with what is known of earlier checks on it."""
    from sdk.kernels import gpu

    import_torch()
    if (why := gpu.available("cuda")) is not None:
        return why
    from sdk.kernels.known_answers.check import known

    card = torch.device("cuda", torch.cuda.current_device())
    for answer in known(answers_folder(), card).values():
        if answer.reason:
            return f"on {torch.cuda.get_device_name(card)} a kernel {answer.reason}"
    return None


def check_certain(runner: ModelRunner) -> None:
    """After a load on a card that nobody asked for.

    :raises NotOnCardError: an operator or a product does not run on the card's own kernels, for
        whatever reason.
    """
    context = runner.ops.context
    choices: list[tuple[str, Choice]] = [(p.op, choice) for p, choice in context.chosen()]
    if context.answers is not None and (failed := context.answers.failures()):
        raise NotOnCardError(failed[0])
    for op, choice in choices:
        if not choice.name.startswith("gpu."):
            why = choice.declined[-1] if choice.declined else ("gpu", "it has no such operator")
            raise NotOnCardError(f"{op} would run on {choice.name}, many times slower: {why[1]}")
    for layer in quant_report(runner.model.linears()).layers:
        for kernel, reason in failures(layer.declined):
            raise NotOnCardError(f"{layer.name}: {kernel} {reason}")
        if not layer.kernel.startswith("gpu."):
            why = layer.declined[-1] if layer.declined else ("gpu", "no kernel takes it")
            raise NotOnCardError(f"{layer.name} would run on {layer.kernel}: {why[1]}")
