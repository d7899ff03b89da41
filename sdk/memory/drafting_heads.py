"""Checks that a head drafts for a model, from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from sdk.api.errors import CheckpointError, RequestError, UnsupportedError
from sdk.kernels.lazy_torch import torch
from sdk.models.architecture import architecture, architectures
from sdk.models.configs.config import ModelConfig
from sdk.models.drafting_heads import LAYER, HeadConfig
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.loaders.folders.head_folder import HeadFolder

#: Layers of the model whose inputs EAGLE-3 reads, unless its config names others. A model of fewer
#: layers than this has not three different ones.
_LEAST_LAYERS = 7
_OF_BLOCK = re.compile(r"(?:^|\.)(?:mtp\.|(?:layers|blk)\.(\d+)\.)")

Shapes = dict[str, tuple[int, ...]]


def head_config(folder: HeadFolder, method: str, target: ModelConfig) -> HeadConfig:
    """The sizes of the head in ``folder``, which drafts with ``method`` for the model ``target``.

    :raises RequestError: it is of another method, or was trained for another model.
    :raises UnsupportedError: the head, or this model, cannot be used.
    """
    if folder.method != method:
        raise RequestError(
            f"speculative_config: method: expected {folder.method!r} for the head in "
            f"{folder.path}, found {method!r}; use that method, or another head"
        )
    if method == "medusa":
        head = _medusa(folder, target)
        needed = _medusa_shapes(head)
        optional: Shapes = {}
    else:
        head = _eagle(folder, target)
        needed, optional = _eagle_shapes(head, target)
    _check_tensors(folder, needed, optional)
    if "d2t" in needed or folder.has("d2t"):
        _check_tokens(folder, head)
    return head


#: What every block of multi-token prediction has beside its layer.
_BLOCK = ("eh_proj", "enorm.weight", "hnorm.weight")


def next_token_head(checkpoint: Checkpoint, target: ModelConfig) -> HeadConfig:
    """The sizes of the block of multi-token prediction in the files of the model ``target``.

    :raises UnsupportedError: this model's are not run.
    :raises RequestError: the files have none.
    """
    own, block = architecture(target.model_type), f"model.layers.{target.num_layers}"
    if own is None or own.next_token is None:
        has = sorted(each.model_type for each in architectures() if each.next_token is not None)
        raise UnsupportedError(
            f"speculative_config: method 'mtp': expected a model whose blocks of multi-token "
            f"prediction are run ({', '.join(has)}), found {target.model_type!r}; use method "
            "'ngram' or another one"
        )
    spelled = block if checkpoint.format != "gguf" else f"blk.{target.num_layers}.nextn"
    for name in _BLOCK:
        if not checkpoint.has(f"{block}.{name}"):
            raise RequestError(
                f"speculative_config: method 'mtp': {checkpoint.path}: expected a tensor "
                f"'{spelled}.{name.removesuffix('.weight')}' behind the model's "
                f"{target.num_layers} layers, found none: the block of multi-token prediction was "
                "left out of these files; use files that have it, or method 'ngram'"
            )
    layer = own.next_token.like
    if layer is None:
        layer = _full_attention(target)
    experts = checkpoint.has(f"{block}.mlp.{own.layer.router}")
    embedding, head = f"{block}.embed_tokens", f"{block}.shared_head.head"
    heads = "model.embed_tokens" if target.tie_word_embeddings else "lm_head"
    return HeadConfig(
        method="mtp",
        model=target.like_layer(layer, experts=experts),
        draft_vocab=target.vocab_size,
        features=target.hidden_size,
        block=block,
        own_embedding=checkpoint.has(embedding)
        and not checkpoint.alike(embedding, "model.embed_tokens"),
        own_head=checkpoint.has(head) and not checkpoint.alike(head, heads),
    )


def _full_attention(target: ModelConfig) -> int:
    """The first layer that attends to all tokens."""
    for layer in range(target.num_layers):
        if target.blocks_of(layer).attention and target.sliding_windows[layer] is None:
            return layer
    raise UnsupportedError(
        f"speculative_config: method 'mtp': expected a {target.model_type} model with a layer that "
        "attends to all tokens, found none; use method 'ngram' or another one"
    )


def is_of_block(head: HeadConfig, name: str) -> bool:
    """Whether a tensor of the model's files, by their or our name, is one that its own head
    loads."""
    number = head.block.rpartition(".")[2]
    found = _OF_BLOCK.search(name)
    if found is None or (found[1] or number) != number:
        return False
    if re.search(r"\bembed_tokens\b", name):
        return head.own_embedding
    return head.own_head or not re.search(r"\bshared_head(\.|_)head\b", name)


def _fail(folder: HeadFolder, what: str, expected: object, found: object) -> NoReturn:
    raise RequestError(
        f"speculative_config: model: {folder.path}: {what}: expected {expected}, found "
        f"{safe_repr(found)}; use a head that was trained for this model"
    )


def _medusa(folder: HeadFolder, target: ModelConfig) -> HeadConfig:
    for name, expected in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
    ):
        found = folder.config.get(name, expected)
        if found != expected:
            _fail(folder, name, f"{expected} as in the model", found)
    model = replace(target, model_type="medusa", num_layers=1, experts=None)
    return HeadConfig(
        method="medusa",
        model=model,
        draft_vocab=target.vocab_size,
        features=target.hidden_size,
        num_heads=folder.num_heads,
        num_blocks=folder.num_blocks,
    )


def _medusa_shapes(head: HeadConfig) -> Shapes:
    width = head.model.hidden_size
    shapes: Shapes = {}
    for index in range(head.num_heads):
        shapes |= {f"heads.{index}.blocks.{i}": (width, width) for i in range(head.num_blocks)}
        shapes[f"heads.{index}.lm_head"] = (head.draft_vocab, width)
    return shapes


def _eagle(folder: HeadFolder, target: ModelConfig) -> HeadConfig:
    method, config = folder.method, folder.config
    try:
        model = ModelConfig.from_dict(config)
    except CheckpointError as error:
        raise type(error)(f"speculative_config: model: {folder.path}: {error}") from error
    if model.vocab_size != target.vocab_size:
        _fail(folder, "vocab_size", f"{target.vocab_size} as in the model", model.vocab_size)
    ends = folder.has("model.embed_tokens") and folder.has("lm_head")
    if model.hidden_size != target.hidden_size and not (method == "eagle3" and ends):
        _fail(folder, "hidden_size", f"{target.hidden_size} as in the model", model.hidden_size)
    if method == "eagle":
        return HeadConfig(method, model, target.vocab_size, target.hidden_size)
    streams = _streams(folder, target)
    draft_vocab = config.get("draft_vocab_size") or target.vocab_size
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= target.vocab_size:
        _fail(folder, "draft_vocab_size", f"an integer in 1..{target.vocab_size}", draft_vocab)
    before = config.get("norm_before_residual", False)
    if not isinstance(before, bool):
        _fail(folder, "norm_before_residual", "true or false", before)
    features = len(streams) * target.hidden_size
    return HeadConfig(method, model, draft_vocab, features, streams, before)


def _streams(folder: HeadFolder, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the model whose inputs an EAGLE-3 head reads."""
    key, settings = "eagle_aux_hidden_state_layer_ids", folder.config.get("eagle_config")
    settings = settings if isinstance(settings, Mapping) else {}
    if settings.get("use_aux_hidden_state") is False:
        raise UnsupportedError(
            f"speculative_config: model: {folder.path}: eagle_config: use_aux_hidden_state=false "
            "is not supported; use a head that reads three layers of the model"
        )
    found: Any = folder.config.get(key, settings.get(key))
    layers = target.num_layers
    if architecture(target.model_type) is None:
        raise UnsupportedError(
            f"speculative_config: method 'eagle3': model_type {target.model_type!r} runs through "
            "transformers, which does not give the hidden states of its layers; use method 'eagle' "
            "or 'medusa'"
        )
    if found is None:
        if layers < _LEAST_LAYERS:
            raise UnsupportedError(
                f"speculative_config: model: {folder.path}: a head of EAGLE-3 reads layers 2, "
                f"L / 2 and L - 3 of the model: expected at least {_LEAST_LAYERS} layers, found "
                f"{layers}; use {key} in its config, or another method"
            )
        return (2, layers // 2, layers - 3)
    numbers = isinstance(found, list) and all(type(i) is int and 0 <= i < layers for i in found)
    if not numbers or len(found) != 3 or list(found) != sorted(set(found)):
        _fail(folder, key, f"three different layers below {layers}, in ascending order", found)
    return tuple(found)


def _eagle_shapes(head: HeadConfig, target: ModelConfig) -> tuple[Shapes, Shapes]:
    """The tensors that a head of EAGLE must have, and those that it may have."""
    c, third = head.model, head.method == "eagle3"
    hidden, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inputs = 2 * hidden if third else hidden
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    needed: Shapes = {
        f"{LAYER}.fc": (hidden, head.features if third else 2 * hidden),
        f"{attention}.q_proj": (queries, inputs),
        f"{attention}.k_proj": (keys, inputs),
        f"{attention}.v_proj": (keys, inputs),
        f"{attention}.o_proj": (hidden, queries),
        f"{mlp}.gate_proj": (inner, hidden),
        f"{mlp}.up_proj": (inner, hidden),
        f"{mlp}.down_proj": (hidden, inner),
        f"{LAYER}.post_attention_layernorm": (hidden,),
    }
    optional: Shapes = {
        "model.embed_tokens": (c.vocab_size, hidden),
        "lm_head": (head.draft_vocab, hidden),
    }
    norm: Shapes = {f"{LAYER}.input_layernorm": (hidden,)}
    if not third:
        return needed, optional | norm
    needed |= norm | {f"{LAYER}.hidden_norm": (hidden,), "model.norm": (hidden,)}
    tokens: Shapes = {"d2t": (head.draft_vocab,)}
    if head.draft_vocab == c.vocab_size:
        return needed, optional | tokens
    return needed | tokens | {"lm_head": optional.pop("lm_head")}, optional


def _check_tensors(folder: HeadFolder, needed: Shapes, optional: Shapes) -> None:
    """Compare the tensors of the files with those of the method. Biases are optional."""
    known = needed | optional
    found = {entry.name.removesuffix(".weight"): entry.shape for entry in folder.entries()}
    for name, shape in found.items():
        expected = known.get(name)
        stem, _, last = name.rpartition(".")
        if expected is None and last == "bias" and len(known.get(stem, ())) == 2:
            expected = known[stem][:1]
        if expected is None or name == "lm_head.bias":
            raise UnsupportedError(
                f"speculative_config: model: {folder.path}: tensor {name!r} is not part of a head "
                f"of method {folder.method!r}; such a variant is not supported"
            )
        if shape != expected:
            _fail(folder, f"tensor {name!r}", f"shape {list(expected)}", list(shape))
    missing = [name for name in needed if name not in found]
    if missing:
        raise RequestError(
            f"speculative_config: model: {folder.path}: expected a tensor {missing[0]!r}, found "
            f"none ({len(missing)} of {len(needed)} are missing); download the head again"
        )


def _check_tokens(folder: HeadFolder, head: HeadConfig) -> None:
    """Check that each token of the head is a different token of the model."""
    vocab = head.model.vocab_size
    tokens = torch.arange(head.draft_vocab) + folder.tensor("d2t").to(torch.int64)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        _fail(folder, "d2t", f"tokens in 0..{vocab - 1}", low if low < 0 else high)
    if len(set(tokens.tolist())) != len(tokens):
        _fail(folder, "d2t", "a different token for each row of lm_head", "some twice")
