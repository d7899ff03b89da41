"""Which layers the stages of a pipeline run."""

from __future__ import annotations

from sdk.api.config import EngineConfig
from sdk.memory.weights import costs
from sdk.models.config import ModelConfig
from sdk.models.parallel import split_layers
from sdk.quant.checkpoint import Checkpoint

#: What planning, sampling and answers cost the last stage, in bytes that could be read meanwhile:
#: 0.3 ms a step with 8 requests, at 10 GB/s.
HOST_BYTES = 3 * 2**20


def stage_layers(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> tuple[range, ...]:
    """The layers of each stage, divided so that all take as long; empty: one stage has all.

    :raises AlignmentError: there are fewer layers than stages.
    """
    if config.pipeline_parallel_size == 1:
        return ()
    layers, head = costs(config, checkpoint, model)
    return split_layers(layers, config.pipeline_parallel_size, head + HOST_BYTES)
