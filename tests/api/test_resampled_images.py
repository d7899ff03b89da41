"""Conversations with a tiny random MiniCPM-V 4.5, whose images are queries, beside float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.images.processors import image_processor
from tests.tiny_minicpmv import PATCH, PROMPTS, QUERIES, TinyMiniCPM
from tests.vision_prompts import picture, reference_tokenizer, with_images

ASKED = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Compare with"}]},
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": [{"type": "text", "text": "this"}, {"type": "image"}]},
]
#: One of one tile, one of slices.
PICTURES = [picture(40, 61, 1), picture(130, 60, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("version", ["4.0", "4.5"])
def test_answers_are_those_of_the_published_computation(version: str, tmp_path: Path) -> None:
    model = TinyMiniCPM(version)
    model.save(tmp_path)
    config = {"model_type": "minicpmv", "vision_config": {"patch_size": PATCH}}
    settings = {**PROMPTS.size, "max_slice_nums": 4}
    processor = image_processor({**config, "query_num": QUERIES}, settings)
    tokenizer = reference_tokenizer(PROMPTS)
    whole, *slices = (f"<{a}>{'<unk>' * QUERIES}</{a}>" for a in ("image", "slice"))
    tiles = [processor.read(one).tiles for one in PICTURES]
    assert len(tiles[0]) == 1 and len(tiles[1]) == 3  # two slices, one below the other
    images = [
        f"<image_id>0</image_id>{whole}",
        f"<image_id>1</image_id>{whole}" + "\n".join(slices * 2),
    ]
    text = (
        f"<|im_start|>user\n{images[0]}\nCompare with<|im_end|>\n"
        "<|im_start|>assistant\nWhat?<|im_end|>\n"
        f"<|im_start|>user\nthis\n{images[1]}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(tmp_path), max_model_len=1024, num_threads=1, **exact) as llm:
        [output] = llm.chat(with_images(ASKED, PICTURES), GREEDY)
        assert output.prompt_token_ids is not None
        assert list(output.prompt_token_ids) == ids[0].tolist()
    rows = torch.cat([model.rows(own) for own in tiles])
    own = model.text.double()
    [answer] = output.outputs
    with torch.no_grad():
        embeds = own.get_input_embeddings()(ids)
        embeds[ids == tokenizer.convert_tokens_to_ids("<unk>")] = rows
        answered = own.get_input_embeddings()(torch.tensor([answer.token_ids]))
        found = own(inputs_embeds=torch.cat([embeds, answered], dim=1)).logits[0]
    expected = found[ids.shape[1] - 1 : -1].log_softmax(-1)
    for token, row, chances in zip(answer.token_ids, expected, answer.logprobs, strict=True):
        assert token == int(row.argmax())
        assert abs(chances[token].logprob - float(row[token])) <= 1e-4
    assert np.isfinite(expected.numpy()).all()
