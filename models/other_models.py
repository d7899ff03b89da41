"""Models that do not run here: what they are, why not, and what to use instead.

One table for both kinds of files. A GGUF file says what it is in ``general.architecture``, a folder
in ``model_type``; a name in neither list is unknown. Names that run are in
:mod:`sdk.models.architecture`. If only some models of a name run there, this table speaks of the
others.
"""

from __future__ import annotations

from typing import NamedTuple

from sdk.quant.errors import UnsupportedError


class Refusal(NamedTuple):
    """``what`` the model is, ``why`` it does not run, and what would run ``instead``."""

    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}, which does not run: {self.why}. {self.instead}"


class RefusedModels(NamedTuple):
    """Models that do not run for the same reason. ``gguf``, ``types``: their names in files."""

    refusal: Refusal
    gguf: tuple[str, ...]
    types: tuple[str, ...] = ()


_SIMILAR = "docs/popular_models.md names similar models that run"
_DECODER = "Open a decoder (a model that continues a text)"


def _decoder(what: str, why: str) -> Refusal:
    return Refusal("a decoder " + what, why, _SIMILAR)


def _undescribed(what: str) -> Refusal:
    return _decoder(what, "its layers are not described in models/architectures yet")


_RECURRENT = _decoder(
    "with recurrent layers (Mamba, RWKV, linear attention or a delta net)",
    "its mixers are none of those here (docs/models.md lists them)",
)
_CONVOLUTIONS = _decoder(
    "with short convolutions",
    "its layers are not described in models/architectures yet",
)
_LATENT = _decoder(
    "with latent attention (MLA)",
    "what surrounds its attention differs from DeepSeek's",
)
_SPARSE = _decoder(
    "with sparse attention",
    "an indexer chooses the tokens that a token attends to; attention here reads all of them, or "
    "a window",
)
_LOOPS = _decoder(
    "that runs its layers several times or adds to them between blocks",
    "a layer runs once per token here",
)
_BYTES = _decoder(
    "of bytes that are joined to patches",
    "its positions are patches of several lengths, and tokens here are one position each",
)
_RESIDUALS = _decoder(
    "with several residual streams",
    "those here are mixed as in Gemma 3n",
)
_EXPERTS = _decoder(
    "with a mixture of experts of its own",
    "its router or its experts are combined in a way that the experts here are not",
)
_CHOSEN_HEADS = _decoder(
    "with a mixture of attention heads (JetMoE)",
    "a token chooses its query heads; all tokens have all heads here",
)
_DIFFERENCES = _decoder(
    "with differential attention (DiffLlama)",
    "a layer attends twice and subtracts one result from the other; layers here attend once",
)
_GROK = Refusal(
    "a mixture of experts of 270 to 314 billion parameters (Grok)",
    "its router has a soft cap, which llama.cpp's code leaves out, and no implementation is known "
    "here that its results can be compared with",
    _SIMILAR,
)
_ARCTIC = Refusal(
    "a mixture of 480 billion parameters (Snowflake Arctic)",
    "its experts read what enters a layer, beside attention and an MLP; experts here read what "
    "attention has been added to",
    _SIMILAR,
)
_PHI_MOE = Refusal(
    "a decoder with a sparse mixer of experts (Phi-3.5-MoE)",
    "a GGUF file of it lacks the factor of its long rotation, and llama.cpp computes other norms "
    "and weights of experts than the model was trained with",
    "A folder of its safetensors files (model_type 'phimoe') runs",
)
_VARIATION = _undescribed("of known parts")
_IMAGE_TOKENS = _decoder(
    "of text and images in one",
    "its weights or norms for image tokens have no place in the layers here",
)
_SWITCHED = _decoder(
    "that chooses an adapter for each token",
    "adapters here belong to a request (docs/lora.md)",
)
_DIFFUSION = Refusal(
    "a diffusion language model, which fills in masked tokens",
    "requests here are continued token by token",
    "Open an autoregressive model",
)
ENCODER = Refusal(
    "an encoder (for embeddings or scores)",
    "its tokens attend in both directions, and this one is not described here",
    "docs/embeddings.md names the models for search that run",
)
_DISENTANGLED = Refusal(
    "an encoder with disentangled attention (DeBERTa)",
    "each score has two more products, of a query with a distance's key and of a key with a "
    "distance's query, which differ from token to token; scores here may have a bias for each head "
    "and distance alone",
    "Of rerankers bge-reranker-v2-m3, gte-multilingual-reranker-base and gte-reranker-modernbert "
    "run (docs/embeddings.md)",
)
ENCODER_DECODER = Refusal(
    "an encoder-decoder (sequence-to-sequence) model",
    "its decoder reads the states of an encoder, which has no place here",
    _DECODER,
)
SPEECH = Refusal(
    "a model of speech or sound",
    "it reads or writes audio, and requests here are text",
    _DECODER,
)
TOWER = Refusal(
    "the encoder of images or sounds of a model (mmproj)",
    "it writes no text alone",
    "Open the file of its language model: an mmproj beside it is found, another one is named with "
    "mmproj=",
)
_DRAFTER = Refusal(
    "a drafting head for another model",
    "a head reads the states of its model and writes no text alone",
    "Open that model; heads as folders are options of it (docs/speculation.md)",
)
IMAGES = Refusal(
    "a model of images",
    "requests here are text",
    _DECODER,
)
_DUAL = Refusal(
    "an encoder of texts beside one of images (a dual encoder)",
    "its encoders are none of those of CLIP and SigLIP that are described here",
    "Folders of CLIP, SigLIP and SigLIP 2 run (docs/embeddings.md)",
)
_RESAMPLER = Refusal(
    "a model of text and images whose layers are in code beside its weights (MiniCPM-V up to 2.5, "
    "MiniCPM-o)",
    "that code is not run, and MiniCPM-V is described here from version 2.6 on",
    "Open a GGUF file of its language model for text alone (limit_mm_per_prompt={'image': 0}), or "
    "MiniCPM-V 4.5, Qwen3-VL or Gemma 3, whose images run (docs/models.md)",
)
_TOWER_ALONE = Refusal(
    "an encoder of images without that of texts",
    "prompts are compared with texts here",
    "Open the folder of the whole model (CLIPModel, SiglipModel)",
)
TEXT_AND_IMAGES = Refusal(
    "a model of text and images",
    "its language model is none of those that run here",
    _SIMILAR,
)

REFUSED = (
    RefusedModels(
        _RECURRENT,
        gguf=(
            *("bailingmoe3", "glm5-next", "kimi-k3"),
            *("minimax-01", "rwkv6", "rwkv6qwen2"),
        ),
        types=(
            *("bailing_hybrid", "bailing_moe_v2_5", "glm5_next_text"),
            *("lara_mini", "minimax", "minimax_text_01"),
            *("recurrent_gemma", "rwkv", "rwkv6", "rwkv_hybrid", "xlstm", "zamba"),
            *("zamba2", "zaya"),
        ),
    ),
    RefusedModels(
        _CONVOLUTIONS,
        gguf=(),
        types=("inkling_text", "inkling2_text", "inkling2_loop_text", "lfm3"),
    ),
    RefusedModels(_LATENT, gguf=(), types=("longcat_flash",)),
    RefusedModels(
        _SPARSE,
        gguf=("dots3note", "hy_v4", "minimax-m3"),
        types=("axk2", "dots3_note", "dots3_note_text", "hy_v4", "minimax_m3_vl_text"),
    ),
    RefusedModels(
        _RESIDUALS,
        gguf=("deepseek4", "qwen4exp"),
        types=("deepseek_v4", "qwen4_exp_text"),
    ),
    RefusedModels(_BYTES, gguf=(), types=("blt",)),
    RefusedModels(
        _LOOPS, gguf=("hrm_text", "nanbeige", "talkie"), types=("dory", "hrm_text", "talkie")
    ),
    RefusedModels(
        _EXPERTS,
        gguf=("grovemoe",),
        types=("grove_moe",),
    ),
    RefusedModels(_CHOSEN_HEADS, gguf=(), types=("jetmoe",)),
    RefusedModels(TEXT_AND_IMAGES, gguf=(), types=("git",)),
    RefusedModels(_DIFFERENCES, gguf=(), types=("diffllama",)),
    RefusedModels(_GROK, gguf=("grok",), types=("grok", "grok-1")),
    RefusedModels(_ARCTIC, gguf=("arctic",), types=("arctic",)),
    RefusedModels(_PHI_MOE, gguf=("phimoe",)),
    RefusedModels(_SWITCHED, gguf=("graniteswitch",), types=("granite_switch",)),
    RefusedModels(
        _IMAGE_TOKENS, gguf=("chameleon", "cogvlm"), types=("chameleon", "cogvlm", "emu3")
    ),
    RefusedModels(_VARIATION, gguf=(), types=("chatglm", "codeshell")),
    RefusedModels(
        _DIFFUSION, gguf=("dream", "llada", "llada-moe", "rnd1"), types=("Dream", "llada")
    ),
    RefusedModels(_DISENTANGLED, gguf=(), types=("deberta", "deberta-v2")),
    RefusedModels(SPEECH, gguf=("pockettts", "qwen3tts", "wavtokenizer-dec", "whisper")),
    RefusedModels(TOWER, gguf=("clip",)),
    RefusedModels(
        _DUAL,
        gguf=(),
        types=(
            *("aimv2_text_model", "altclip_text_model", "blip_text_model", "chinese_clip"),
            *("chinese_clip_text_model", "clipseg_text_model", "flava_text_model", "jina_clip"),
            *("metaclip_2_text_model", "owlvit_text_model", "owlv2_text_model"),
            *("vision-text-dual-encoder", "x_clip"),
        ),
    ),
    RefusedModels(_RESAMPLER, gguf=(), types=("minicpmv", "minicpmo")),
    RefusedModels(
        _TOWER_ALONE,
        gguf=(),
        types=("clip_vision_model", "siglip_vision_model", "siglip2_vision_model"),
    ),
    RefusedModels(
        _DRAFTER,
        gguf=("dflash", "eagle3", "gemma4-assistant"),
        types=("gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant"),
    ),
)


def refused_gguf(name: str) -> Refusal | None:
    """What a GGUF file with this ``general.architecture`` holds; ``None`` for an unknown name."""
    return next((models.refusal for models in REFUSED if name in models.gguf), None)


def check_type(model_type: str) -> None:
    """Check that the table does not have a config's ``model_type``.

    :raises UnsupportedError: names what the model is.
    """
    for models in REFUSED:
        if model_type in models.types:
            raise UnsupportedError(f"model_type {model_type!r}: {models.refusal}")
