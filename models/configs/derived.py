"""What configs of old models leave to their classes: see ``ConfigRules.derived``.

Values of a wrong type stay as they are; whoever reads them names them.
"""

from __future__ import annotations

from typing import Any


def every_head_has_keys(config: dict[str, Any]) -> None:
    """As many key/value heads as query heads, which divide the hidden size among them."""
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config.pop("head_dim", None)


def four_times_wide(config: dict[str, Any]) -> None:
    """The MLP has four times the hidden size, unless the config has a width of its own."""
    hidden = config.get("hidden_size")
    if config.get("intermediate_size") is None and isinstance(hidden, int):
        config["intermediate_size"] = 4 * hidden
