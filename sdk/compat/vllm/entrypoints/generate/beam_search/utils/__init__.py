"""Beams: the outputs of ``LLM.beam_search``."""

from sdk.compat.vllm.outputs import (
    BeamSearchOutput as BeamSearchOutput,
    BeamSearchSequence as BeamSearchSequence,
)
