"""Tiny tokenizers and processors of vision models: transformers' and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sdk.images.processors import image_processor
from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.requests.prompts.images import ImageReader
from sdk.requests.prompts.reader import PromptReader
from tests.text.known_templates import GEMMA3

_ENDS = ("bos_token", "eos_token")
_CONTENT = (
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)


def turns(begin: str, image: str, end: str, answer: str) -> str:
    """A template that writes the parts of a content in their order."""
    text = "{% if m.content is string %}{{ m.content }}{% else %}" + _CONTENT + "{% endif %}"
    body = begin + text.replace("IMAGE", image) + end
    all_of_them = "{% for m in messages %}" + body + "{% endfor %}"
    return all_of_them + "{% if add_generation_prompt %}" + answer + "{% endif %}"


class Family(NamedTuple):
    """One kind of vision model. ``template``: reads parts. ``plain``: reads strings alone."""

    model_type: str
    specials: tuple[str, ...]
    roles: Mapping[str, str]
    image_token: str
    template: str
    config: Mapping[str, Any]
    kind: str
    size: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Our reading of ``config.json``."""
        return {"model_type": self.model_type, **self.config}


_PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
GEMMA = Family(
    "gemma3",
    (
        *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        *("<end_of_image>", "<image_soft_token>"),
    ),
    {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "<image_soft_token>",
    GEMMA3,
    {"mm_tokens_per_image": 4, "vision_config": {"image_size": 32, "patch_size": 8}},
    "Gemma3ImageProcessor",
    {"size": {"height": 32, "width": 32}},
)
GEMMA4 = Family(
    "gemma4",
    (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|image|>", "<|image>", "<image|>"),
        *("<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
    ),
    {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "<|image|>",
    "<bos>" + turns("<|turn>{{ m.role }}\n", "<|image|>", "<turn|>\n", "<|turn>model\n"),
    {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2}},
    "Gemma4ImageProcessor",
    {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
)
QWEN = Family(
    "qwen2_5_vl",
    (
        *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        "<|video_pad|>",
    ),
    {"eos_token": "<|im_end|>"},
    "<|image_pad|>",
    turns(
        "<|im_start|>{{ m.role }}\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}},
    "Qwen2VLImageProcessor",
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}},
)
LLAVA = Family(
    "llava",
    ("<s>", "</s>", "<image>"),
    {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"},
    "<image>",
    turns("{{ m.role.upper() }}: ", "<image>\n", " ", "ASSISTANT:"),
    {
        "vision_config": {"image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"},
        "vision_feature_select_strategy": "default",
    },
    "CLIPImageProcessor",
    {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
)
#: Without a chat template: prompts are texts.
PALIGEMMA = Family(
    "paligemma",
    ("<bos>", "<eos>", "<image>"),
    {"bos_token": "<bos>", "eos_token": "<eos>", "image_token": "<image>"},
    "<image>",
    "",
    {"vision_config": {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}},
    "SiglipImageProcessor",
    {"size": {"height": 28, "width": 28}, "image_seq_length": 4},
)
FAMILIES = {one.model_type: one for one in (GEMMA, GEMMA4, QWEN, LLAVA)}


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def with_images(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """The messages with an image in each plain part."""
    left = iter(images)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(left)} if part["type"] == "image" else part

    return [
        one
        if isinstance(one["content"], str)
        else {**one, "content": [filled(part) for part in one["content"]]}
        for one in messages
    ]


def _backend(specials: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with a few merges, of line breaks too: where a text is cut can be seen."""
    vocab = {one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    pairs = ("Ċ Ċ", "ĊĊ Ċ", "u s", "e r", "us er", "i m", "n o", "y e", "ye s")
    for pair in map(str.split, pairs):
        merges.append((pair[0], pair[1]))
        vocab["".join(pair)] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
    return made


def write_tokenizer(family: Family, folder: Path, template: str | None = None) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(exist_ok=True, parents=True)
    _backend(family.specials).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": family.template if template is None else template,
        **{
            name: token
            for name, token in family.roles.items()
            if name in ("bos_token", "eos_token")
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def prompt_reader(
    family: Family, model: Path, template: str | None = None, *, length: int = 4096, **how: Any
) -> PromptReader:
    """Ours. ``how``: of the reader of images."""
    write_tokenizer(family, model, template)
    tokenizer = tokenizer_from_folder(model)
    settings = {"image_processor_type": family.kind, **family.size}
    token = tokenizer.token_to_id(family.image_token)
    assert token is not None
    images = ImageReader(image_processor(family.values, settings), token, **{"most": 8, **how})
    return PromptReader(
        tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=length, images=images
    )


def plain_template() -> str:
    """A template that writes the content of each message as a string."""
    return _PLAIN


def reference_ids(
    family: Family, messages: Sequence[Mapping[str, Any]], pictures: Sequence[NDArray[np.uint8]]
) -> list[int]:
    """The token ids of :func:`reference_inputs`."""
    [ids] = reference_inputs(family, messages, pictures)["input_ids"].tolist()
    return list(ids)


def reference_tokenizer(family: Family) -> Any:
    """transformers' tokenizer of a family."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(family.specials),
        chat_template=family.template,
        bos_token=family.roles.get("bos_token"),
        eos_token=family.roles.get("eos_token"),
        extra_special_tokens={
            name: one
            for name, one in family.roles.items()
            if name not in ("bos_token", "eos_token")
        },
    )


def reference_inputs(
    family: Family, messages: Sequence[Mapping[str, Any]], pictures: Sequence[NDArray[np.uint8]]
) -> dict[str, Any]:
    """What transformers' processor makes of a conversation: the arguments of its model. Parts are
    ``{"type": "image"}``."""
    tokenizer = reference_tokenizer(family)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pixels = getattr(transformers, f"{family.kind}Pil")(**family.size)
    if family.model_type == "gemma3":
        count = family.config["mm_tokens_per_image"]
        made = transformers.Gemma3Processor(pixels, tokenizer, image_seq_length=count)
    elif family.model_type == "llava":
        made = transformers.LlavaProcessor(
            pixels,
            tokenizer,
            patch_size=family.config["vision_config"]["patch_size"],
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    elif family.model_type == "gemma4":
        made = _without_videos(transformers.Gemma4Processor, None, pixels, tokenizer, None)
    else:
        made = _without_videos(transformers.Qwen2_5_VLProcessor, pixels, tokenizer, None)
    how = {"add_special_tokens": False, "return_tensors": "pt", "padding": False}
    return dict(made(text=[text], images=list(pictures) or None, **how))


def _without_videos(kind: Any, *parts: Any) -> Any:
    """A processor that transformers makes only together with one of videos, which needs
    torchvision, or of sound."""

    class Images(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, *args: Any) -> None:
            """There is no processor of videos."""

    return Images(*parts)


def paligemma_ids(text: str, image: NDArray[np.uint8]) -> list[int]:
    """What transformers' processor of PaliGemma makes of a text."""
    [ids] = paligemma_inputs(text, image, PALIGEMMA.size["size"], 4)["input_ids"].tolist()
    return list(ids)


def paligemma_inputs(
    text: str, image: NDArray[np.uint8], size: Mapping[str, int], count: int
) -> dict[str, Any]:
    """The arguments of transformers' model for a text with an image of ``count`` tokens."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(PALIGEMMA.specials),
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    pixels = transformers.SiglipImageProcessorPil(size=dict(size))
    pixels.image_seq_length = count
    made = transformers.PaliGemmaProcessor(pixels, tokenizer)
    given = dict(made(text=[text], images=[image], return_tensors="pt"))
    given.pop("labels", None)
    return given


def token_of(family: Family, folder: Path, spelling: str | None = None) -> int:
    """The id of a token of a folder: by default of the one that stands for images."""
    found = tokenizer_from_folder(folder).token_to_id(spelling or family.image_token)
    assert found is not None
    return found
