"""The engine for an event loop under its older name."""

from sdk.compat.vllm.v1.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM
