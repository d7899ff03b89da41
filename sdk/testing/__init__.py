"""For tests of applications: a fake ``LLM``, tiny real models, faults on demand.

Nothing here needs pytest. :class:`FakeLLM` needs no model and no torch. The fixtures ``fake_llm``
and ``tiny_llm`` are part of the pytest plugin. docs/testing.md has examples.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.testing.clock import ManualClock as ManualClock
    from sdk.testing.contract import contract_check as contract_check
    from sdk.testing.fake_llm import FakeLLM as FakeLLM
    from sdk.testing.faults import Fault as Fault, fault as fault, slow_consumer as slow_consumer
    from sdk.testing.script import FakeAnswer as FakeAnswer, FakeRequest as FakeRequest
    from sdk.testing.tiny_adapters import tiny_adapter as tiny_adapter
    from sdk.testing.tiny_models import tiny_model as tiny_model

_EXPORTS = {
    "FakeLLM": "sdk.testing.fake_llm",
    "FakeAnswer": "sdk.testing.script",
    "FakeRequest": "sdk.testing.script",
    "ManualClock": "sdk.testing.clock",
    "contract_check": "sdk.testing.contract",
    "Fault": "sdk.testing.faults",
    "fault": "sdk.testing.faults",
    "slow_consumer": "sdk.testing.faults",
    "tiny_adapter": "sdk.testing.tiny_adapters",
    "tiny_model": "sdk.testing.tiny_models",
}
__all__ = [*_EXPORTS]
#: They make weights with it.
_NEED_TORCH = {"sdk.testing.tiny_adapters", "sdk.testing.tiny_models"}


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'sdk.testing' has no attribute {name!r}")
    if module in _NEED_TORCH:
        from sdk.kernels.host.torch_import import torch_module

        torch_module(f"sdk.testing.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
