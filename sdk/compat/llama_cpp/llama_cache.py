"""Caches that ``Llama.set_cache`` accepts. The prefix cache is always on; ``LLM`` bounds it."""

from sdk.api.errors import RequestError


class BaseLlamaCache:
    """Accepted by ``Llama.set_cache`` without effect."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes


class LlamaRAMCache(BaseLlamaCache):
    """The same."""


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """Prefixes on a disk: ``Llama.save_state`` and ``llm.snapshot`` have them."""

    def __init__(
        self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30
    ) -> None:
        raise RequestError(
            "LlamaDiskCache is not supported: prefixes are cached in memory without it; to keep "
            "one on disk, save llama.llm.snapshot(...)"
        )
