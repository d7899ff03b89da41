"""The engine that is stepped by hand under its older name."""

from sdk.compat.vllm.v1.engine.llm_engine import LLMEngine as LLMEngine
