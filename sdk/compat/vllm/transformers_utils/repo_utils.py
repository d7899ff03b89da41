"""The hub, for programs that fetch adapters themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def hf_api() -> HfApi:
    """A client of the Hugging Face hub."""
    from huggingface_hub import HfApi

    return HfApi(library_name="embedlm")
