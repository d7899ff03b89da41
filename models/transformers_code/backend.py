"""Any causal LM of transformers: its modeling code with our projections and paged attention.

The model is built without weights (``accelerate.init_empty_weights``), then

* every ``nn.Linear`` becomes our :class:`~sdk.models.projections.Projection` with packed weights;
* every ``nn.Embedding`` looks up packed rows; other weights (norms, biases) are float32;
* attention goes through ``paged_attention`` below, which transformers calls by name;
* transformers has no cache and builds no mask: it gets positions, and the pages are ours.

All requests of a step run as one sequence of T tokens. That is correct because a decoder treats
tokens independently, except in attention. It runs on one rank only. On a CPU a step is recorded:
our operators, and between them what is left of torch's (:mod:`sdk.kernels.torch_tape`). A model of
which that is not possible runs operation by operation, at half the speed for one request. Rotary
scalings that depend on the length (``dynamic``, ``longrope``) follow transformers: the longest
position of a step decides for all its requests.

Side effects on the host: one entry in transformers' registry of attention functions, under a unique
name; it acts only on modules that we built. While a model is constructed, accelerate
replaces ``nn.Module.register_parameter`` for the whole process and puts it back.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from sdk.kernels.errors import CaptureError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.packages import missing, package
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.keys import check_fixed
from sdk.models.other_models import (
    ENCODER,
    ENCODER_DECODER,
    IMAGES,
    SPEECH,
    TEXT_AND_IMAGES,
)
from sdk.models.parallel import Mesh
from sdk.models.projections import Linear
from sdk.models.transformers_code.proof import prove_attention, unrecorded_reason
from sdk.models.transformers_code.weights import Filling
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

ATTENTION_NAME = "embedlm_paged"
#: The attribute of modules with a layer_idx that holds their model's pages.
BINDING = "embedlm_attention"
#: accelerate's patch is not thread-safe: two at once would restore each other's patched method.
_CONSTRUCTION = Lock()
#: Part of the name of transformers' list of the models for a task -> what a model is that is in
#: such a list and in none of decoders. The first match decides.
_TASKS = (
    ("IMAGE_TEXT_TO_TEXT", TEXT_AND_IMAGES),
    ("SEQ_TO_SEQ_CAUSAL_LM", ENCODER_DECODER),
    ("MASKED_LM", ENCODER),
    ("SEQUENCE_CLASSIFICATION", ENCODER),
    *((part, SPEECH) for part in ("SPEECH", "CTC", "AUDIO", "WAVEFORM", "SPECTROGRAM")),
    *((part, IMAGES) for part in ("IMAGE", "VIDEO", "DETECTION", "DEPTH", "MASK_GENERATION")),
)


def build_hf_model(
    checkpoint: Checkpoint, values: Mapping[str, Any], mesh: Mesh, ops: Ops
) -> HFModel:
    """See :func:`sdk.models.auto.build_model`."""
    hf_config = _read_config(values)
    name = hf_config.model_type
    if mesh.size > 1 or mesh.stages > 1:
        raise UnsupportedError(
            f"model_type {name!r} runs through transformers, on one rank only: "
            f"expected tensor_parallel_size=1, found {mesh.size}, and pipeline_parallel_size=1, "
            f"found {mesh.stages}"
        )
    config = _facts(hf_config)
    model = _construct(hf_config)
    return HFModel(model, config, checkpoint, ops)


def read_hf_config(values: Mapping[str, Any]) -> ModelConfig:
    """See :func:`sdk.models.auto.read_config`."""
    return _facts(_read_config(values))


def _read_config(values: Mapping[str, Any]) -> Any:
    """transformers' config object; nothing in the file can make it run code or quantize."""
    transformers = package("transformers", "a model that runs through transformers' code needs")
    name = str(values.get("model_type"))
    if name not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {name!r}: neither this package nor transformers "
            f"{transformers.__version__} knows it; a newer transformers may"
        )
    skipped = ("auto_map", "quantization_config", "model_type", "architectures")
    kept = {key: value for key, value in values.items() if key not in skipped}
    try:
        config = transformers.CONFIG_MAPPING[name](**kept)
    except ImportError as error:
        raise missing(error, f"config of {name!r}: transformers needs") from error
    except Exception as error:  # transformers raises whatever its validators raise
        raise CheckpointError(f"config of {name!r}: transformers rejects it: {error}") from error
    _check_kind(config)
    check_fixed(values, f"config of {name!r}")
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedError(
            f"model_type {name!r}: layer_types: expected full_attention or sliding_attention, "
            f"found {sorted(unknown)[0]!r}"
        )
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise CheckpointError(
            f"config of {name!r}: layer_types has sliding_attention, "
            "expected a sliding_window of at least 1 token"
        )
    return config


def _check_kind(config: Any) -> None:
    """Check that it is a decoder whose attention transformers calls by name.

    :raises UnsupportedError: names what the model is instead.
    """
    import transformers

    name, release = config.model_type, transformers.__version__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"model_type {name!r}: {ENCODER_DECODER}")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"model_type {name!r}: {_what_it_is(config)}")
    modeling = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedError(
            f"model_type {name!r}: in transformers {release} its attention is code of its own, "
            "which cannot use a paged KV cache; run it with transformers"
        )
    if getattr(config, "is_decoder", True) is False and hasattr(config, "type_vocab_size"):
        raise UnsupportedError(f"model_type {name!r} (is_decoder is false): {ENCODER}")


def _what_it_is(config: Any) -> str:
    """What a model is that continues no text: by the tasks that transformers has a class for."""
    from transformers.models.auto import modeling_auto

    lists = {key: value for key, value in vars(modeling_auto).items() if key.endswith("_NAMES")}
    for part, refusal in _TASKS:
        for key, value in lists.items():
            if part in key and config.model_type in value:
                return str(refusal)
    return "no model that continues a text; expected a causal language model"


def _facts(hf_config: Any) -> ModelConfig:
    """The sizes that the engine needs."""
    try:
        return _sizes(hf_config, hf_config.get_text_config())
    except CheckpointError:
        raise
    except Exception as error:  # a config class raises its own where layers differ (Gemma 4)
        raise UnsupportedError(
            f"model_type {hf_config.model_type!r}: expected layers of one size: {error}"
        ) from error


def _sizes(hf_config: Any, c: Any) -> ModelConfig:
    heads = getattr(c, "num_attention_heads", None)
    kv_heads = 1 if getattr(c, "multi_query", False) else getattr(c, "num_key_value_heads", None)
    head_dim = getattr(c, "head_dim", None)
    hidden = getattr(c, "hidden_size", None)
    if getattr(c, "kv_lora_rank", None):  # latent attention: kept as keys and values of every head
        kv_heads, head_dim = heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    found = ModelConfig.from_dict(
        {
            "model_type": "transformers",  # rules of a model of ours do not apply to its code
            "vocab_size": getattr(c, "vocab_size", None),
            "hidden_size": hidden,
            "intermediate_size": getattr(c, "intermediate_size", None) or hidden,
            "num_hidden_layers": getattr(c, "num_hidden_layers", None),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads or heads,
            "head_dim": head_dim,
            "rms_norm_eps": getattr(c, "rms_norm_eps", None) or 1e-5,
            "max_position_embeddings": getattr(c, "max_position_embeddings", None),
            "tie_word_embeddings": bool(getattr(c, "tie_word_embeddings", False)),
        }
    )
    return replace(found, model_type=hf_config.model_type)


def _construct(hf_config: Any) -> Any:
    """The module tree, parameters on the meta device, computed buffers (rotary) real."""
    accelerate = package("accelerate", "a model that runs through transformers' code needs")
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    name = hf_config.model_type
    try:
        with _CONSTRUCTION, accelerate.init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
            )
    except ImportError as error:
        raise missing(error, f"model_type {name!r}: transformers' code needs") from error
    except Exception as error:  # a tree transformers cannot build from this config
        message = f"model_type {name!r}: transformers cannot build it: {error}"
        raise UnsupportedError(message) from error
    body = getattr(model, model.base_model_prefix, None)
    if body is None or "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedError(f"model_type {name!r}: transformers' model takes no position_ids")
    return model.eval()


@dataclass(slots=True)
class PagedStep:
    """The state that attention functions of one model share during a step."""

    ops: Ops
    name: str
    config: Any
    batch: AttentionBatch | None = None
    pages: Sequence[KVPages] = ()
    layers_run: int = 0

    def window(self, layer: int, told: int | None) -> int | None:
        """The sliding window that transformers gives, else that of the config's layer types."""
        kinds = getattr(self.config, "layer_types", None)
        if told is None and kinds and kinds[layer] == "sliding_attention":
            told = self.config.sliding_window
        return told or None  # models without a window have 0 or null


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v ``[1, heads, T, head_dim]``, already rotated.

    ``s_aux`` are attention sinks. Values may be shorter than keys (latent attention): their pages
    are padded with zeros. Returns ``[1, T, heads, head_dim of v]``.
    """
    step: PagedStep = getattr(module, BINDING)
    assert step.batch is not None
    if attention_mask is not None:
        raise UnsupportedError(
            f"model_type {step.name!r}: its attention has a mask of its own, expected a causal one"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pages = step.pages[layer]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    width = v.shape[2]
    if width < k.shape[2]:
        v = torch.cat((v, torch.zeros_like(k[..., width:])), dim=2)
    expected = (pages.k.shape[1], pages.k.shape[3])
    for part, x in (("key", k), ("value", v)):
        if tuple(x.shape[1:]) != expected:
            raise UnsupportedError(
                f"model_type {step.name!r}, layer {layer}: expected {part} heads x head_dim "
                f"{expected}, found {tuple(x.shape[1:])}: this kind of attention has no cache yet"
            )
    nothing = q[:, 0, :0].float()  # zero rotated dimensions
    step.ops.rope_and_cache(q, k, v, nothing, nothing, step.batch, pages)
    y = step.ops.attention(
        q,
        pages,
        step.batch,
        scale=q.shape[2] ** -0.5 if scaling is None else scaling,
        window=step.window(layer, sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    step.layers_run += 1
    return y.view(1, *q.shape)[..., :width], None


class GivenHidden(nn.Module):
    """Replaces the body, so that the causal LM's forward runs only its head.

    ``output_type``: the type that the body returns; every model reads other fields of it.
    """

    output_type: Any = None

    @property
    def decoder(self) -> GivenHidden:
        """OPT's causal LM calls the decoder inside its body."""
        return self

    def forward(self, *no_ids: None, inputs_embeds: Tensor, **unused: Any) -> Any:
        return self.output_type(last_hidden_state=inputs_embeds)


class HFModel:
    """A :class:`sdk.models.decoder.CausalLM` around transformers' model."""

    def __init__(self, model: Any, config: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> None:
        self.config = config
        #: Patterns of the names of tensors that transformers' class leaves out without a warning.
        self.ignored_tensors: tuple[str, ...] = tuple(
            getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        )
        self._ops = ops
        self._step = PagedStep(ops, config.model_type, model.config.get_text_config())
        self._linears = Filling(checkpoint, ops, config.tie_word_embeddings, model).fill()
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, BINDING, self._step)
        self._body = getattr(model, model.base_model_prefix)
        self._given = GivenHidden()
        setattr(model, model.base_model_prefix, self._given)
        self._head = model
        #: Why a step cannot be recorded; ``None`` if it can.
        self.unrecorded: str | None = None
        prove_attention(self)
        #: What torch does in a recorded step, by part of the model; the proof notes it first.
        self._noted: dict[str, list[str]] = {}
        self.unrecorded = unrecorded_reason(self)

    @property
    def ops(self) -> Ops:
        """What its layers run on."""
        return self._ops

    @property
    def layers_run(self) -> int:
        """The layers that attended through the pages in the last step."""
        return self._step.layers_run

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """See :class:`sdk.models.decoder.CausalLM`."""
        return iter(self._linears)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`."""
        step = self._step
        step.batch, step.pages, step.layers_run = batch, kv, 0
        given = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        try:
            with self._recorded("body", batch.positions):
                out = self._body(
                    **{given: inputs.unsqueeze(0)},
                    position_ids=batch.positions.unsqueeze(0),
                    use_cache=False,
                )
        finally:
            step.batch, step.pages = None, ()
        self._given.output_type = type(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`."""
        found: Tensor = self._body.get_input_embeddings()(token_ids)
        return found.to(torch.float32)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`."""
        with self._recorded("head", hidden):
            found: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return found.to(torch.float32)

    @contextmanager
    def _recorded(self, part: str, rows: Tensor) -> Iterator[None]:
        """Inside, what torch does joins a step that is being recorded, if one is.

        :raises CaptureError: it cannot be, or torch does something else than in the proof.
        """
        recording = self._ops.recording
        if not recording.active:
            yield
            return
        if self.unrecorded is not None:
            raise CaptureError(self.unrecorded)
        try:
            with recording.torch_operations(rows) as noted:
                yield
        except CaptureError:
            raise
        except RuntimeError as error:  # a view that the layout of a buffer does not allow
            raise CaptureError(f"a step cannot be recorded: {error}") from error
        if self._noted.setdefault(part, noted) != noted:
            raise CaptureError(
                f"model_type {self.config.model_type!r}: expected the operations of a short step "
                f"({len(self._noted[part])}) in a long one, found others ({len(noted)})"
            )
