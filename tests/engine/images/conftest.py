"""Tiny vision models, and engines that run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.api.config import EngineConfig
from sdk.loading.load import Loaded, load
from tests.models.tiny_vision import TEXT, WINDOWS, vision_model
from tests.models.tiny_vision_prompts import (
    OPTIONS,
)

FAMILIES = ("gemma3", "gemma4", "gemma4-e", "qwen3_vl", "qwen2_5_vl", "llava", "internvl")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Path]:
    """A family, transformers' model and its folder."""
    name = request.param
    oracle = vision_model(name)
    folder = tmp_path_factory.mktemp(name)
    oracle.save_pretrained(folder)
    return name, oracle, folder


@pytest.fixture(scope="module")
def loaded(family: Any) -> Iterator[Loaded]:
    """An engine whose prompts run whole, if nothing else is said."""
    found = load(EngineConfig(model=str(family[2]), **OPTIONS))
    yield found
    found.engine.close()


@pytest.fixture(autouse=True)
def fresh(request: Any) -> Iterator[None]:
    """Each test begins without cached prefixes and rows, and leaves no blocks behind."""
    if "loaded" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("loaded").engine
    engine.reset_prefix_cache()
    engine.scheduler.images.reset()
    yield
    engine.scheduler.images.check_blocks()
    assert not engine.has_unfinished


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: Any) -> tuple[Any, Path]:
    """A Gemma 3 with a window that is a little longer than an image, and its folder."""
    oracle = vision_model("gemma3", text_config={**TEXT, **WINDOWS})
    folder = tmp_path_factory.mktemp("windows")
    oracle.save_pretrained(folder)
    return oracle, folder
