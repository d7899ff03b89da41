"""Tensors of a file that the model has not taken: do they change what it computes?

A tensor that belongs to the language model and is not used means that another model is computed
than the file holds: llama.cpp refuses such a file, too. Tensors beside the language model (a vision
tower), buffers that are computed from the config, layers after the last one (multi-token
prediction), matrices of keys and values in layers that read those of another one, and scales for
activations that are not quantized here change nothing.

torch is not imported, as in :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sdk.quant.checkpoint import VISION_ROOT
from sdk.quant.errors import CheckpointError

#: Where a multimodal model keeps its language model.
_TEXT = ("model.language_model", "language_model")
#: The head of a language model, in the spellings of files.
_HEADS = ("lm_head", "embed_out", "output")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|blocks|h)\.(\d+)\.")
#: What makes keys and values, in folders and GGUF files.
_OF_KEYS = re.compile(r"\.(?:self_attn\.[kv]_(?:proj|norm)|attn_[kv](?:_norm)?)\.\w+$")
#: Why a tensor changes nothing, by its name. GPT-2's and GPT-NeoX's ``attn.bias`` are causal masks.
_HARMLESS = (
    (
        "computed from the config",
        re.compile(
            r"(^|\.)(rotary_emb\.\w+|inv_freq|position_ids|masked_bias|attn_rot_embd\.weight"
            r"|attn\.bias|attention\.bias|relative_pe\.slopes)$"
        ),
    ),
    ("of a first layer, which has no values before", re.compile(r"^blk\.0\.time_mix_v[012]\.")),
    ("of an indexer, which chooses all tokens of a context so short", re.compile(r"\.indexer\.")),
    (
        "of T5's decoder, which does not run: the encoder makes vectors",
        re.compile(r"^(?:decoder\.block|dec)\."),
    ),
    ("of multi-token prediction", re.compile(r"(^|\.)(mtp\w*|nextn\w*)\.")),
    (
        "of quantized activations or caches",
        re.compile(
            r"[._](input|output|act|activation|q|k|v|kv|qkv|prob|prob_output|softmax)"
            r"_(scale|global_scale|zero_point|scale_inv|scale_ub|amax)$"
        ),
    ),
)
#: What checkpoints of encoders have after the last layer, for one task or another. An engine of
#: vectors needs none of it in a step, so it is not reported. dense_2 and dense_3 of a GGUF file
#: and the projection of a dual encoder are applied to pooled vectors.
_OF_A_TASK = re.compile(
    r"^(?:\w+\.)?(?:lm_head|cls|pooler|classifier|score|head|decoder(?!\.block)|output|output_bias"
    r"|qa_outputs|dense_[23]|vocab_\w+|discriminator_predictions|generator_\w+|text_projection"
    r"|visual_projection)\.|(?:^|\.)position_ids$|^logit_(?:scale|bias)$"
)
#: Names in one message.
_SHOWN = 3


class Leftovers(NamedTuple):
    """``of_the_model``: tensors that belong to the language model. ``harmless``: the others, each
    with why it changes nothing."""

    of_the_model: tuple[str, ...]
    harmless: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        unused: Iterable[str],
        everything: Iterable[str],
        layers: int,
        *,
        ignored: Sequence[str] = (),
        sharing: Collection[int] = (),
        only_text: bool = False,
        generates: bool = True,
    ) -> Leftovers:
        """Sort the tensors ``unused`` of a file with tensors ``everything``.

        ``layers``: of the model. ``ignored``: patterns of names that the model's own code ignores.
        ``sharing``: layers that read the keys and values of another one. llama.cpp requires
        matrices for theirs in files of Gemma 3n, and no code reads them.
        ``only_text``: the file holds nothing beside a language model (GGUF). ``generates``: the
        model has a head; a file may have one anyway.
        """
        left = tuple(name for name in unused if generates or not _OF_A_TASK.search(name))
        used = set(everything) - set(left)
        roots = {_root(name) for name in (left if only_text else used)} | {*_HEADS}
        own: list[str] = []
        harmless: list[tuple[str, str]] = []
        for name in left:
            why = _harmless(name, roots, layers, ignored, sharing)
            if why is None:
                own.append(name)
            else:
                harmless.append((name, why))
        return cls(tuple(own), tuple(harmless))

    def check(self, path: Path, model_type: str) -> None:
        """:raises CheckpointError: there are tensors of the language model."""
        names = self.of_the_model
        if not names:
            return
        shown = ", ".join(map(repr, names[:_SHOWN]))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(
            f"{path}: expected a {model_type} model to use every tensor of its language model, "
            f"found {shown}{more} unused: without them the results would be another model's. "
            "Check that config.json (or the file's metadata) belongs to these weights"
        )

    def warnings(self) -> list[str]:
        """One line for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.harmless:
            by_reason.setdefault(why, []).append(name)
        lines: list[str] = []
        for why, names in by_reason.items():
            if len(names) == 1:
                lines.append(f"unused tensor {names[0]} ({why})")
            else:
                lines.append(f"{len(names)} unused tensors, such as {names[0]} ({why})")
        return lines


def _root(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    found = next((text for text in _TEXT if name.startswith(f"{text}.")), None)
    return found or name.partition(".")[0]


def _harmless(
    name: str, roots: set[str], layers: int, ignored: Sequence[str], sharing: Collection[int]
) -> str | None:
    """Why a tensor changes nothing; ``None`` if it may."""
    for why, pattern in _HARMLESS:
        if pattern.search(name):
            return why
    layer = None if name.startswith(VISION_ROOT) else _LAYER.search(name)
    if layer is not None and int(layer[1]) >= layers:
        return f"of layers after the model's {layers}"
    if layer is not None and int(layer[1]) in sharing and _OF_KEYS.search(name):
        return "of layers that read the keys and values of another one"
    if any(re.search(pattern, name) for pattern in ignored):
        return "which transformers' model ignores"
    return None if _root(name) in roots else "beside the language model"
