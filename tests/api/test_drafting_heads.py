"""Heads of EAGLE, EAGLE-3 and Medusa: they draft what their authors' code would, and which folders
are theirs. That answers stay the same is tested with all methods, in test_speculation.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PersimmonConfig, PersimmonForCausalLM

import sdk.engine.rank.drafting_model as drafting_model
from sdk import LLM, CheckpointError, RequestError, SamplingParams, UnsupportedError
from sdk.api.speculative_config import speculative_config
from sdk.engine.rank.drafting_model import DraftingModel
from sdk.engine.scheduling.drafts import Drafts
from tests.drafting_heads import (
    DRAFT_VOCAB,
    HIDDEN,
    MEDUSA_BLOCKS,
    MEDUSA_CONFIG,
    MEDUSA_HEADS,
    PROMPTS,
    VOCAB,
    TinyHeads,
    draft_logits,
    features,
    layer_config,
    one_thread,
)

METHODS = ("eagle", "eagle3", "medusa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = [int(token) for token in range(5, 105)]
Change = Callable[[dict[str, Tensor]], None]


#: Only the head drafts.
DRAFTS = {"adaptive": False, "num_speculative_tokens": 3, "prompt_lookup_min": 0}


def opened(heads: TinyHeads, method: str, **options: Any) -> LLM:
    config = {"method": method, "model": heads.folders[method], **DRAFTS}
    settings: dict[str, Any] = {
        "max_model_len": 192,
        "max_num_seqs": 6,
        "speculative_config": config,
    }
    return LLM(heads.target, **settings | options)


def answers(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def rate(llm: LLM, prompts: Any, params: Any = GREEDY) -> float:
    """The share of drafts that is accepted while these prompts are answered."""
    before = llm.get_metrics()
    llm.generate(prompts, params)
    after = llm.get_metrics()
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    return float(accepted / drafted)


class Drawn:
    """Notes the logits from which drafts are drawn, with all tokens before them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], int, Tensor]] = []
        known: dict[str, int] = {}
        draft, read = DraftingModel.draft, drafting_model._tokens

        def noted(self: DraftingModel, rows: Any, requests: Any) -> Any:
            for row, request in zip(rows, requests, strict=True):
                known[row.request_id] = len(request.token_ids)
            return draft(self, rows, requests)

        def tokens(launched: Any) -> list[int]:
            rows = zip(launched.batch.rows, launched.batch.requests, strict=True)
            for index, (row, request) in enumerate(rows):
                logits = launched.logits[index].clone()
                self.seen.append((list(request.token_ids), known[row.request_id], logits))
            return read(launched)

        monkeypatch.setattr(DraftingModel, "draft", noted)
        monkeypatch.setattr(drafting_model, "_tokens", tokens)

    def check(self, heads: TinyHeads, method: str) -> None:
        """Compare all logits with those of the torch module."""
        texts: list[list[int]] = []  # none is the beginning of another
        for tokens, known, _ in sorted(self.seen, key=lambda one: -one[1]):
            if not any(text[:known] == tokens[:known] for text in texts):
                texts.append(tokens[:known])
        with one_thread():
            found = [features(heads.model, torch.tensor([text])) for text in texts]
            for tokens, known, logits in self.seen:
                which = next(i for i, text in enumerate(texts) if text[:known] == tokens[:known])
                expected = draft_logits(heads.modules[method], found[which], tokens, known)
                possible = expected > -1e29
                assert ((logits > -1e29) == possible).all()
                # float32 in another order of additions, over 8 layers: 5e-6 was seen of at most 8
                torch.testing.assert_close(logits[possible], expected[possible], rtol=0, atol=1e-4)


EXACT: dict[str, Any] = {"compute": "exact", "enable_prefix_caching": False}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("method", METHODS)
def test_logits_of_drafts_are_those_of_the_published_head(
    tiny_heads: TinyHeads, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with prompts in chunks, where most hidden states come from other steps."""
    drawn = Drawn(monkeypatch)
    for options in ({}, {"max_num_batched_tokens": 16}):
        with opened(tiny_heads, method, **EXACT, **options) as llm:
            answers(llm, [*PROMPTS, LONG], GREEDY.clone(max_tokens=12))
    assert len(drawn.seen) > 100
    drawn.check(tiny_heads, method)


@pytest.mark.parametrize("method", METHODS)
def test_hidden_states_of_steps_without_drafts_are_kept(
    tiny_heads: TinyHeads, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps between drafts are repeated batches; so many that what waits must be run once."""
    choose = Drafts.choose

    def rarely(
        self: Drafts, requests: Any, budget: int, step: int, *, repeats: bool = False
    ) -> Any:
        drafts = step % 40 == 39
        return drafts and choose(self, requests, budget, step, repeats=repeats and not drafts)

    monkeypatch.setattr(Drafts, "choose", rarely)
    drawn = Drawn(monkeypatch)
    with opened(tiny_heads, method, **EXACT) as llm:
        answers(llm, PROMPTS[1:4], GREEDY.clone(max_tokens=150))
    assert 20 < len(drawn.seen) < 60
    assert max(known for _, known, _ in drawn.seen) > 120
    drawn.check(tiny_heads, method)


@pytest.mark.parametrize("method", METHODS)
def test_many_drafts_are_accepted(tiny_heads: TinyHeads, method: str) -> None:
    """A head that guesses would have 1 in 448."""
    with opened(tiny_heads, method) as llm:
        assert rate(llm, PROMPTS) > 0.08
        assert rate(llm, PROMPTS) > 0.08  # after prefix hits
        assert rate(llm, PROMPTS[0], GREEDY.clone(n=3, temperature=0.1, seed=1)) > 0.08


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_goes_on_with_drafts(tiny_heads: TinyHeads, method: str) -> None:
    """The keys and values of an ended request are found again, also those of its last page."""
    plain: Any = {"speculative_config": None}
    with opened(tiny_heads, method, **plain) as llm:
        first = answers(llm, [LONG[:37]])[0][0]
        second = answers(llm, [[*LONG[:37], *first, 9, 8]])
    with opened(tiny_heads, method) as llm:
        assert answers(llm, [LONG[:37]])[0][0] == first
        before = llm.get_metrics()["num_draft_tokens"]
        assert answers(llm, [[*LONG[:37], *first, 9, 8]]) == second
        assert llm.get_metrics()["num_draft_tokens"] > before


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_request_whose_hidden_states_are_gone_gets_no_drafts(
    tiny_heads: TinyHeads, method: str
) -> None:
    """A snapshot has keys and values of the model only."""
    with opened(tiny_heads, method) as llm:
        expected = answers(llm, [LONG])
        snapshot = llm.snapshot(LONG)
    with opened(tiny_heads, method) as llm:
        assert llm.restore(snapshot) > 0
        assert answers(llm, [LONG]) == expected
        assert llm.get_metrics()["num_draft_tokens"] == 0
        answers(llm, PROMPTS)
        assert llm.get_metrics()["num_draft_tokens"] > 0
        llm.reset_prefix_cache()
        assert rate(llm, [LONG]) >= 0


def test_medusa_needs_only_the_last_hidden_state(tiny_heads: TinyHeads) -> None:
    with opened(tiny_heads, "medusa") as llm:
        snapshot = llm.snapshot(LONG)
    with opened(tiny_heads, "medusa") as llm:
        assert llm.restore(snapshot) > 0
        answers(llm, [LONG])
        assert llm.get_metrics()["num_draft_tokens"] > 0


@pytest.mark.slow
def test_rank_0_drafts_for_two_ranks(tiny_heads: TinyHeads) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "compute": "exact", "num_threads": 2}
    short = GREEDY.clone(max_tokens=10)  # ranks that share two cores wait for each other
    params = [short, short.clone(temperature=0.4, seed=3), short.clone(logprobs=2)]
    with opened(tiny_heads, "eagle", **options | {"speculative_config": None}) as llm:
        plain = answers(llm, PROMPTS[:3], params)
        weights = llm.memory_plan.weights
    for method in METHODS:
        with opened(tiny_heads, method, **options) as llm:
            assert answers(llm, PROMPTS[:3], params) == plain
            assert llm.get_metrics()["num_accepted_tokens"] > 0
            made = llm.memory_plan
        stored = sum(tensor.nbytes for tensor in tensors_of(tiny_heads.folders[method]).values())
        again = 0 if method == "medusa" else 2 * VOCAB * HIDDEN * 4  # embedding and head as a whole
        assert made.drafting_weights == pytest.approx(stored + again, rel=0.03)
        assert made.weights == weights + made.drafting_weights


@pytest.mark.parametrize("method", [*METHODS, "draft_model"])
def test_prompts_that_are_embeddings_keep_their_answers(tiny_heads: TinyHeads, method: str) -> None:
    options: dict[str, Any] = {"enable_prompt_embeds": True}
    with opened(tiny_heads, "eagle", **options, speculative_config=None) as llm:
        runner: Any = llm._runner()
        with torch.inference_mode():
            embeds = runner.model.embed(torch.tensor(PROMPTS[0])).clone()
        prompts: Any = [{"prompt_embeds": embeds}, {"prompt_token_ids": PROMPTS[1]}]
        plain = answers(llm, prompts)
    if method == "draft_model":
        options["speculative_config"] = {"model": tiny_heads.target, "adaptive": False}
        method = "eagle"
    with opened(tiny_heads, method, **options) as llm:
        assert answers(llm, prompts) == plain
        assert answers(llm, prompts) == plain
        assert llm.get_metrics()["num_draft_tokens"] > 0


# -- folders -----------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    return found


def copied(heads: TinyHeads, method: str, to: Path, change: Change, **config: Any) -> Path:
    """A copy of a head with other tensors and other values in its config, as safetensors."""
    to.mkdir(exist_ok=True)
    tensors = tensors_of(heads.folders[method])
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "h.safetensors")
    known = json.loads((heads.folders[method] / "config.json").read_text()) | config
    known = {key: value for key, value in known.items() if value is not None}
    (to / "config.json").write_text(json.dumps(known))
    return to


def renamed(*pairs: tuple[str, str]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            for begin, other in pairs:
                if name.startswith(begin):
                    tensors[other + name.removeprefix(begin)] = tensors.pop(name)
                    break

    return change


def nothing(tensors: dict[str, Tensor]) -> None:
    return


def joined(*changes: Change) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for one in changes:
            one(tensors)

    return change


def with_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)


#: Other ways to store the same head: they must draft the same tokens.
SPELLINGS: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "EAGLE of vLLM": (
        "eagle",
        renamed(("", "model.")),
        {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
    ),
    "EAGLE-3 of vLLM": (
        "eagle3",
        renamed(("midlayer.", "layers.0.")),
        {"architectures": ["Eagle3LlamaForCausalLM"]},
    ),
    "speculators": (
        "eagle3",
        renamed(("midlayer.", "layers.0.")),
        {
            **dict.fromkeys(layer_config()),
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer_config(),
        },
    ),
    "Medusa of vLLM": (
        "medusa",
        renamed(
            *((f"{k}.{j}.linear.", f"blocks.{k}.layers.{j}.") for k in range(3) for j in range(2)),
            *((f"{k}.{MEDUSA_BLOCKS}.", f"lm_heads.{k}.") for k in range(3)),
        ),
        {
            **dict.fromkeys(MEDUSA_CONFIG),
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": MEDUSA_HEADS,
            "num_hidden_layers": MEDUSA_BLOCKS,
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
        },
    ),
    "Medusa with a prefix": ("medusa", renamed(("", "medusa_head.")), {}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_a_head_draft_the_same(
    tiny_heads: TinyHeads, tmp_path: Path, spelling: str
) -> None:
    method, change, config = SPELLINGS[spelling]
    folder = copied(tiny_heads, method, tmp_path, change, **config)
    counts = []
    for model in (tiny_heads.folders[method], folder):
        chosen = {"model": model, "adaptive": False, "num_speculative_tokens": 3}
        with opened(tiny_heads, method, speculative_config=chosen) as llm:
            assert speculative_config(chosen).method == method  # type: ignore[union-attr]
            answers(llm, PROMPTS)
            metrics = llm.get_metrics()
            counts.append((metrics["num_draft_tokens"], metrics["num_accepted_tokens"]))
    assert counts[0] == counts[1]


def test_a_file_of_torch_holds_the_same_head(tiny_heads: TinyHeads, tmp_path: Path) -> None:
    torch.save(tensors_of(tiny_heads.folders["eagle3"]), tmp_path / "pytorch_model.bin")
    shutil.copy(tiny_heads.folders["eagle3"] / "config.json", tmp_path)
    config = {"model": tmp_path, **DRAFTS}
    with (
        opened(tiny_heads, "eagle3") as llm,
        opened(tiny_heads, "eagle3", speculative_config=config) as other,
    ):
        assert rate(llm, PROMPTS) == rate(other, PROMPTS)


def test_a_head_uses_its_own_embedding_if_it_has_one(tiny_heads: TinyHeads, tmp_path: Path) -> None:
    """With one of zeros EAGLE-3 does not know the tokens, so it accepts fewer drafts."""
    folder = copied(tiny_heads, "eagle3", tmp_path, with_embedding)
    config = {"model": folder, **DRAFTS}
    with (
        opened(tiny_heads, "eagle3") as llm,
        opened(tiny_heads, "eagle3", speculative_config=config) as other,
    ):
        assert rate(other, PROMPTS) < rate(llm, PROMPTS)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_is_packed_while_it_is_loaded(tiny_heads: TinyHeads, method: str) -> None:
    config = {"model": tiny_heads.folders[method], "quantization": "int8", **DRAFTS}
    plain = LLM.plan(tiny_heads.target, speculative_config={"model": config["model"]})
    with opened(tiny_heads, method, speculative_config=config) as llm:
        assert rate(llm, PROMPTS) > 0.08
        assert llm.memory_plan.drafting_weights < 0.6 * plain.drafting_weights
        runner: Any = llm._runner()
        packed = [
            str(linear.weight.spec)
            for passes in runner.drafting._passes
            for _, linear in passes._model.linears()
        ]
        assert any("w8" in spec or "int8" in spec for spec in packed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("method", METHODS)
def test_memory_of_a_head_is_planned_and_can_be_left_out(
    tiny_heads: TinyHeads, method: str
) -> None:
    path, options = tiny_heads.target, {"max_model_len": 128, "max_num_seqs": 6}
    config = {"method": method, "model": tiny_heads.folders[method]}
    plain = LLM.plan(path, **options)
    made = LLM.plan(path, **options, speculative_config=config)
    stored = sum(tensor.nbytes for tensor in tensors_of(tiny_heads.folders[method]).values())
    assert made.drafting_weights == pytest.approx(stored, rel=0.03)
    assert made.weights == plain.weights + made.drafting_weights
    pages = 8 if method != "medusa" else 1  # the model has eight layers, the head one
    assert (made.page_bytes == plain.page_bytes) == (method == "medusa")
    assert made.page_bytes <= plain.page_bytes * (1 + 1 / pages)
    assert made.workspace > plain.workspace
    options["kv_cache_memory_bytes"] = 10 * made.page_bytes
    needed = LLM.plan(path, **options, speculative_config=config).total
    small = LLM.plan(path, **options, memory=needed - 2**16, speculative_config=config)
    assert not small.fits and small.alternatives[0].options == {"speculative_config": None}


def test_medusa_drafts_as_many_tokens_as_it_has_heads(tiny_heads: TinyHeads) -> None:
    config = {"model": tiny_heads.folders["medusa"], "num_speculative_tokens": 20}
    made = LLM.plan(tiny_heads.target, max_num_seqs=2, speculative_config=config)
    assert made.draft_tokens == 2 * MEDUSA_HEADS


def cut(name: str, rows: int, columns: int | None = None) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:rows, :columns] if columns else tensors[name][:rows]

    return change


def added(name: str, *shape: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(*shape)

    return change


def without(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def shifted(by: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] += by

    return change


def all_one(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = -torch.arange(DRAFT_VOCAB)


@pytest.mark.parametrize(
    ("method", "change", "config", "message"),
    [
        ("eagle", nothing, {"hidden_size": 32}, "hidden_size: expected 64 as in the model"),
        ("eagle", nothing, {"vocab_size": 500}, "vocab_size: expected 448 as in the model.* 500"),
        ("eagle", nothing, {"num_attention_heads": 0}, "num_attention_heads"),
        ("eagle", cut("fc.weight", 64, 64), {}, r"fc': expected shape \[64, 128\].*\[64, 64\]"),
        ("eagle", without("fc.weight"), {}, "expected a tensor 'model.layers.0.fc', found none"),
        ("eagle", renamed(("fc.", "proj.")), {}, "neither a tensor 'fc' nor blocks of Medusa"),
        (
            "eagle",
            without("layers.0.mlp.up_proj.weight"),
            {},
            r"expected a tensor 'model.layers.0.mlp.up_proj', found none \(1 of 9 are missing\)",
        ),
        ("eagle", added("layers.1.mlp.up_proj.weight", 2, 2), {}, "'layers.1.mlp.* not part of"),
        ("eagle3", without("lm_head.weight"), {}, "expected a tensor 'lm_head'"),
        ("eagle3", without("d2t"), {}, "expected a tensor 'd2t'"),
        ("eagle3", shifted(1000), {}, r"d2t: expected tokens in 0\.\.447"),
        ("eagle3", shifted(-1000), {}, r"d2t: expected tokens in 0\.\.447, found -"),
        ("eagle3", all_one, {}, "d2t: expected a different token for each row"),
        ("eagle3", nothing, {"draft_vocab_size": 500}, r"draft_vocab_size: .*1\.\.448, found 500"),
        ("eagle3", nothing, {"norm_before_residual": 1}, "norm_before_residual: .* true or false"),
        (
            "eagle3",
            nothing,
            {"eagle_aux_hidden_state_layer_ids": [1, 1, 9]},
            "three different layers below 8",
        ),
        (
            "eagle3",
            nothing,
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state=false is not supported",
        ),
        ("medusa", cut("0.2.weight", 100), {}, r"heads.0.lm_head': expected shape \[448, 64\]"),
        ("medusa", nothing, {"medusa_num_heads": 4}, "expected a tensor 'heads.3.blocks.0'"),
        ("medusa", nothing, {"medusa_num_heads": "3"}, r"medusa_num_heads: expected an integer"),
        ("medusa", nothing, {"hidden_size": 128}, "hidden_size: expected 64 as in the model"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    tiny_heads: TinyHeads,
    tmp_path: Path,
    method: str,
    change: Change,
    config: dict[str, Any],
    message: str,
) -> None:
    folder = copied(tiny_heads, method, tmp_path, change, **config)
    with pytest.raises((RequestError, CheckpointError), match=message) as raised:
        LLM.plan(tiny_heads.target, speculative_config={"method": method, "model": folder})
    assert str(raised.value).startswith("speculative_config: ")
    assert str(folder) in str(raised.value)


def test_a_head_of_another_method_is_refused(tiny_heads: TinyHeads, golden: Path) -> None:
    def planned(method: str, model: Path) -> None:
        LLM.plan(tiny_heads.target, speculative_config={"method": method, "model": model})

    with pytest.raises(RequestError, match="method: expected 'eagle3' for the head in"):
        planned("eagle", tiny_heads.folders["eagle3"])
    with pytest.raises(RequestError, match="method: expected 'medusa' for the head in"):
        planned("eagle3", tiny_heads.folders["medusa"])
    with pytest.raises(RequestError, match=r"expected a whole model, found a head.*method 'eagle'"):
        planned("draft_model", tiny_heads.folders["eagle"])
    with pytest.raises(CheckpointError, match="expected a head of EAGLE, EAGLE-3 or Medusa"):
        planned("eagle", tiny_heads.target)
    with pytest.raises(CheckpointError, match=r"^speculative_config: model: .*nowhere"):
        planned("medusa", golden / "nowhere")
    with pytest.raises(RequestError, match=r"model: expected the path or name of .* found None"):
        speculative_config("eagle")
    with pytest.raises(RequestError, match="model belongs to method"):
        speculative_config({"method": "ngram", "model": "x"})


def test_a_model_of_few_layers_has_not_three_streams(tiny_heads: TinyHeads, golden: Path) -> None:
    config = {"method": "eagle3", "model": tiny_heads.folders["eagle3"]}
    with pytest.raises(UnsupportedError, match="expected at least 7 layers, found 2"):
        LLM.plan(golden / "arch-llama3" / "hf", speculative_config=config)


@pytest.mark.slow
def test_a_model_of_transformers_own_code_gives_only_its_last_hidden_states(
    tiny_heads: TinyHeads, golden: Path, tmp_path: Path
) -> None:
    sizes = tiny_heads.model.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    torch.manual_seed(0)
    config = PersimmonConfig(**{name: sizes[name] for name in names}, num_attention_heads=4)
    model = PersimmonForCausalLM(config)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden / "arch-llama3" / "hf" / name, tmp_path)
    heads = tiny_heads._replace(target=tmp_path)
    with opened(heads, "eagle", speculative_config=None) as llm:
        plain = answers(llm, PROMPTS)
    for method in ("eagle", "medusa"):
        with opened(heads, method) as llm:
            assert answers(llm, PROMPTS) == plain
            assert llm.get_metrics()["num_draft_tokens"] > 0
    with pytest.raises(UnsupportedError, match=r"runs through transformers.* use method 'eagle'"):
        opened(heads, "eagle3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_offload": "auto"}, "method 'eagle' needs disk_offload=0, found 'auto'"),
        ({"device": "cuda"}, "method 'eagle' is not supported on a GPU"),
    ],
)
def test_what_a_head_cannot_do_is_refused(
    tiny_heads: TinyHeads, options: dict[str, Any], message: str
) -> None:
    config = {"model": tiny_heads.folders["eagle"]}
    with pytest.raises(RequestError, match=f"^speculative_config: .*{message}"):
        LLM.plan(tiny_heads.target, speculative_config=config, **options)
