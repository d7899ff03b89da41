"""Ray Serve: OpenAI's API in replicas that Serve starts, scales, checks and replaces.

A replica is an actor with an LLM and the ASGI application of :mod:`sdk.serving`. Serve routes and
balances requests; inside a replica they share the steps of one engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from sdk.api.errors import EngineAsleepError, RequestError
from sdk.api.params import SamplingParams
from sdk.cluster.integrations.ray.resources import with_resources
from sdk.llm import LLM
from sdk.quant.safe_repr import safe_repr
from sdk.serving.app import create_app

#: The path of the policy for ``autoscaling_config["policy"]["policy_function"]``.
POLICY = "sdk.cluster.integrations.ray.serve:replicas_for_wait"
#: Seconds of expected wait that one replica may have before there is work for another.
TARGET_WAIT = 2.0
_ONE_TOKEN = SamplingParams(max_tokens=1)


def replicas_for_wait(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """How many replicas there is work for: a policy of Serve's autoscaler.

    A replica is worth the larger of two shares: its expected wait of ``target_wait``, and the
    slots in use of ``max_num_seqs``. Serve applies its delays, factors and bounds to the sum. While
    no replica has reported, the number stays.
    """
    reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    loads = reported.get("load", {})
    if not loads:
        return context.target_num_replicas, {}
    return sum(loads.values()), {}


class LLMServer:
    """The class of a deployment: :func:`llm_app` makes one of it.

    For a deployment of your own: ``serve.deployment(serve.ingress()(LLMServer)).bind(model)``.

    :param model: as for :class:`sdk.LLM`, on every node that may have a replica.
    :param model_name: the name that requests use; default: that of the file or folder.
    :param app: arguments of :func:`sdk.serving.create_app`, such as ``access`` and ``limits``.
    :param target_wait: seconds until a first token that count as one replica's worth of work.
    :param options: of :class:`sdk.LLM`. ``num_threads`` and ``memory`` are by default those of the
        actor: see :class:`sdk.cluster.integrations.ray.Generate`.
    """

    def __init__(
        self,
        model: str,
        model_name: str | None = None,
        app: Mapping[str, Any] | None = None,
        target_wait: float = TARGET_WAIT,
        **options: Any,
    ) -> None:
        self._target_wait = target_wait
        self.llm = LLM(model, **with_resources(options))
        self._app = create_app(self.llm, model_name=model_name, **(app or {}))

    def __serve_build_asgi_app__(self) -> Any:
        """Serve's hook for an application that is made by a replica."""
        return self._app

    def check_health(self) -> None:
        """Serve replaces the replica if this raises. :raises EngineDeadError: the engine died."""
        with contextlib.suppress(EngineAsleepError):  # which can be woken up
            self.llm.get_metrics()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve gives to the policy.

        ``expected_wait``: seconds until the first token of a short request that comes now.
        ``uncached_tokens``: tokens of unfinished requests that have to be computed before they can
        go on decoding. ``load``: how many replicas these requests are worth.
        """
        try:
            requests = self.llm.list_requests()
            estimate = self.llm.estimate({"prompt_token_ids": [0]}, _ONE_TOKEN)
        except EngineAsleepError:
            return {"expected_wait": 0.0, "uncached_tokens": 0.0, "load": 0.0}
        # without requests before it, a short one starts at once; None: nothing was measured yet
        wait = (estimate.first_token or 0.0) if estimate.num_waiting else 0.0
        slots = len(requests) / self.llm.config.max_num_seqs
        uncached = sum(
            one.num_prompt_tokens + one.num_generated_tokens - one.num_computed_tokens
            for one in requests
            if one.state != "decoding"
        )
        return {
            "expected_wait": wait,
            "uncached_tokens": float(uncached),
            "load": max(wait / self._target_wait, slots),
        }

    def __del__(self) -> None:
        """Serve calls this after the replica's last request, or when its patience ends."""
        llm = getattr(self, "llm", None)  # none: the constructor failed
        if llm is not None:
            llm.close()


def llm_app(
    model: str,
    *,
    model_name: str | None = None,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_wait: float = TARGET_WAIT,
    app: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """An application for ``serve.run``: OpenAI's API on ``min_replicas`` to ``max_replicas``.

    :param model: as for :class:`sdk.LLM`, on every node that may have a replica.
    :param model_name: the name that requests use; default: that of the file or folder.
    :param target_wait: seconds; with more expected wait per replica there will be another replica.
    :param app: arguments of :func:`sdk.serving.create_app`.
    :param deployment: options of ``serve.deployment``, which replace those chosen here:
        ``name``, ``ray_actor_options`` (``num_cpus``, ``memory``), ``max_ongoing_requests``,
        ``graceful_shutdown_timeout_s``, ...; ``autoscaling_config`` is merged.
    :param options: of :class:`sdk.LLM`, the same for every replica.
    :raises RequestError: an argument is wrong.
    """
    if not 0 <= min_replicas <= max_replicas or max_replicas < 1:
        raise RequestError(
            "min_replicas, max_replicas: expected 0 <= min_replicas <= max_replicas and at least "
            f"1 as the most, found {min_replicas} and {max_replicas}"
        )
    if not isinstance(target_wait, int | float) or not target_wait > 0:
        raise RequestError(
            f"target_wait: expected a number of seconds above 0, found {safe_repr(target_wait)}"
        )
    given = dict(deployment or {})
    scaling = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "policy": {"policy_function": POLICY},
        **given.pop("autoscaling_config", {}),
    }
    settings: dict[str, Any] = {
        "name": "LLM",
        # the queue is the engine's, which orders and batches it; Serve's own default is 5
        "max_ongoing_requests": 4 * (options.get("max_num_seqs") or 64),
        "graceful_shutdown_timeout_s": 120.0,  # long answers end before the replica does
        "autoscaling_config": scaling,
        **_resources(options),
        **given,
    }
    made = serve.deployment(**settings)(serve.ingress()(LLMServer))
    application: serve.Application = made.bind(
        str(model), model_name=model_name, app=app, target_wait=target_wait, **options
    )
    return application


def _resources(options: dict[str, Any]) -> dict[str, Any]:
    """The CPUs of a replica: a placement group with a bundle for each rank, if ranks are actors."""
    ranks = options.get("tensor_parallel_size") or 1
    if ranks == 1 or options.get("distributed_executor_backend") != "ray":
        return {"ray_actor_options": {"num_cpus": options.get("num_threads") or 1}}
    cpus = max((options.get("num_threads") or ranks) // ranks, 1)
    options["num_threads"] = cpus * ranks  # of all ranks; the replica's own CPUs are rank 0's
    return {
        "ray_actor_options": {"num_cpus": cpus},
        "placement_group_bundles": [{"CPU": cpus}] * ranks,
        "placement_group_strategy": "PACK",
    }
