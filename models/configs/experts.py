"""What a config says of a mixture of experts.

Every model has names of its own for the same facts: :data:`NAMES`. A model reads those among the
keys of its :class:`~sdk.models.architecture.ConfigRules`. torch is not imported, as in
:mod:`sdk.models.architecture`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.operators.route_rule import SOFTMAX, RouteRule
from sdk.models.architecture import Architecture
from sdk.models.configs.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Fields

#: A fact, and its names in configs. ``shared``: how many shared experts there are, each as wide as
#: one of the others. ``dense``: the first layers, which have no experts.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "per_token": ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
        "normalized": ("norm_topk_prob",),
        "scale": (
            *("routed_scaling_factor", "route_scale", "moe_routed_scaling_factor"),
            "router_scaling_factor",
        ),
        "groups": ("n_group",),
        "groups_used": ("topk_group",),
        "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "shared_width": (
            *("shared_expert_intermediate_size", "shared_intermediate_size"),
            "moe_shared_expert_intermediate_size",
        ),
        "dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    }
)


#: The key of the features that experts read, where these are not the model's.
LATENT = "moe_latent_size"


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of ``count`` experts of ``width`` features, of which a token uses ``per_token``.

    ``layers``: which have experts; the others have an ordinary MLP of
    ``ModelConfig.intermediate_size``. ``route``: how the router chooses and weighs them.
    ``shared_width``: the features of the shared experts together, an MLP that every token uses,
    too; 0: there are none. ``scale``: multiplies the sum of all experts. ``inputs``: the features
    that experts read and return, between two projections of their own; ``None``: the model's.
    ``beside``: layers with experts have the MLP of the others, too.
    """

    count: int
    per_token: int
    width: int
    layers: tuple[bool, ...]
    route: RouteRule = SOFTMAX
    shared_width: int = 0
    scale: float = 1.0
    inputs: int | None = None
    beside: bool = False


def key_of(fact: str, keys: Collection[str]) -> str | None:
    """The name that a model with these keys has for a fact; ``None``: it has none."""
    return next((name for name in NAMES[fact] if name in keys), None)


def shared_width(config: Mapping[str, Any], own: Architecture) -> int:
    """The features of all shared experts together by a config that was checked."""
    key = key_of("shared_width", own.config.keys)
    if key is not None:
        return int(config.get(key) or 0)
    key, width = key_of("shared", own.config.keys), own.config.expert_width
    if own.config.shared_experts and width is not None:
        return own.config.shared_experts * int(config[width])
    if key is None or width is None:
        return 0
    return int(config.get(key, own.config.defaults.get(key)) or 0) * int(config[width])


def some_experts(fields: Fields) -> bool:
    """Whether a config counts any experts: see ``ConfigRules.has_experts``."""
    return bool(fields.values.get(_present(fields, "count")))


def experts_of(fields: Fields, own: Architecture, layers: int) -> ExpertSpec | None:
    """``None`` for a model without experts.

    :raises CheckpointError: names the key, what was expected and what was found.
    """
    key = own.config.expert_width
    if key is None or (own.config.has_experts and not own.config.has_experts(fields)):
        return None
    count = _same(fields, _present(fields, "count"), MAX_EXPERTS)
    per_token = _same(fields, _present(fields, "per_token"), count)
    width = fields.count(key, MAX_WIDTH)
    shared = own.config.shared_experts * width or _shared_width(fields, width)
    return ExpertSpec(
        count=count,
        per_token=per_token,
        width=width,
        layers=tuple(_has_experts(fields, layers)),
        route=_route(fields, own.layer.route, count, per_token),
        shared_width=shared,
        scale=_scale(fields) if shared else 1.0,
        inputs=fields.count(LATENT, MAX_WIDTH) if fields.has(LATENT) else None,
        beside=own.layer.experts_beside is not None,
    )


def _present(fields: Fields, fact: str) -> str:
    """The name that a config has for a fact, or the usual one."""
    return next((name for name in NAMES[fact] if fields.has(name)), NAMES[fact][0])


def _same(fields: Fields, name: str, limit: int) -> int:
    """A count, which some configs repeat for each layer."""
    found = fields.values.get(name)
    if isinstance(found, (list, tuple)) and found and all(one == found[0] for one in found):
        return Fields({name: found[0]}, fields.where).count(name, limit)
    return fields.count(name, limit)


def _shared_width(fields: Fields, width: int) -> int:
    for fact, each in (("shared_width", 1), ("shared", width)):
        name = _present(fields, fact)
        if fields.values.get(name):
            return each * _same(fields, name, MAX_WIDTH // each)
    return 0


def _scale(fields: Fields) -> float:
    how = fields.text("shared_expert_combination_strategy", default="sum")
    if how not in ("sum", "average"):
        fields.fail("shared_expert_combination_strategy", "'sum' or 'average'", how)
    return 0.5 if how == "average" else 1.0


def _route(fields: Fields, rule: RouteRule, count: int, per_token: int) -> RouteRule:
    groups = fields.count("n_group", count, default=1)
    used = fields.count("topk_group", groups, default=1) if groups > 1 else 1
    if count % groups:
        fields.fail("n_group", f"a divisor of {count} experts", groups)
    size = count // groups
    if used * size < per_token:
        fields.fail("topk_group", f"groups of {size} with {per_token} experts together", used)
    if groups > 1 and size < rule.group_best:
        fields.fail("n_group", f"groups of at least {rule.group_best} experts", groups)
    normalized = fields.flag("norm_topk_prob", default=rule.normalized)
    if fields.has("expert_selection_fn"):
        gate = fields.text("expert_selection_fn")
        if gate not in ("softmax", "sigmoid"):
            fields.fail("expert_selection_fn", "'softmax' or 'sigmoid'", gate)
        rule = rule._replace(gate="sigmoid" if gate == "sigmoid" else "softmax")
        normalized = normalized or gate == "softmax"  # that is over the chosen experts
    if rule.gate == "sparse_mixer" and fields.values.get("router_jitter_noise") != 0:
        rule = rule._replace(jitter=fields.positive("router_jitter_noise", default=rule.jitter))
    elif rule.gate == "sparse_mixer":
        rule = rule._replace(jitter=0.0)
    return rule._replace(
        normalized=normalized,
        least=fields.optional_positive("moe_norm_min") or rule.least,
        scale=fields.positive(_present(fields, "scale"), default=rule.scale),
        groups=groups,
        groups_used=used,
    )


def _has_experts(fields: Fields, layers: int) -> Sequence[bool]:
    """Which layers have experts, by whichever of the usual keys there are."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is not None:
        known = isinstance(kinds, (list, tuple)) and {*kinds} <= {"dense", "sparse"}
        if not known or len(kinds) < layers:
            expected = f"'dense' or 'sparse' for each of {layers} layers"
            fields.fail("mlp_layer_types", expected, kinds)
        return [kind == "sparse" for kind in kinds[:layers]]
    listed = fields.values.get("moe_layers")
    if listed is not None:
        if not isinstance(listed, (list, tuple)) or not all(type(i) is int for i in listed):
            fields.fail("moe_layers", "a list of layers", listed)
        return [i in listed for i in range(layers)]
    step = fields.count("decoder_sparse_step", MAX_LAYERS, default=1)
    every = fields.count("moe_layer_interval", MAX_LAYERS, default=1)
    dense = fields.values.get("mlp_only_layers", ())
    if not isinstance(dense, (list, tuple)):
        fields.fail("mlp_only_layers", "a list of layers", dense)
    first = _layer(fields, _present(fields, "dense"))
    last = _layer(fields, "moe_layer_end_index", layers - 1)
    last = layers - 1 if last == -1 else last
    return [
        i not in dense and (i + 1) % step == 0 and (i + 1) % every == 0 and first <= i <= last
        for i in range(layers)
    ]


def _layer(fields: Fields, name: str, default: int = 0) -> int:
    """The number of a layer; -1: the last one."""
    found = fields.values.get(name, default)
    if type(found) is not int or not -1 <= found <= MAX_LAYERS:
        fields.fail(name, "the number of a layer", found)
    return found
