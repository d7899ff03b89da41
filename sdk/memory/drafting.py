"""What speculative decoding takes of an engine's memory, and the model that drafts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError, SdkError, UnsupportedError
from sdk.api.speculative_config import SpeculativeConfig
from sdk.engine.rank.kv_cache import drafting_kv_spec
from sdk.engine.scheduling.prompt_lookup import LOOKUP_BYTES
from sdk.loaders.hub.hub import HubAccess
from sdk.memory.demand import MemoryDemand, draft_tokens
from sdk.memory.drafting_heads import head_config, is_of_block, next_token_head
from sdk.memory.resolve import model_config, open_model
from sdk.memory.weights import end_bytes, weight_bytes
from sdk.models.configs.config import ModelConfig
from sdk.models.drafting_heads import HeadConfig
from sdk.quant.caches import StateCache
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import OnlineQuantizedCheckpoint, online_quantized
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import Tokenizer

#: Of all tokens, at most this share may differ between two models of the same vocabulary: names of
#: control tokens differ between the versions of a model.
_MOST_DIFFERENT = 0.01


@contextlib.contextmanager
def opened_draft_model(
    config: EngineConfig, speculative: SpeculativeConfig
) -> Iterator[tuple[EngineConfig, Checkpoint, ModelConfig]]:
    """The files of the ``draft_model``, with the options that concern it.

    :raises SdkError: they cannot be read. The message says that they are those that draft.
    """
    from sdk.loaders.folders.head_folder import method_of_folder

    own = _options(config, speculative)
    method = method_of_folder(own.model)
    if method is not None:
        raise RequestError(
            f"speculative_config: model: expected a whole model, found a head in {own.model}; use "
            f"method {method!r}"
        )
    try:
        checkpoint = open_model(own)
    except SdkError as error:
        raise type(error)(f"speculative_config: model: {error}") from error
    try:
        yield own, checkpoint, model_config(own, checkpoint)
    finally:
        checkpoint.close()


def _options(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """The options for the files that draft."""
    assert speculative.model is not None  # SpeculativeConfig has checked it
    return replace(
        config,
        model=os.fspath(speculative.model),
        quantization=speculative.scheme,
        filename=None,
        revision=None,
        hf_overrides=None,
        load_format="auto",
        speculative_config=None,
    )


@contextlib.contextmanager
def opened_head(
    config: EngineConfig, speculative: SpeculativeConfig, target: ModelConfig
) -> Iterator[tuple[EngineConfig, Checkpoint, HeadConfig]]:
    """The files of the head that drafts for ``target``, with the options that concern it.

    :raises SdkError: they cannot be read, or it was not trained for this model.
    """
    from sdk.loaders.folders.head_folder import open_head

    own = _options(config, speculative)
    hub = HubAccess(None, config.local_files_only, config.download_dir)
    try:
        folder = open_head(own.model, hub)
    except SdkError as error:
        raise type(error)(f"speculative_config: model: {error}") from error
    try:
        head = head_config(folder, speculative.method, target)
        yield own, online_quantized(folder, speculative.scheme), head
    finally:
        folder.close()


def with_drafts(demand: MemoryDemand, config: EngineConfig, checkpoint: Checkpoint) -> MemoryDemand:
    """The demand with what speculative decoding needs."""
    speculative = config.speculative_config
    if speculative is None:
        return demand
    assert isinstance(speculative, SpeculativeConfig)  # EngineConfig has parsed it
    most = speculative.num_speculative_tokens
    tokens = draft_tokens(demand.model.vocab_size, most, demand.max_num_seqs)
    searched = 0 if speculative.least_match is None else LOOKUP_BYTES
    demand = replace(demand, draft_tokens=tokens, drafter_bytes=searched)
    if speculative.method == "self":
        return _with_own_weights(demand, config, checkpoint, speculative)
    if speculative.method == "draft_model":
        return _with_draft_model(demand, config, speculative)
    if speculative.is_head:
        return _with_head(demand, config, checkpoint, speculative)
    return demand


def _with_own_weights(
    demand: MemoryDemand,
    config: EngineConfig,
    checkpoint: Checkpoint,
    speculative: SpeculativeConfig,
) -> MemoryDemand:
    stored = checkpoint.inner if isinstance(checkpoint, OnlineQuantizedCheckpoint) else checkpoint
    try:
        packed = online_quantized(stored, speculative.scheme)
    except UnsupportedError as error:
        raise UnsupportedError(f"speculative_config: method 'self': {error}") from error
    own = replace(config, quantization=speculative.scheme)
    return _with_weights(demand, own, packed, demand.model)


def _with_draft_model(
    demand: MemoryDemand, config: EngineConfig, speculative: SpeculativeConfig
) -> MemoryDemand:
    with opened_draft_model(config, speculative) as (own, checkpoint, model):
        if model.vocab_size != demand.model.vocab_size:
            raise RequestError(
                f"speculative_config: model: expected a vocabulary of {demand.model.vocab_size} "
                f"tokens as in the model, found {model.vocab_size} in {checkpoint.path}"
            )
        demand = _with_weights(demand, own, checkpoint, model)
    return _with_pages(demand, model)


def _with_head(
    demand: MemoryDemand,
    config: EngineConfig,
    checkpoint: Checkpoint,
    speculative: SpeculativeConfig,
) -> MemoryDemand:
    target, seqs = demand.model, demand.max_num_seqs
    if speculative.is_own_head:
        head = next_token_head(checkpoint, target)
        demand = _with_weights(demand, config, checkpoint, head.model, partial(is_of_block, head))
        uses_model = not (head.own_embedding and head.own_head)
    else:
        with opened_head(config, speculative, target) as (own, folder, head):
            demand = _with_weights(demand, own, folder, head.model)
            uses_model = not (folder.has("model.embed_tokens") and folder.has("lm_head"))
    if config.tensor_parallel_size > 1 and head.has_layer and uses_model:
        # rank 0 loads the whole embedding and head again: each rank has only a part of them
        again = end_bytes(config, checkpoint)
        demand = replace(demand, drafting_weights=demand.drafting_weights + again)
        more = replace(demand.weights, total=demand.weights.total + again)
        demand = replace(demand, weights=replace(more, loading=max(more.loading, more.total)))
    most = min(speculative.num_speculative_tokens, head.num_heads if not head.has_layer else 64)
    copies = 2 if head.draft_vocab != target.vocab_size else 0  # of logits, to spread them
    demand = replace(
        demand,
        draft_tokens=draft_tokens(target.vocab_size, most, seqs),
        feature_bytes=4 * (2 * head.features + head.model.hidden_size),
        drafter_bytes=demand.drafter_bytes + copies * 4 * seqs * target.vocab_size,
    )
    return _with_pages(demand, head.model) if head.has_layer else demand


def _with_pages(demand: MemoryDemand, model: ModelConfig) -> MemoryDemand:
    """With the keys and values of what drafts."""
    if any(isinstance(cache, StateCache) for cache in model.caches):
        raise UnsupportedError(
            f"speculative_config: model: expected one with keys and values only, found "
            f"{model.model_type}, which has recurrent states; draft with another model"
        )
    try:
        pages = drafting_kv_spec(model, demand.page_size, demand.kv_dtype).page_bytes
    except ValueError as error:
        raise UnsupportedError(f"speculative_config: model: {error}") from error
    return replace(demand, page_bytes=demand.page_bytes + pages, drafting_prompts=True)


def _with_weights(
    demand: MemoryDemand,
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    only: Callable[[str], bool] | None = None,
) -> MemoryDemand:
    """With the weights of a checkpoint, ``only`` some of them, which are loaded after the model's
    own."""
    own, drafting = demand.weights, weight_bytes(config, checkpoint, model, only)
    both = replace(
        own,
        total=own.total + drafting.total,
        loading=max(own.loading, own.total + drafting.loading),
    )
    return replace(demand, weights=both, drafting_weights=drafting.total, drafting_model=model)


def check_same_vocabulary(tokenizer: Tokenizer | None, drafting: Tokenizer | None) -> None:
    """Reject a model that drafts with other tokens: none of its drafts would be accepted.

    :raises RequestError: more than 1 % of the tokens differ.
    """
    if tokenizer is None or drafting is None:
        return
    size = max(tokenizer.vocab_size, drafting.vocab_size)
    different = [i for i in range(size) if tokenizer.id_to_token(i) != drafting.id_to_token(i)]
    if len(different) > _MOST_DIFFERENT * size:
        token = different[0]
        raise RequestError(
            f"speculative_config: model: expected the vocabulary of the model, found "
            f"{len(different)} of {size} tokens that differ: token {token} is "
            f"{safe_repr(drafting.id_to_token(token))} instead of "
            f"{safe_repr(tokenizer.id_to_token(token))}"
        )
