"""PLaMo-13B: a Llama whose attention and MLP read one norm.

Preferred Networks, "PLaMo-13B" (2023); llama.cpp's plamo.cpp. Folders have query heads in another
order, which their config states wrong; GGUF files have them in ours.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, always

ARCHITECTURE = Architecture(
    "plamo",
    config=ConfigRules(parallel_blocks=always),
    more_gguf=(GgufRules("plamo"),),
    folders=False,
)
