"""Prompts with images for tiny vision models, and the logits of transformers for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.api.params import SamplingParams
from sdk.engine.engine import Engine
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.image import ImageInput, PromptImage
from tests.models.tiny_vision import FREE, from_0_to_1, image, normalized, padded_patches

#: Begin and end an image in a prompt.
BEGIN, END = 88, 89

#: An engine whose numbers are compared with those of transformers.
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 192,
    "max_num_seqs": 8,
    "kv_cache_dtype": "float32",
    "compute": "exact",
    "num_threads": 1,
}


def some_images(config: VisionConfig, count: int) -> list[ImageInput]:
    """Images of the sizes that a tiny model of a family reads."""
    unit = config.patch * config.merge
    if config.axes is not None or config.family == "gemma4":
        sizes = [(2 * unit, 3 * unit), (4 * unit, 2 * unit), (unit, unit)]
    else:
        sizes = [(56, 56)] * 3
    return [image(config, [sizes[i % 3]], i) for i in range(count)]


def prompt(
    config: VisionConfig, images: Sequence[ImageInput], seed: int = 0, text: int = 7
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Token ids with ``text`` tokens before each image and behind the last one, and the images."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    found = []
    for one in images:
        ids += random.integers(3, 80, text).tolist()
        spans = []
        for rows, columns in one.grids:
            ids.append(BEGIN)
            spans.append((len(ids), rows * columns))
            ids += [config.token_id] * (rows * columns) + [END]
        found.append(PromptImage(one, tuple(spans)))
    return ids + random.integers(3, 80, text).tolist(), tuple(found)


def moved(images: Sequence[PromptImage], by: int) -> tuple[PromptImage, ...]:
    """The images with their placeholders so many tokens later."""
    return tuple(
        one._replace(spans=tuple((first + by, count) for first, count in one.spans))
        for one in images
    )


def job(name: str, ids: Sequence[int], images: tuple[PromptImage, ...] = (), **params: Any) -> Job:
    """A greedy request with the log-probabilities of its answer."""
    given = {"max_tokens": 4, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **params}
    return Job(SequenceSpec(name, SamplingParams(**given), images=images), tuple(ids))


def run(engine: Engine, *jobs: Job) -> dict[str, Any]:
    """The finished outputs of jobs that run together, by id."""
    for one in jobs:
        engine.add(one)
    return rest(engine)


def rest(engine: Engine) -> dict[str, Any]:
    """The outputs of all requests when they have ended, by id in that order."""
    found = {}
    while engine.has_unfinished:
        found.update({one.request_id: one for one in engine.step() if one.finished})
        engine.scheduler.check()
    return found


def answer(output: Any) -> list[tuple[int, float]]:
    """The tokens of an answer with their log-probabilities."""
    [one] = output.outputs
    pairs = zip(one.token_ids, one.logprobs, strict=True)
    return [(token, chances[token].logprob) for token, chances in pairs]


def check_in_steps(engine: Engine, one: Job, alone: list[tuple[int, float]]) -> None:
    """A job answers as ``alone`` in steps of any size."""
    for most in (1, 5, 20):
        engine.reset_prefix_cache()
        engine.add(one)
        while engine.has_unfinished:
            last = engine.step(most)
        assert answer(last[0]) == alone


def check_preempted(engine: Engine, one: Job, alone: list[tuple[int, float]], most: int) -> None:
    """A job answers as ``alone`` if it is preempted after any of its first ``most`` steps."""
    for steps in range(1, most + 1):
        engine.reset_prefix_cache()
        engine.add(one)
        last: list[Any] = []
        for _ in range(steps):
            last = list(engine.step(12)) or last
        while engine.scheduler.queues.running:
            engine.scheduler.queues.preempt_last()
        engine.scheduler.check()
        while engine.has_unfinished:
            last = list(engine.step()) or last
        assert answer(last[0]) == alone


def prompt_logprobs(output: Any) -> list[float]:
    """Of the tokens of the prompt behind the first one."""
    return [next(iter(one.values())).logprob for one in output.prompt_logprobs if one]


def expected_logits(
    model: Any, name: str, config: VisionConfig, ids: Sequence[int], images: Sequence[ImageInput]
) -> Tensor:
    """transformers' logits of every token, float32 ``[tokens, vocab]``."""
    tokens = torch.tensor([ids])
    tiles = [normalized(tile, config) for one in images for tile in one.tiles]
    given: dict[str, Any] = {}
    if images and config.family == "gemma4":
        given = padded_patches([from_0_to_1(t) for one in images for t in one.tiles], config)
    elif images and name in FREE:
        given["pixel_values"] = torch.cat([_patches(tile, config) for tile in tiles])
        grids = [[1, *(side // config.patch for side in tile.shape[1:])] for tile in tiles]
        given["image_grid_thw"] = torch.tensor(grids)
    elif images:
        given["pixel_values"] = torch.stack(tiles)
    named = name in FREE or config.family == "gemma4"
    kind = "mm_token_type_ids" if named else "token_type_ids"
    given[kind] = (tokens == config.token_id).int()
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, **given).logits[0]
    return found


def _patches(pixels: Tensor, config: VisionConfig) -> Tensor:
    """As Qwen's processors hand them to the model: merged patches are neighbours, and a patch has
    equal pictures."""
    size, merge = config.patch, config.merge
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    split = pixels.reshape(3, rows // merge, merge, size, columns // merge, merge, size)
    split = split.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, size, size)
    return split.expand(-1, -1, config.frames, -1, -1).reshape(rows * columns, -1)
