"""Ray: data sets through a model (Ray Data), a server that scales (Ray Serve).

Needs the extra ``ray``. Ranks that are actors need nothing of this: they are the option
``distributed_executor_backend="ray"`` of :class:`sdk.LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.packages import check_installed

if TYPE_CHECKING:
    from sdk.cluster.integrations.ray.data import Embed as Embed, Generate as Generate
    from sdk.cluster.integrations.ray.serve import LLMServer as LLMServer, llm_app as llm_app

check_installed("ray", "sdk.cluster.integrations.ray needs")


def __getattr__(name: str) -> object:
    if name in ("Embed", "Generate"):
        from sdk.cluster.integrations.ray import data

        return getattr(data, name)
    if name in ("LLMServer", "llm_app"):
        from sdk.cluster.integrations.ray import serve

        return getattr(serve, name)
    raise AttributeError(f"module 'sdk.cluster.integrations.ray' has no attribute {name!r}")
