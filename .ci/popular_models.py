"""The page docs/popular_models.md: which models that people use run, from GGUF and safetensors.

python .ci/popular_models.py            # rewrites the page
python .ci/popular_models.py --check    # exit code 1 if it would

What runs comes from the registry of architectures (models/architectures) and from the last sweep
over transformers' types (model_docs.py), so the page changes when a model is added there.
"""

from __future__ import annotations

import runpy
import sys
import textwrap
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sdk.models.architecture import architecture, gguf_names  # noqa: E402
from sdk.models.vision.family import families  # noqa: E402

PAGE = ROOT / "docs" / "popular_models.md"
Kind = Literal["text", "embed"]


class Family(NamedTuple):
    """Models with one architecture.

    ``gguf``: what ``general.architecture`` of their files may be. ``types``: the ``model_type`` of
    the language model in ``config.json`` (of ``text_config``, if there is one). ``needs``: what
    they have that a plain llama has not. ``instead``: families by name, the closest first.
    ``part``: what runs of them. ``refused``: why transformers' code does not run the real ones.
    """

    name: str
    gguf: tuple[str, ...]
    types: tuple[str, ...]
    needs: str = ""
    instead: tuple[str, ...] = ()
    part: str = ""
    refused: str = ""
    kind: Kind = "text"


_WORDS = """
"runs": with embedlm's own code, at full speed. "slowly": as a safetensors folder through
transformers' code, in one process ([models.md](models.md)). "not yet": an error that names the
reason, before weights are loaded. All [weight formats](formats.md) work with every model that runs.
If a model is not listed, `embedlm inspect FILE` says what is in it, and `embedlm plan FILE` whether
it runs and what it takes. Both read headers only.
"""
_ORDER = """
The order is our judgement of how much they are used (autumn 2026). A model that somebody fine-tuned
runs as the one it comes from. What counts is `general.architecture` in a GGUF file (`embedlm
inspect` shows it) and `model_type` in `config.json`.
"""
HEAD = "| models | GGUF | safetensors | what is different, what to use instead |"
#: In the order of how much they are used (autumn 2026).
FAMILIES = (
    Family(
        "Qwen3.5, 3.6, 3.8, 0.8B to 27B", ("qwen35",), ("qwen3_5_text",),
        "gated delta net in 3 of 4 layers, vision", ("Qwen3",),
    ),
    Family(
        "Qwen3.6-35B-A3B, Qwen3.5-122B, 397B", ("qwen35moe",), ("qwen3_5_moe_text",),
        "gated delta net, shared expert", ("Qwen3-30B-A3B",),
    ),
    Family(
        "Gemma 4 E2B to 31B", ("gemma4",), ("gemma4_text", "gemma4_unified_text"),
        part="12B and sound: text only",
    ),
    Family(
        "all-MiniLM, all-mpnet, bge, e5, mxbai, arctic-embed, bge-reranker", ("bert",),
        ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra"), "encoders",
        ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "Llama 3.x, SmolLM2, TinyLlama, DeepSeek-R1-Distill-Llama", ("llama",), ("llama",),
    ),
    Family("Qwen3", ("qwen3",), ("qwen3",)),
    Family("Qwen3-Embedding", ("qwen3",), ("qwen3",), kind="embed"),
    Family(
        "Qwen3-Reranker", ("qwen3",), ("qwen3",), kind="embed",
        part='`hf_overrides={"classifier_from_token": ["no", "yes"]}`',
    ),
    Family("Qwen2.5, Qwen2.5-Coder, DeepSeek-R1-Distill-Qwen", ("qwen2",), ("qwen2",)),
    Family(
        "Qwen3-VL", ("qwen3vl", "qwen3vlmoe"), ("qwen3_vl_text", "qwen3_vl_moe_text"), "vision",
        ("Gemma 3",),
    ),
    Family("Gemma 3", ("gemma3",), ("gemma3_text",)),
    Family("gpt-oss", ("gpt-oss",), ("gpt_oss",)),
    Family("Qwen3-30B-A3B, Qwen3-Coder-30B-A3B", ("qwen3moe",), ("qwen3_moe",)),
    Family(
        "Mistral Small 3.x, Ministral 3, Devstral 2", ("mistral3",), ("mistral", "ministral3",
        "ministral"),
        "scale of queries by position, vision", ("Mistral 7B",),
    ),
    Family("Mistral 7B, Mistral Nemo, Mathstral", ("llama",), ("mistral",)),
    Family("Mixtral 8x7B, 8x22B", ("llama",), ("mixtral",)),
    Family(
        "EmbeddingGemma", ("gemma-embedding",), ("embedding_gemma2",),
        "attention in both directions, dense layers after pooling", ("Qwen3-Embedding",),
        kind="embed",
    ),
    Family(
        "LFM2, LFM2.5", ("lfm2", "lfm2moe"), ("lfm2", "lfm2_moe"), "short convolutions",
        ("SmolLM2", "Qwen3"), refused="transformers' code for convolutions has no paged cache",
    ),
    Family(
        "nomic-embed-text v1.5, v2", ("nomic-bert", "nomic-bert-moe"),
        ("nomic_bert", "nomic_bert_moe"), "encoders", ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "Qwen2.5-VL, Qwen2-VL", ("qwen2vl",), ("qwen2_5_vl_text", "qwen2_vl_text"), "vision",
        ("Qwen2.5",), part="Qwen2-VL: text only",
    ),
    Family("Phi-3.5, Phi-4, Phi-4-mini", ("phi3",), ("phi3",)),
    Family("GLM-4.7-Flash", ("deepseek2",), ("glm4_moe_lite",)),
    Family("Granite 3.x", ("granite",), ("granite",)),
    Family(
        "Granite 4.x", ("granitehybrid",), ("granitemoehybrid",), "state spaces (Mamba-2)",
        ("Granite 3.x",),
    ),
    Family(
        "Nemotron Nano 2, Nemotron 3 Nano", ("nemotron_h", "nemotron_h_moe"), ("nemotron_h",),
        "state spaces (Mamba-2)", ("Qwen3-30B-A3B", "Qwen3"),
    ),
    Family("DeepSeek V3, R1, Kimi K2", ("deepseek2",), ("deepseek_v3",)),
    Family("DeepSeek V2, V2-Lite, Coder V2", ("deepseek2",), ("deepseek_v2",)),
    Family("MiniCPM3, Youtu-LLM", ("minicpm3", "deepseek2"), ("minicpm3", "youtu")),
    Family("Mamba-2, OLMo Hybrid", ("mamba2",), ("mamba2", "olmo_hybrid")),
    Family("Mamba, FalconMamba", ("mamba",), ("mamba", "falcon_mamba")),
    Family("RWKV-7", ("rwkv7", "arwkv7"), ("rwkv7", "arwkv7")),
    Family("OpenELM", ("openelm",), ("openelm",)),
    Family("Jais", ("jais",), ("jais",)),
    Family(
        "PLaMo-13B, PLaMo 2, PLaMo 3", ("plamo", "plamo2", "plamo3"),
        ("plamo", "plamo2", "plamo3"), "another order in folders", ("Qwen3",),
    ),
    Family("CodeGen", (), ("codegen",), "older models", ("Qwen2.5",)),
    Family("Jamba, Bamba", ("jamba",), ("jamba", "bamba")),
    Family("Llama-Nemotron Super, Ultra, 51B", ("deci",), ("deci", "nemotron-nas")),
    Family(
        "GLM-4.5, 4.6, 4.7", ("glm4moe",), ("glm4_moe",), "router of its own",
        ("Qwen3-30B-A3B", "gpt-oss"),
    ),
    Family(
        "CLIP, SigLIP, SigLIP 2 (one size of images)", (),
        ("clip_text_model", "siglip_text_model"), "texts and images in one space", kind="embed",
    ),
    Family(
        "ModernBERT, gte-modernbert, granite-embedding r2", ("modern-bert",), ("modernbert",),
        "encoders", ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "Qwen3-Next, Qwen3-Coder-Next", ("qwen3next",), ("qwen3_next",), "gated delta net",
        ("Qwen3-30B-A3B",),
    ),
    Family(
        "Muse Glimmer", ("muse-glimmer",), ("muse_glimmer", "muse_glimmer_text"),
        "gates and norms of its own",
        ("Gemma 3", "gpt-oss"),
    ),
    Family(
        "SmolVLM, granite-docling", ("llama",), ("smolvlm", "idefics3"), "vision", ("SmolLM2",),
    ),
    Family("SmolLM3", ("smollm3",), ("smollm3",)),
    Family("GLM-4 9B, GLM-4-0414", ("chatglm", "glm4"), ("glm", "glm4")),
    Family(
        "MiniMax M2", ("minimax-m2",), ("minimax_m2",), "router of its own",
        ("gpt-oss", "Qwen3-30B-A3B"),
    ),
    Family(
        "Gemma 3n", ("gemma3n",), ("gemma3n_text",), "images and sound", ("Gemma 4 E2B to 31B",),
        part="text only",
    ),
    Family("OLMo 2", ("olmo2",), ("olmo2",)),
    Family("Olmo 3", ("olmo2",), ("olmo3",)),
    Family("Mistral Small 4", ("mistral4",), ("mistral4",)),
    Family(
        "DeepSeek V3.2, GLM-5", ("deepseek32", "glm-dsa"), ("deepseek_v32", "glm_moe_dsa"),
        "sparse attention", ("gpt-oss",), part="contexts of up to 2,048 tokens",
    ),
    Family(
        "DeepSeek V4", ("deepseek4",), ("deepseek_v4",), "compressed keys and values", ("gpt-oss",),
    ),
    Family("Qwen3.8-Flash-Next", ("qwen4exp",), ("qwen4_exp_text",), "gated delta net", ("Qwen3",)),
    Family(
        "Falcon-H1", ("falcon-h1",), ("falcon_h1",), "attention and state spaces in one layer",
        ("Qwen3",),
    ),
    Family(
        "EXAONE 3.5, EXAONE 4, EXAONE-MoE", ("exaone", "exaone4", "exaone-moe"),
        ("exaone", "exaone4", "exaone_moe"), "router of its own", ("Qwen3",),
    ),
    Family(
        "ERNIE 4.5", ("ernie4_5", "ernie4_5-moe"), ("ernie4_5", "ernie4_5_moe"),
        "router of its own", ("Qwen3", "Qwen3-30B-A3B"),
    ),
    Family(
        "HunyuanOCR, Hunyuan-VL", ("hunyuan_vl",), ("hunyuan_vl",), "vision", ("Qwen3-VL",),
        part="text only",
    ),
    Family(
        "Hunyuan, HY-MT, Hy3", ("hunyuan-dense", "hunyuan-moe", "hy_v3"),
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"), "norms after rotations", ("Qwen3",),
    ),
    Family(
        "Command A, Command R7B, tiny-aya", ("cohere2", "cohere2moe"), ("cohere2", "cohere2_moe"),
        "attention beside the MLP", ("Qwen3",),
    ),
    Family(
        "jina-embeddings v2, v3, jina-reranker v2, gte (new), EuroBERT",
        ("jina-bert-v2", "jina-bert-v3", "eurobert"),
        (
            *("jina_bert", "jina_bert_code", "jina_embeddings_v3", "xlm_roberta_flash", "gte"),
            *("new", "eurobert"),
        ),
        "encoders", ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "InternVL 3, LFM2-VL, LLaVA 1.5 and Next, Granite Vision, Pixtral 12B",
        ("qwen2", "qwen3", "lfm2", "llama", "granite"),
        ("internvl", "lfm2_vl", "llava", "llava_next"), "vision", ("Gemma 3",),
    ),
    Family(
        "PaliGemma 1 and 2, LLaVA-OneVision", (), ("paligemma", "llava_onevision"), "vision",
        ("Gemma 3",),
    ),
    Family("MiniCPM-V 4.6", ("qwen35",), ("qwen3_5_text",), "vision", ("Qwen3-VL",)),
    Family(
        "MiniCPM-V 2.6, 4.0, 4.5", ("qwen2", "qwen3", "llama"), ("qwen2", "qwen3", "llama"),
        "vision", ("Qwen3-VL",),
    ),
    Family(
        "Moondream", (), (), "vision", ("Gemma 3", "Qwen3-VL"),
        part="of some the text model, as GGUF",
    ),
    Family("Step 3.5, Step 3.7 (text), MiMo-V2", ("step35", "mimo2"), ("step3p5", "mimo_v2_flash")),
    Family(
        "Laguna, AFMoE, Seed-OSS, Apertus", ("laguna", "afmoe", "seed_oss", "apertus"),
        ("laguna", "afmoe", "seed_oss", "apertus"), "gates of their own",
        ("Qwen3", "Qwen3-30B-A3B"),
    ),
    Family("Kimi Linear", ("kimi-linear",), ("kimi_linear",)),
    Family(
        "Ling, Ring 2.5", ("bailingmoe3",), ("bailing_hybrid",), "lightning attention",
        ("Qwen3-30B-A3B",),
    ),
    Family(
        "Voxtral, Qwen3-ASR, LFM2-Audio, Granite Speech", (), ("voxtral", "qwen3_asr"), "audio",
        ("Mistral 7B",),
    ),
    Family("Llama 4 Scout", ("llama4",), ("llama4_text",), part="text only"),
    Family("LFM3", (), ("lfm3",), "convolutions", ("SmolLM2",)),
    Family("Gemma 2", ("gemma2",), ("gemma2",)),
    Family("Gemma 1, CodeGemma", ("gemma",), ("gemma",)),
    Family(
        "Qwen1.5-MoE, Qwen2-57B-A14B", ("qwen2moe",), ("qwen2_moe",), "shared experts",
        ("Qwen3-30B-A3B",),
    ),
    Family(
        "Command R, Aya 23", ("command-r",), ("cohere",), "attention beside the MLP", ("Qwen3",),
    ),
    Family("OLMo 1, OLMoE", ("olmo", "olmoe"), ("olmo", "olmoe"), "older models", ("OLMo 2",)),
    Family(
        "InternLM 1, 2, MiniCPM, XVERSE, openPangu",
        ("internlm2", "minicpm", "xverse", "pangu-embedded"),
        ("internlm", "internlm2", "minicpm", "xverse"), "code of their own", ("Qwen3",),
    ),
    Family(
        "StarCoder 2, StableLM 2", ("starcoder2", "stablelm"), ("starcoder2", "stablelm"),
        "older models", ("Qwen2.5-Coder",),
    ),
    Family(
        "GPT-2, Pythia, Phi-2, Falcon, MPT",
        ("gpt2", "gptneox", "phi2", "falcon", "mpt", "bloom", "starcoder"),
        ("gpt2", "gpt_neox", "phi", "falcon", "mpt", "bloom", "opt", "gpt_bigcode"),
        "older models", ("SmolLM2",),
    ),
    Family(
        "Qwen 1, Baichuan 1, Orion", ("qwen", "baichuan", "orion"), ("qwen", "baichuan", "orion"),
        "older models", ("Qwen2.5",),
    ),
    Family(
        "DeepSeekMoE 16B, DeepSeek-OCR, Ling 1", ("deepseek", "deepseek2-ocr", "bailingmoe"),
        ("deepseek", "bailing_moe"), "shared experts", ("Qwen3-30B-A3B",), part="text only",
    ),
    Family("DBRX", ("dbrx",), ("dbrx",), "experts of its own", ("Qwen3-30B-A3B",)),
    Family("Mellum 2", ("mellum",), ("mellum",), "two rotations", ("Qwen3-30B-A3B",)),
    Family("HyperCLOVA X SEED Think", (), ("hyperclovax",), "norms around blocks", ("Qwen3",)),
    Family(
        "Spark X2.5", ("spark2_5",), ("spark2_5",), "gates of their own", ("Qwen3",),
    ),
    Family("Maincoder", ("maincoder",), ("maincoder",), "norms after rotations", ("Qwen3",)),
    Family(
        "PaddleOCR-VL", ("paddleocr",), ("paddleocr_vl_text",), "vision", ("Qwen3",),
        part="text only",
    ),
    Family(
        "GPT-J", ("gptj",), ("gptj",), "older models", ("SmolLM2",),
        part="GGUF files that `embedlm quantize` writes",
    ),
    Family("PLM", ("plm",), ("plm",), "latent attention", ("Qwen3",)),
    Family(
        "SmallThinker 4B-A0.6B, 21B-A3B", ("smallthinker",), ("smallthinker",),
        "router before attention", ("Qwen3-30B-A3B",),
    ),
    Family("Maple", ("maple",), ("maple",), "clamped experts", ("Qwen3-30B-A3B",)),
    Family(
        "GPT-Neo, GPT, XGLM", (), ("gpt_neo", "openai-gpt", "xglm"), "older models", ("SmolLM2",)
    ),
    Family(
        "CodeShell, Refact", ("codeshell", "refact"), ("codeshell",), "older models",
        ("Qwen2.5-Coder",),
    ),
    Family(
        "Granite 3 MoE, Granite with windows", ("granitemoe", "granite_swa"),
        ("granitemoe", "granitemoeshared", "granite_swa", "granitemoe_swa"), "shared experts",
        ("Granite 3.x",),
    ),
    Family("Phi-3.5-MoE", ("phimoe",), ("phimoe",), "router of its own", ("Phi-3.5",)),
    Family(
        "Nemotron Mini, Minitron, Arcee AFM, Jais 2", ("nemotron", "arcee", "jais2"),
        ("nemotron", "arcee", "jais2"), "an MLP without a gate", ("Qwen3",),
    ),
    Family(
        "Ling 2, Ring 2, dots.llm1, Solar Open", ("bailingmoe2", "dots1", "glm4moe"),
        ("dots1", "solar_open"), "router of its own", ("Qwen3-30B-A3B",),
    ),
    Family(
        "BitNet b1.58", ("bitnet-b1.58", "bitnet"), ("bitnet",),
        "ternary weights, a norm before the last matrix of a block", ("SmolLM3",),
    ),
    Family(
        "InternLM 3, Helium, CWM, IQuest Coder, VaultGemma, FlexOlmo", ("llama", "gemma2"),
        ("internlm3", "helium", "cwm", "iquestcoder", "vaultgemma", "flex_olmo"),
        "variations of Llama and Gemma", ("Qwen3",),
    ),
    Family(
        "sentence-t5, GTR; encoders of Flan-T5, mT5, UMT5", ("t5encoder", "t5"),
        ("t5", "t5_gated", "mt5", "umt5"), "no positions, biases by distance", ("Qwen3-Embedding",),
        kind="embed", part="the encoder alone; a whole T5 opens for vectors",
    ),
    Family(
        "NeoBERT", ("neo-bert",), ("neobert",), "encoder", ("ModernBERT",), kind="embed",
    ),
    Family(
        "ERNIE 3, XLM-RoBERTa XL, RoFormer, data2vec", (),
        ("ernie", "xlm-roberta-xl", "roformer", "roberta-prelayernorm", "data2vec-text"),
        "encoders", ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "llama-embed-nemotron", ("llama-embed",), ("llama_bidirec",), "encoders",
        ("Qwen3-Embedding",), kind="embed",
    ),
    Family(
        "StarCoder, BLOOM, OPT", ("starcoder", "bloom"), ("gpt_bigcode", "bloom", "opt"),
        "older models", ("SmolLM2",),
    ),
)  # fmt: skip


def is_native(family: Family, form: Literal["gguf", "types"]) -> bool:
    """Whether a form of at least one model of the family runs, fast."""
    if form == "gguf":
        return not set(family.gguf).isdisjoint(gguf_names())
    return any(map(_opens, family.types))


def _opens(name: str) -> bool:
    """Whether folders of this ``model_type`` run, fast."""
    own = architecture(name)
    if own is None:  # of a model with a tower, whose text part has a type of its own
        return any(name in family.model_types for family in families())
    return own.folders


def runs(family: Family) -> bool:
    """Whether somebody who needs another model may be sent to this one: it runs in every form that
    it has."""
    return is_native(family, "types") and (not family.gguf or is_native(family, "gguf"))


def named(name: str) -> Family:
    """The family that lists ``name``."""
    found = [one for one in FAMILIES if name in one.name.split(", ")]
    assert len(found) == 1, f"popular_models: {name}: expected one family, found {len(found)}"
    return found[0]


def _cell(states: list[tuple[str, str]]) -> str:
    """``states``: a name and what it does; one word if all do the same."""
    if not states:
        return "not yet"
    words = {state for _, state in states}
    if len(words) == 1:
        return words.pop()
    return ", ".join(f"`{name}` {state}" for name, state in states)


def row(family: Family, slow: set[str]) -> str:
    """The family's row of the table."""
    known = gguf_names()
    gguf = _cell([(name, "runs" if name in known else "not yet") for name in family.gguf])
    folder = _cell(
        [
            (
                name,
                "runs"
                if _opens(name)
                else "slowly"
                if name in slow and not family.refused
                else "not yet",
            )
            for name in family.types
        ]
    )
    fast = gguf == folder == "runs"
    found = [one for one in family.instead if runs(named(one))]
    if fast:
        advice = family.part
    else:
        use = f"use {' or '.join(found)}" if found else ""
        advice = "; ".join(part for part in (family.needs, family.part, use) if part)
    return f"| {family.name} | {gguf} | {folder} | {advice} |"


def page() -> str:
    """The whole page."""
    # Not an import: .ci has a module "tests", which would hide the folder of that name.
    slow = runpy.run_path(str(ROOT / ".ci" / "model_docs.py"))["slow_types"]()

    def table(kind: Kind) -> str:
        rows = [row(one, slow) for one in FAMILIES if one.kind == kind]
        return "\n".join([HEAD, "|---|---|---|---|", *rows])

    return f"""# Does my model run?

<!-- .ci/popular_models.py writes this page from the registry of architectures. -->

{paragraph(_WORDS)}

## Models that write text

{table("text")}

## Models for search

How they are used: [embeddings and reranking](embeddings.md).

{table("embed")}

{paragraph(_ORDER)}
"""


def paragraph(text: str) -> str:
    """Lines of 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def main() -> None:
    wanted = page()
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if current != wanted and "--check" in sys.argv[1:]:
        raise SystemExit("popular_models: docs/popular_models.md is old: run this script")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
