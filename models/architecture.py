"""How the project describes a model architecture, and where it finds the descriptions.

Every module of ``models/architectures`` has a constant ``ARCHITECTURE``: the facts of one model.
:mod:`sdk.models.decoder` builds its layers from them, and the loaders, the config reader and the
quantizers read from it whatever else differs between models. So a new model is one new file, as
long as it has layers that exist. Defaults describe a plain Llama.

Neither this module nor those of ``models/architectures`` import torch: the headers of a GGUF file
are shown in 0.3 s without it, in 3 s with it. The classes are named tuples because Python makes one
in 0.2 ms, a dataclass in 1.8 ms.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from sdk.kernels.operators.route_rule import SOFTMAX, RouteRule
from sdk.models.architecture_names import GGUF_NAMES, MODEL_TYPES
from sdk.models.configs.dual_rules import DualRules
from sdk.models.configs.score_biases import Alibi, DistanceBuckets
from sdk.models.configs.sliding import SlidingRule, no_layer

if TYPE_CHECKING:
    from sdk.kernels.operators.head_norms import QueryScale
    from sdk.kernels.operators.mlp_activations import Activation, GateKind
    from sdk.models.configs.fields import Fields
    from sdk.models.configs.head_rules import HeadRules
    from sdk.models.configs.latent_spec import LatentSpec
    from sdk.models.configs.recurrent import RecurrentSpec
    from sdk.models.configs.stream_spec import StreamSpec
    from sdk.quant.caches import AttentionCache

NOTHING: Mapping[str, Any] = MappingProxyType({})

#: A key that the config of a folder without a head gets, whose model embeds and does not generate.
WITHOUT_HEAD = "without_head"
#: What every config must state itself, or else transformers' class fills it in; besides the eps of
#: norms.
STATED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
)
#: The key of most configs.
RMS_NORM_EPS = "rms_norm_eps"


class Biases(NamedTuple):
    """Which projections have biases: of a layer q, k and v, that after attention, the MLP's; the
    head; and of an MLP whose others have none, the last one (``down``)."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False
    head: bool = False
    down: bool = False


class Blocks(NamedTuple):
    """What a layer consists of. Attention and a recurrent mixer in one layer read the same norm,
    and their results are added. ``linear``: in their place is one matrix, which mixes nothing."""

    attention: bool = True
    recurrent: bool = False
    mlp: bool = True
    linear: bool = False


PLAIN = Blocks()
#: A recurrent mixer in the place of attention.
RECURRENT = Blocks(attention=False, recurrent=True)


#: What each layer keeps of the tokens before, where layers differ: the shape of its own keys and
#: values, or the number of the earlier layer whose it reads. From the windows of the layers.
LayerCaches = Sequence["AttentionCache | int"]


def always(fields: Fields) -> bool:
    """A rule for models without the choice."""
    return True


class ConfigRules(NamedTuple):
    """How a ``config.json`` is read.

    ``keys``: those that it reads besides :data:`sdk.models.configs.keys.COMMON`. ``ignored``: keys
    of this model without an effect on results.
    ``defaults``: values of keys that a config leaves out (transformers' class defaults).
    ``stated``: keys besides :data:`STATED`, which may be null. A config with all of them is read
    without transformers, which takes 2 s to import. ``None``: transformers completes every config.
    ``sliding``: the sliding layers of a config without ``layer_types``.
    ``unrotated(fields, windows)``: the layers without a rotary embedding; ``None``: there are none.
    ``expert_width``: the key of the width of one expert; ``None`` for a model without experts.
    ``fixed``: keys that are supported with this value alone.
    ``activation``: reads the activation; ``None`` for the name in ``hidden_act``.
    ``embedding_scale``: the factor of embeddings by hidden size, where the config has none.
    ``rotation(parameters, head_dim)``: the parameters of a rotary embedding as other models have
    them. ``query_scale``: reads the scale of queries by their positions, if there is one.
    ``dense_width``: the key of the width of MLPs in layers without experts.
    ``shared_experts``: their number, where the code fixes it.
    ``biases``: the projections with biases; ``None``: ``attention_bias`` says it of all four of
    attention, ``mlp_bias`` of the MLP's.
    ``causal``: see :class:`sdk.models.configs.config.ModelConfig`; a config may say otherwise.
    ``norm_eps``: the key of the eps of norms, or the eps itself where the code fixes it.
    ``parallel_blocks``: whether attention and MLP of a layer read the same sum, and both are added
    to it; ``None``: they come one after the other. ``one_norm``: whether parallel blocks read one
    norm; ``None``: ``LayerRules.parallel_norms`` says it.
    ``post_norm``: whether layers are post-norm; ``None``: ``LayerRules.post_norm`` says it.
    ``qk_norm``: whether queries and keys have the norms of ``LayerRules.qk_norm``; ``None``: the
    key ``use_qk_norm`` says it, and without it they have.
    ``names``: keys that a config of this model spells differently, ours to the file's.
    ``derived(config)``: sets what follows from other keys, under our names; it may be called twice.
    ``alibi``: the linear biases of attention, if it has them.
    ``buckets``: its biases by buckets of distances, if it has them.
    ``gate_per_head``: whether the gate of attention's output has one number for each head;
    ``None``: ``LayerRules.output_gate`` says it.
    ``kinds``: the blocks of layers by their names in ``layer_types``, besides those that attend and
    have an MLP (``full_attention``, ``sliding_attention``). A config without ``layer_types`` gets
    them from ``derived``. ``recurrent``: reads the sizes of its recurrent mixer, if it has one.
    ``caches(fields, windows)``: see :data:`LayerCaches`; ``None``: all layers have the heads of the
    config. ``keys_as_values(fields, windows)``: the layers whose values are their keys before norm
    and rotation. ``widths``: of the MLP of each layer; ``None``: they are equal.
    ``attention_scale``: that of scores, where the code fixes it.
    ``has_experts``: whether a config of a model that may have MLPs alone has experts; ``None``: it
    has.
    ``layer_inputs``: the key of the features of per-layer embeddings; ``None``: there are none.
    ``latent``: the widths of latent attention, if it has that.
    ``streams(fields, layers)``: the sizes of its residual streams, if it has several.
    ``layer_rows``: the key of the rows of per-layer embeddings, which may be fewer than tokens;
    those without a row have zeros.
    ``limits(key, fields, layers)``: reads the clamps of MLPs, ``swiglu_limits`` of experts and
    ``swiglu_limits_shared`` of the others; empty or ``None``: there are none.
    """

    keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = NOTHING
    stated: tuple[str, ...] | None = None
    sliding: SlidingRule = no_layer
    unrotated: Callable[[Fields, Sequence[int | None]], Sequence[bool]] | None = None
    expert_width: str | None = None
    fixed: Mapping[str, Any] = NOTHING
    activation: Callable[[Fields], Activation] | None = None
    embedding_scale: Callable[[int], float] | None = None
    biases: Callable[[Fields], Biases] | None = None
    causal: bool = True
    rotation: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    query_scale: Callable[[Fields], QueryScale | None] | None = None
    norm_eps: str | float = RMS_NORM_EPS
    names: Mapping[str, str] = NOTHING
    derived: Callable[[dict[str, Any]], None] | None = None
    alibi: Callable[[Fields], Alibi | None] | None = None
    parallel_blocks: Callable[[Fields], bool] | None = None
    dense_width: str | None = None
    qk_norm: Callable[[Fields], bool] | None = None
    shared_experts: int = 0
    one_norm: Callable[[Fields], bool] | None = None
    post_norm: Callable[[Fields], bool] | None = None
    buckets: Callable[[Fields], DistanceBuckets] | None = None
    gate_per_head: Callable[[Fields], bool] | None = None
    kinds: Mapping[str, Blocks] = NOTHING
    recurrent: Callable[[Fields], RecurrentSpec | None] | None = None
    caches: Callable[[Fields, Sequence[int | None]], LayerCaches] | None = None
    keys_as_values: Callable[[Fields, Sequence[int | None]], Sequence[bool]] | None = None
    widths: Callable[[Fields, int], Sequence[int]] | None = None
    attention_scale: float | None = None
    has_experts: Callable[[Fields], bool] | None = None
    layer_inputs: str | None = None
    latent: Callable[[Fields], LatentSpec] | None = None
    streams: Callable[[Fields, int], StreamSpec] | None = None
    layer_rows: str | None = None
    limits: Callable[[str, Fields, int], Sequence[float | None]] | None = None


class Norms(NamedTuple):
    """The norms of a layer, by their names in a checkpoint; ``None`` where there is none.

    A block (attention or MLP) reads the norm of the sum of all before it; the norm after a block
    is of its output, before that is added to the sum. Of parallel blocks both may read that before
    attention; the MLP then has none.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


#: One norm for both of two parallel blocks (Command R).
ONE_NORM = Norms(before_mlp=None)
#: Norms after the blocks alone (OLMo 2), and around each (Gemma 2).
NORMS_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class NormKind(NamedTuple):
    """What the norms of a model compute: see :class:`sdk.kernels.operators.norm.Norm`."""

    centred: bool = False
    weight: bool = True
    bias: bool = False


#: torch's LayerNorm.
LAYER_NORM = NormKind(centred=True, bias=True)


class OutputGate(NamedTuple):
    """A gate on what attention adds: ``y * kind(projection(x))``, before the output projection.

    ``projection``: its name beside the others. ``per_head``: it has one number for each head, else
    one for each feature. ``kind``: ``sigmoid`` or ``softplus``. ``with_queries``: its rows are
    those of the projection of queries, after the query of each head (Qwen3-Next).
    """

    projection: str = "gate_proj"
    kind: GateKind = "sigmoid"
    per_head: bool = False
    with_queries: bool = False


class ExpertsBeside(NamedTuple):
    """Experts beside the MLP of a layer, both of the same sum: the norms by their names.

    ``before``, ``after``: of the experts; ``after_mlp``: of the MLP, whose own norm before is that
    of other layers. Both are added, then comes the layer's norm after the MLP. The router reads an
    RMSNorm of the sum with the weight ``scale`` times ``hidden_size ** -0.5``, and every expert has
    a factor, ``per_expert_scale``; both are beside the router's matrix.
    """

    before: str
    after: str
    after_mlp: str


class LayerRules(NamedTuple):
    """What a decoder layer computes, as far as all layers of a model do the same.

    ``norms``: see :class:`Norms`.
    ``qk_norm``: an RMSNorm of queries and keys before the rotation: over each head, with a weight
    or without one (``unweighted``), with a weight of its own for ``each_head`` (a norm like the
    others, without a bias), or over the whole width of all heads.
    ``adjacent_pairs``: dimensions 2i and 2i + 1 of a head turn together, as stored; of other models
    i and i + d / 2 do.
    ``halves_apart``: so do dimensions i and i + d / 4 of each half of a head.
    ``sinks``: every head has an attention sink, of all layers or of those with a window.
    ``router``: the name of the router of experts, beside them.
    ``route``: how that chooses and weighs them, except for what a config says of it.
    ``route_bias``: it has a bias of the choice. ``shared_gate``: the sum of shared experts has a
    gate, one number for each token.
    ``norm``: what all norms compute.
    ``norm_after_rotation``: the norms of heads come after the rotation.
    ``v_norm``: values have an RMSNorm without a weight over each head.
    ``output_gate``, ``experts_beside``: see :class:`OutputGate`, :class:`ExpertsBeside`.
    ``parallel_norms``: the norms where blocks are parallel (``ConfigRules.parallel_blocks``);
    ``post_norms``: those where layers are post-norm, if others than ``norms``.
    ``gated``: the MLP has a gate beside its first projection.
    ``post_norm``: the norm after a block is of the sum of its output and what it read, and the next
    block reads that norm alone (BERT). The norm before the MLP, if there is one, is of the sum of
    that and what attention read. There are no others, and none after the layers.
    ``first_norm``: the first layer has a norm before attention, too.
    ``experts_bias``: the sum of a token's experts has a bias.
    ``dense``: the name of the MLP of a layer without experts.
    ``recurrent_norms``: the norms of layers with a recurrent mixer, if others than ``norms``.
    ``unrotated_plain``: layers that do not rotate have no norms of heads, and they alone have the
    scale of queries by their positions (``ConfigRules.query_scale``). ``route_inputs``: the score
    of a token's only expert multiplies what that reads, in place of what it computes.
    ``value_residual``: all layers read the values of the first one, ``Step.first_values``.
    ``scaled``: what comes out of a layer is multiplied by its number ``layer_scalar``.
    ``block_scales``: what a block adds is multiplied by a vector (LayerScale, Touvron et al. 2021,
    arXiv 2103.17239): ``attention_scale`` and ``mlp_scale``.
    ``shifted_mlp``: the MLP reads the token before, too: see :class:`sdk.models.mlp.ShiftedMLP`.
    ``route_early``: the router reads what enters the layer, before any norm.
    ``limits_first``: clamps of experts are of what enters the activation, from above.
    ``sub_norms``: the last projection of a block reads a norm (Sub-LN, arXiv 2210.06423),
    ``attn_sub_norm`` and ``ffn_sub_norm``; experts have none.
    """

    norms: Norms = Norms()
    qk_norm: Literal["head", "unweighted", "each_head", "width"] | None = None
    adjacent_pairs: bool = False
    halves_apart: bool = False
    sinks: bool | Literal["windows"] = False
    router: str = "gate"
    route: RouteRule = SOFTMAX
    route_bias: bool = False
    shared_gate: bool = False
    norm: NormKind = NormKind()
    norm_after_rotation: bool = False
    v_norm: bool = False
    output_gate: OutputGate | None = None
    parallel_norms: Norms = ONE_NORM
    post_norms: Norms | None = None
    gated: bool = True
    post_norm: bool = False
    first_norm: bool = True
    experts_bias: bool = False
    dense: str = "mlp"
    recurrent_norms: Norms | None = None
    experts_beside: ExpertsBeside | None = None
    scaled: bool = False
    block_scales: bool = False
    shifted_mlp: bool = False
    sub_norms: bool = False
    unrotated_plain: bool = False
    route_inputs: bool = False
    value_residual: bool = False
    route_early: bool = False
    limits_first: bool = False

    def norms_of(self, parallel: bool, blocks: Blocks = PLAIN, *, post: bool = False) -> Norms:
        """The norms of a layer whose blocks are parallel, or come one after the other; ``post``:
        which is post-norm."""
        if post and self.post_norms is not None:
            return self.post_norms
        if blocks.recurrent and self.recurrent_norms is not None:
            return self.recurrent_norms
        return self.parallel_norms if parallel else self.norms


class TensorRules(NamedTuple):
    """How the tensors of a Hugging Face folder are stored.

    ``norms_minus_one``: the weights of norms are stored minus 1; ``whole_norms``: but for those
    whose paths end like this.
    ``experts_transposed``: a float tensor with all experts of a layer is ``[E, in, out]``, always
    or in some files. In those, the shape tells; a tensor that can be either is ``[E, out, in]``.
    ``gate_up_interleaved``: rows of gate and up alternate in such a tensor.
    ``block_sparse_moe``: transformers finds packed experts only under the names
    ``block_sparse_moe.experts.0.w1``.
    ``names``: names that differ from a Llama's, ours to the file's; those of a layer without
    ``model.layers.0.``, which ``model.layers`` renames, and where files of the model differ one
    name for each. See :mod:`sdk.loaders.folders.tensor_names`.
    ``qkv_by_group``: the rows of ``qkv_proj`` are those of one key/value head after the other: its
    query heads, its key, its value.
    ``layers_transposed``: float matrices of layers are ``[in, out]``; packed ones are not.
    ``up_before_gate``: the rows of ``gate_up_proj`` are those of up, then those of gate.
    ``deltas_by_key_head``: the rows of ``in_proj_qkvz`` and ``in_proj_ba`` of delta nets are those
    of one head of keys after the other.
    ``experts_by_rows``: a float tensor with one matrix of all experts of a layer has the rows of
    one expert after the other, ``[E * width, hidden]``, also of the matrix back to the hidden size.
    ``experts_apart``: gate and up of all experts of a layer are two tensors.
    ``qkv_by_rank``: the rows of ``qkv_proj`` are those of this many ranks, one after the other, of
    each queries, values and keys; 0: files do not say of how many, so they are refused.
    """

    norms_minus_one: bool = False
    experts_transposed: Literal["always", "sometimes"] | None = None
    gate_up_interleaved: bool = False
    block_sparse_moe: bool = False
    names: Mapping[str, str | tuple[str, ...]] = NOTHING
    qkv_by_group: bool = False
    layers_transposed: bool = False
    whole_norms: tuple[str, ...] = ()
    up_before_gate: bool = False
    experts_by_rows: bool = False
    experts_apart: bool = False
    qkv_by_rank: int | None = None
    deltas_by_key_head: bool = False

    def norm_offset(self, path: str) -> float:
        """What is added to the stored weight of the norm ``path``."""
        return 1.0 if self.norms_minus_one and not path.endswith(self.whole_norms) else 0.0


class EmbeddingRules(NamedTuple):
    """What happens to embeddings before the first layer.

    ``positions``: the row of position 0 in a table of learned positions, ``model.embed_positions``,
    which are added; ``None``: there is none. "after padding": the row after the padding token's,
    and ``max_position_embeddings`` counts the rows before it too. ``sines``: they are computed, see
    :func:`sdk.models.sines.position_table`; a file need not have them.
    ``norm``: they have a norm, ``model.embed_norm``; ``unweighted_norm``: an RMSNorm without a
    weight.
    ``types``: the row of a token's type in ``model.embed_types``, of ``type_vocab_size``, is added.
    ``tasks``: row 0 of ``model.embed_tasks`` is added to all, if a config says ``use_task_id``.
    ``projected``: these tables may have another width than the layers, ``embedding_size``; then
    ``model.embed_project`` comes after the norm. "tokens": that of tokens alone, and the head, has
    it; then it comes before positions are added, and ``model.project_out`` after the last
    norm.
    """

    positions: int | Literal["after padding"] | None = None
    norm: bool = False
    types: bool = False
    tasks: bool = False
    unweighted_norm: bool = False
    projected: bool | Literal["tokens"] = False
    sines: bool = False


class GgufKeys(Protocol):
    """The metadata of a GGUF file: see :class:`sdk.loaders.gguf_files.metadata.Keys`."""

    source: str

    @property
    def expert_count(self) -> int: ...

    def fail(self, key: str, value: Any, expected: str) -> Exception: ...

    def integer(self, key: str, limit: tuple[int, int], default: int | None = None) -> int: ...

    def number(self, key: str, default: float | None = None) -> float | None: ...

    def flag(self, key: str, default: bool) -> bool: ...

    def get(self, key: str) -> Any: ...

    def has_tensor(self, name: str) -> bool: ...

    def rows(self, name: str) -> int | None: ...

    def present(self, key: str, layers: int) -> list[bool]: ...

    def flags(self, key: str, layers: int) -> list[bool] | None: ...

    def layer_types(self, layers: int, *, window: int | None, period: int) -> list[str]: ...


class GgufRules(NamedTuple):
    """How a GGUF file holds the model.

    ``name``: ``general.architecture``. Several models may share one: ``matches`` then tells by the
    metadata whether a file holds this model; the model without ``matches`` takes the others.
    ``tensors``: names of tensors that differ from a Llama's, ours to the file's; those of a layer
    without ``model.layers.0.``, with ``.weight`` where the file's name has no such ending.
    ``read(config, keys)``: adds to a config what only this model's metadata say.
    ``write(config, source)``: the metadata for it. Raises UnsupportedError for a config that a GGUF
    file cannot express.
    ``expert_gating``: the ``expert_gating_func`` that the model computes. 1: a softmax over all
    experts, 2: sigmoids, 3: a softmax over the chosen ones; several if ``read`` tells them apart.
    ``keys``: metadata that ``read`` and ``slides`` read, besides loaders/gguf_files/keys.py.
    ``slides``: sliding layers have the scaling of the others ("scaled") or none ("plain"), and the
    base ``rope.freq_base_swa`` if a file has it. ``None``: there are none, or ``read`` does it.
    ``interleaved_qk``: rows of q and k are interleaved so that rotary pairs are adjacent.
    ``numbers``: parameters of one number in a layer, ours to the key of the metadata, which has no
    name of the architecture in it, with those of all layers.
    ``ignored``: metadata without an effect on this model, though other models have it.
    ``yarn_log_multiplier``: llama.cpp reads ``rope.scaling.yarn_log_multiplier`` for this model, as
    ``mscale_all_dim`` of a config whose ``mscale`` is 1.
    ``writes(config)``: whether a model with that config is written this way and not as
    ``Architecture.gguf``.
    ``only``: values without which a config is not written, because llama.cpp's code has no others.
    ``layers``: what the names of a layer's tensors begin with, before its number.
    ``rows_as_stored``: rows of joined projections are in the order of folders, which llama.cpp's
    converter changes for other models.
    """

    name: str
    matches: Callable[[GgufKeys], bool] | None = None
    tensors: Mapping[str, str] = NOTHING
    read: Callable[[dict[str, Any], GgufKeys], None] | None = None
    write: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    expert_gating: int | tuple[int, ...] = 1
    keys: tuple[str, ...] = ()
    slides: Literal["scaled", "plain"] | None = None
    interleaved_qk: bool = False
    numbers: Mapping[str, str] = NOTHING
    yarn_log_multiplier: bool = False
    ignored: tuple[str, ...] = ()
    writes: Callable[[Mapping[str, Any]], bool] | None = None
    only: Mapping[str, Any] = NOTHING
    layers: str = "blk"
    rows_as_stored: bool = False


class NextTokenRules(NamedTuple):
    """The block of multi-token prediction that checkpoints of a model may have after their layers.

    It reads the embedding of the next token and the hidden state after the final norm, and predicts
    that state of the next token. What it is inside is the same for all models: see
    :class:`sdk.models.drafting_heads.NextTokenHead`. ``like``: the layer of the model that its own
    layer is like; ``None``: the first one that attends to all tokens.
    """

    like: int | None = None


class Architecture(NamedTuple):
    """One model architecture. ``model_type`` and ``aliases``: the names that configs have for it.
    ``gguf``: ``None``: there are no GGUF files of it. ``more_gguf``: other names in GGUF files, of
    models that compute the same. ``wide_range``: activations may exceed float16, which ends at
    65,504. ``head``: of classifiers, if it is more than one matrix over the last token. ``claims``:
    whether a config that names another model is one of this: code beside the weights, which is not
    run, does. ``folders``: whether folders are read, not GGUF files alone. ``next_token``: of a
    block that may draft; ``None``: such blocks of the model are not run. ``dual``: of an encoder of
    texts beside one of images.
    """

    model_type: str
    aliases: tuple[str, ...] = ()
    layer: LayerRules = LayerRules()
    config: ConfigRules = ConfigRules()
    tensors: TensorRules = TensorRules()
    gguf: GgufRules | None = None
    more_gguf: tuple[GgufRules, ...] = ()
    wide_range: bool = False
    embedding: EmbeddingRules = EmbeddingRules()
    head: HeadRules | None = None
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    folders: bool = True
    next_token: NextTokenRules | None = None
    dual: DualRules | None = None


@cache
def architectures() -> tuple[Architecture, ...]:
    """The ``ARCHITECTURE`` of every module of ``models/architectures``, by file name."""
    package = import_module("sdk.models.architectures")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(map(_described, names))


def _described(module: str) -> Architecture:
    found: Architecture = import_module(f"sdk.models.architectures.{module}").ARCHITECTURE
    return found


def _named(name: object, modules: Mapping[str, Sequence[str]]) -> Iterable[Architecture]:
    """The architectures that ``name`` may mean. An unlisted name may be that of a new file."""
    listed = modules.get(name) if isinstance(name, str) else None
    return architectures() if listed is None else map(_described, listed)


def architecture(model_type: object) -> Architecture | None:
    """The architecture that a config's ``model_type`` names; ``None`` for one we do not have."""
    found = (
        own
        for own in _named(model_type, MODEL_TYPES)
        if model_type in (own.model_type, *own.aliases)
    )
    return next(found, None)


def real_type(config: Mapping[str, Any]) -> Any:
    """The ``model_type`` of a config, or the one of the model that claims it."""
    claimed = (own for own in architectures() if own.claims is not None and own.claims(config))
    found = next(claimed, None)
    return config.get("model_type") if found is None else found.model_type


def states_everything(config: Mapping[str, Any]) -> bool:
    """Whether transformers' class would add nothing to a config that we read."""
    known = architecture(config.get("model_type"))
    if known is None or known.config.stated is None:
        return False
    if config.get("rope_theta") is None and not config.get("rope_parameters"):
        return False
    eps = known.config.norm_eps
    stated = (*STATED, eps) if isinstance(eps, str) else STATED
    may_be_null = ("eos_token_id", *known.config.stated)
    return all(config.get(key) is not None for key in stated) and config.keys() >= {*may_be_null}


def gguf_architecture(name: object, keys: GgufKeys) -> tuple[Architecture, GgufRules] | None:
    """The architecture of a GGUF file that calls itself ``name``; ``None`` if there is none."""
    rest = None
    for own in _named(name, GGUF_NAMES):
        for rules in gguf_rules(own):
            if rules.name != name:
                continue
            if rules.matches is None:
                rest = own, rules
            elif rules.matches(keys):
                return own, rules
    return rest


def gguf_names() -> list[str]:
    """The names of all architectures that GGUF files may have."""
    return sorted({rules.name for own in architectures() for rules in gguf_rules(own)})


def gguf_rules(own: Architecture) -> tuple[GgufRules, ...]:
    """How GGUF files of the model may hold it."""
    return own.more_gguf if own.gguf is None else (own.gguf, *own.more_gguf)
