"""What the library needs to know of a model's encoder of images and of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from sdk.kernels.dataclass import dataclass
from sdk.models.configs.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    Fields,
    sloped_activation,
    without_null,
)
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.kernels.operators.mlp_activations import Activation

#: Of one side of a tile, in pixels. The largest that published models read have 4,096.
MAX_SIDE = 1 << 16
#: Pixels as numbers from -1 to 1 (SigLIP), and the statistics of CLIP's images.
HALF = (0.5, 0.5, 0.5)
#: Numbers from 0 to 1.
RAW = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Color = tuple[float, float, float]

#: The key of the layers whose results the text model reads.
FEATURE_LAYER = "vision_feature_layer"


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The layers of a tower. ``num_layers``: those that run, without the last ones where the text
    reads what comes out of an earlier one. ``activation_slope``: see
    :class:`sdk.models.configs.config.ModelConfig`. ``rotary_dim``: how many features of a head
    turn; ``None``: positions are in what the layers read. ``attention_scale``: of scores."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    activation_slope: float
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    rotary_dim: int | None
    theta: float
    attention_scale: float


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The encoder of images ("tower") of a model, and how its results become tokens.

    ``family``: which module of ``models/vision`` describes it. ``patch``: pixels of a patch's
    side. ``frames``: how many equal pictures a patch has (video models); ``merge``: how many
    patches per side become one token. ``scale``, ``mean``, ``std``: what becomes of a pixel's
    number from 0 to 255, ``(number * scale - mean) / std``.
    ``hidden_size``: features of a token, those of the text model. ``features``: vectors of that
    size for each token: one, and one for each of ``deepstack``, the layers whose results are added
    to the first layers of the text model.
    ``token_id``: the token that stands for a row of the image in a prompt. ``both_ways``: in which
    layers of the text model the tokens of one image see each other both ways: in all, or in those
    with a window; "prompt": all tokens of a prompt with images do, in all layers. ``sections``: how
    many rotary frequencies of the text model turn by time, row and column, one section after the
    other or ``interleaved``. ``axes``: the axis of each frequency.
    ``max_patches``, ``max_tokens``: of one image, all tiles together.
    """

    family: str
    tower: EncoderSpec
    patch: int
    hidden_size: int
    token_id: int
    max_patches: int
    max_tokens: int
    merge: int = 1
    #: Within the encoder, after the layer ``inner_after``, squares of ``inner`` patches per side
    #: become one row (:mod:`sdk.models.vision.inner`); 1: they do not.
    inner: int = 1
    inner_after: int = -1
    #: Tokens of a tile of any size, each of which is a query to all of its patches
    #: (:mod:`sdk.models.vision.resampler`); 0: tokens are squares of patches.
    queries: int = 0
    frames: int = 1
    scale: float = 1 / 255
    mean: Color = HALF
    std: Color = HALF
    deepstack: tuple[int, ...] = ()
    both_ways: Literal["all", "windows", "prompt"] | None = None
    #: The most tokens that see each other both ways.
    span: int = 0
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    axes: tuple[int, ...] | None = None
    #: Rows of the table of learned positions: a square one, or one for columns and one for rows
    #: (Gemma 4); 0: there is none.
    positions: int = 0
    #: All tiles have the patches of this table.
    one_size: bool = False
    #: Of the norms and of the MLP after the tower.
    projector_eps: float = 1e-6
    projector_activation: Activation = "gelu"
    #: Patches of each side of a window, the sequences of all layers but ``full``; 0: all are full.
    window: int = 0
    full: tuple[int, ...] = ()
    projector_norm: bool = False
    #: Sizes of larger pictures of an image, in pixels, whose tiles follow that of the whole one;
    #: empty: tiles are independent. Beyond ``most_tiles`` tiles their tokens are shrunk.
    pictures: tuple[tuple[int, int], ...] = ()
    most_tiles: int | None = None
    #: Features between the matrices of the MLP after the tower; 0: those of a token.
    projector_width: int = 0
    #: Each tile begins with a token of the class. Text models read all other rows, the projector
    #: of a dual encoder this one alone.
    class_token: bool = False
    #: A norm comes before the first layer.
    norm_before: bool = False
    #: After how many layers come the results that are side by side in what the projector reads, in
    #: this order (Granite Vision reads four); empty: those of the last layer alone.
    side_by_side: tuple[int, ...] = ()
    #: The token whose embeddings for each layer those of images have
    #: (:mod:`sdk.models.layer_inputs`); ``None``: the text model has none.
    stand_in: int | None = None
    #: Tokens are shifted and multiplied by vectors before the last matrix.
    standardized: bool = False
    #: Matrices of the layers clamp what they read and make: :mod:`sdk.models.vision.clipped`.
    clipped: bool = False
    #: Of a dual encoder: an image is one vector, in the space of the vectors of texts, and the text
    #: model reads none. The token that stands for it is none of the vocabulary.
    dual: bool = False

    @property
    def features(self) -> int:
        """Vectors for each token."""
        return 1 + len(self.deepstack)

    @property
    def joined(self) -> int:
        """Rows that come out of the layers for each token."""
        return (self.merge // self.inner) ** 2

    @property
    def projected_width(self) -> int:
        """Features of a row that the projector reads."""
        return self.tower.hidden_size * max(len(self.side_by_side), 1)

    @property
    def tile_side(self) -> int:
        """Of a tower with a table of positions: the rows, and the columns, of patches of it."""
        return math.isqrt(self.positions - int(self.class_token))


def encoder_config(
    fields: Fields,
    *,
    eps: float,
    activation: str,
    layers: int | None = None,
    heads: str = "num_attention_heads",
    depth: str = "num_hidden_layers",
    attention_bias: bool = True,
    output_bias: bool | None = None,
    mlp_bias: bool = True,
    rotary_dim: int | None = None,
    theta: float = 10000.0,
    attention_scale: float | None = None,
) -> EncoderSpec:
    """The layers of a tower from its part of a config.

    ``layers``: how many of them run (default: all). ``heads``, ``depth``: keys of their numbers.
    ``rotary_dim``: how many features of a head turn; ``None``: positions are in what they read.
    ``attention_scale``: ``None`` for one over the square root of a head's features.

    :raises CheckpointError: names the field, what was expected and what was found.
    """
    hidden, count = fields.count("hidden_size", MAX_WIDTH), fields.count(heads, MAX_WIDTH)
    number = fields.count(depth, MAX_LAYERS)
    computed, slope = sloped_activation(activation, "hidden_act")
    if hidden % count and not fields.has("head_dim"):
        fields.fail(heads, f"a divisor of hidden_size {hidden}", count)
    head_dim = fields.count("head_dim", 4096, default=hidden // count)
    return EncoderSpec(
        model_type=fields.text("model_type"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size", MAX_WIDTH),
        num_layers=number if layers is None else layers,
        num_heads=count,
        head_dim=head_dim,
        norm_eps=eps,
        activation=computed,
        activation_slope=slope,
        attention_bias=attention_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        mlp_bias=mlp_bias,
        rotary_dim=rotary_dim,
        theta=theta,
        attention_scale=head_dim**-0.5 if attention_scale is None else attention_scale,
    )


def layers_until(whole: Fields, layers: int, default: int) -> int:
    """How many of a tower's ``layers`` run: see :func:`layers_read`.

    :raises UnsupportedError: the text reads several.
    """
    found = layers_read(whole, layers, default)
    if len(found) > 1:
        given = list(whole.values[FEATURE_LAYER])[:8]
        raise UnsupportedError(f"config: {FEATURE_LAYER}: expected one layer, found {given}")
    return found[0]


def layers_read(whole: Fields, layers: int, default: int) -> tuple[int, ...]:
    """After how many of a tower's ``layers`` the text model reads their results, one or several in
    the order of ``vision_feature_layer``: that counts the layers before, or from the end, -1 what
    comes out of the last layer.

    :raises CheckpointError: there is no such layer.
    """
    given = whole.values.get(FEATURE_LAYER, default)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    if not 1 <= len(found) <= layers or any(
        type(one) is not int or not 1 <= (one if one >= 0 else layers + 1 + one) <= layers
        for one in found
    ):
        whole.fail(
            FEATURE_LAYER, f"a layer of {layers}, or -1 to -{layers}, or a list of such", given
        )
    return tuple(one if one >= 0 else layers + 1 + one for one in found)


def color(fields: Fields, key: str, default: Color) -> Color:
    """Three numbers of a processor's config, one for each of red, green and blue."""
    value = fields.values.get(key)
    if value is None:
        return default
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        fields.fail(key, "a list of 3 numbers", value)
    low = 1e-6 if key == "image_std" else 0.0
    for one in value:
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not low <= one <= 1e6:
            fields.fail(key, f"numbers of at least {low:g}", value)
    red, green, blue = map(float, value)
    return red, green, blue


def square(fields: Fields, key: str) -> int:
    """The side of square tiles or patches: one number, or a list of two equal ones."""
    value = fields.values.get(key)
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
        fields.fail(key, f"one side of squares, 1..{MAX_SIDE}", value)
    return value


def most_pixels(whole: Fields, default: int) -> int:
    """The largest image after resizing, of a model that reads images of all shapes."""
    processor = Fields(without_null(whole.values.get("image_processor") or {}), "image processor")
    size = Fields(processor.mapping("size"), "image processor: size")
    given = [(processor, "max_pixels"), (size, "longest_edge"), (size, "max_pixels")]
    fields, key = next(((own, key) for own, key in given if own.has(key)), given[0])
    return fields.count(key, MAX_SIDE**2, default=default)


def text_sections(
    whole: Fields, text: Fields, default: tuple[int, int, int]
) -> tuple[int, int, int]:
    """How many rotary frequencies of the text model turn by time, row and column. ``default``:
    those of transformers' class.

    :raises CheckpointError: they are not three numbers.
    """
    key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    rope = Fields(text.mapping(key), f"config: {key}")
    stated = whole.values.get("mrope_section", default)  # of a GGUF file
    sections = rope.values.get("mrope_section", stated)
    numbers = isinstance(sections, (list, tuple)) and len(sections) == 3
    if not numbers or any(type(one) is not int or not 0 <= one <= 4096 for one in sections):
        rope.fail("mrope_section", "3 numbers of frequencies", sections)
    time, rows, columns = sections
    return time, rows, columns


def plain_axes(sections: tuple[int, int, int], turning: int) -> tuple[int, ...]:
    """What ``turning`` frequencies turn by: see ``VisionConfig.axes``. The sections follow one
    another.

    :raises CheckpointError: they are not as many frequencies.
    """
    if sum(sections) != turning:
        Fields({}).fail("mrope_section", f"a sum of {turning} frequencies", list(sections))
    return tuple(axis for axis, own in enumerate(sections) for _ in range(own))


def interleaved_axes(sections: tuple[int, int, int], turning: int) -> tuple[int, ...]:
    """The same where time, rows and columns take turns until rows or columns have all of theirs."""
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(turning))


def square_tiles(vision: Fields) -> tuple[int, int]:
    """Of a tower with tiles of one size: the pixels of a patch's side, the patches of a tile's."""
    patch, image = square(vision, "patch_size"), square(vision, "image_size")
    if image < patch:
        vision.fail("image_size", f"at least one patch of {patch} pixels", image)
    return patch, image // patch


def only(fields: Fields, key: str, value: Any) -> None:
    """:raises UnsupportedError: a key has another value than the one that is supported."""
    found = fields.values.get(key, value)
    if found != value:
        raise UnsupportedError(
            f"{fields.where}: {key}: expected {value!r}, found {str(found)[:80]!r}: images of such "
            "a model are not supported"
        )


def picture_sizes(
    whole: Fields, side: int, default: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Heights and widths, in pixels, in whole tiles of ``side``.

    :raises CheckpointError: they are not.
    """
    key = "image_grid_pinpoints"
    found = whole.values.get(key, default)
    if not isinstance(found, (list, tuple)) or not 1 <= len(found) <= 4096:
        whole.fail(key, "a list of heights and widths", found)
    for size in found:
        pair = isinstance(size, (list, tuple)) and len(size) == 2
        if not pair or any(type(x) is not int or x < side or x % side for x in size):
            whole.fail(key, f"heights and widths in multiples of {side}", size)
    return tuple((height, width) for height, width in found)
