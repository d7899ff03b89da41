"""What speculative decoding takes of an engine's memory, and the model that drafts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

from sdk.config import EngineConfig
from sdk.engine.rank.kv_cache import drafting_kv_spec
from sdk.engine.scheduling.prompt_lookup import LOOKUP_BYTES
from sdk.errors import RequestError, SdkError, UnsupportedError
from sdk.memory.demand import Demand, draft_tokens
from sdk.memory.files import open_model
from sdk.memory.resolve import model_config
from sdk.memory.weights import weight_bytes
from sdk.models.config import ModelConfig
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import OnlineQuantizedCheckpoint, online_quantized
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import Tokenizer
from sdk.speculative_config import SpeculativeConfig

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
    assert speculative.model is not None  # SpeculativeConfig has checked it
    own = replace(
        config,
        model=os.fspath(speculative.model),
        quantization=speculative.scheme,
        filename=None,
        revision=None,
        hf_overrides=None,
        load_format="auto",
        speculative_config=None,
    )
    try:
        checkpoint = open_model(own)
    except SdkError as error:
        raise type(error)(f"speculative_config: model: {error}") from error
    try:
        yield own, checkpoint, model_config(own, checkpoint)
    finally:
        checkpoint.close()


def with_drafts(demand: Demand, config: EngineConfig, checkpoint: Checkpoint) -> Demand:
    """The demand with what speculative decoding needs."""
    speculative = config.speculative_config
    if speculative is None:
        return demand
    assert isinstance(speculative, SpeculativeConfig)  # EngineConfig has parsed it
    most = speculative.num_speculative_tokens
    tokens = draft_tokens(demand.model.vocab_size, most, demand.max_num_seqs)
    demand = replace(demand, draft_tokens=tokens)
    if speculative.method == "self":
        return _with_own_weights(demand, config, checkpoint, speculative)
    if speculative.method == "draft_model":
        return _with_draft_model(demand, config, speculative)
    searched = LOOKUP_BYTES if speculative.method == "ngram" else 0
    return replace(demand, drafter_bytes=searched)


def _with_own_weights(
    demand: Demand, config: EngineConfig, checkpoint: Checkpoint, speculative: SpeculativeConfig
) -> Demand:
    stored = checkpoint.inner if isinstance(checkpoint, OnlineQuantizedCheckpoint) else checkpoint
    try:
        packed = online_quantized(stored, speculative.scheme)
    except UnsupportedError as error:
        raise UnsupportedError(f"speculative_config: method 'self': {error}") from error
    own = replace(config, quantization=speculative.scheme)
    return _with_weights(demand, own, packed, demand.model)


def _with_draft_model(
    demand: Demand, config: EngineConfig, speculative: SpeculativeConfig
) -> Demand:
    with opened_draft_model(config, speculative) as (own, checkpoint, model):
        if model.vocab_size != demand.model.vocab_size:
            raise RequestError(
                f"speculative_config: model: expected a vocabulary of {demand.model.vocab_size} "
                f"tokens as in the model, found {model.vocab_size} in {checkpoint.path}"
            )
        demand = _with_weights(demand, own, checkpoint, model)
    try:
        pages = drafting_kv_spec(model, demand.page_size, demand.kv_dtype).page_bytes
    except ValueError as error:
        raise UnsupportedError(f"speculative_config: model: {error}") from error
    return replace(
        demand,
        page_bytes=demand.page_bytes + pages,
        drafting_prompts=True,
    )


def _with_weights(
    demand: Demand, config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> Demand:
    """With the weights of a checkpoint, which are loaded after the model's own."""
    own, drafting = demand.weights, weight_bytes(config, checkpoint)
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
