"""Speculative decoding through the public class: the same answers, fewer steps, its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sdk import LLM, CheckpointError, RequestError, SamplingParams, UnsupportedError
from sdk.api.params import RequestOutputKind
from sdk.api.speculative_config import SpeculativeConfig, speculative_config
from sdk.engine.plan import StepRow
from sdk.engine.scheduling.drafts import Drafts
from sdk.engine.scheduling.prompt_lookup import LOOKUP_BYTES
from sdk.engine.scheduling.suffix_automaton import SuffixAutomaton
from tests.drafting_heads import PROMPTS, TinyHeads
from tests.next_token import NextToken

#: As many drafts as possible, whatever they cost: the most that can go wrong.
ALWAYS = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
#: The weights of a model in 4 bits draft for it.
ONLY_WEIGHTS = {"num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 0}
SELF = {"method": "self", **ONLY_WEIGHTS}
SMALLER = {"method": "draft_model", **ONLY_WEIGHTS}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = GREEDY.clone(temperature=0.9, top_p=0.9, seed=3)
COLD = DRAWN.clone(temperature=0.1, seed=11)
#: A structure with forced text.
FORCED = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 4},
        "year": {"enum": [1999, 2001]},
    },
    "required": ["first_name", "year"],
    "additionalProperties": False,
}
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "cold": COLD,
    "penalties": COLD.clone(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    "no n-gram twice": GREEDY.clone(no_repeat_ngram_size=3),
    "dry": GREEDY.clone(dry_multiplier=0.8, dry_allowed_length=2, dry_sequence_breakers=[]),
    "logprobs": COLD.clone(logprobs=3),
    "prompt logprobs": GREEDY.clone(prompt_logprobs=1, logprobs=0),
    "stop tokens": COLD.clone(stop_token_ids=list(range(0, 440, 9)), min_tokens=12),
    "bad words": COLD.clone(bad_words=["e", "th"]),
    "banned strings": COLD.clone(banned_strings=["e", "th", "ro", "a", " f"], logprobs=1),
    "biased": COLD.clone(logit_bias={9: 3.0, 70: 4.0}),
    "several answers": COLD.clone(n=3),
    "the best answers": COLD.clone(n=2, best_of=3),
    "mirostat": COLD.clone(mirostat_mode=2),
    "callbacks": COLD.clone(logits_processors=[lambda _, row: row * 1.01]),
    "guided": GREEDY.clone(guidance_scale=1.5),
    "object": DRAWN.clone(structured_outputs={"json": FORCED}, ignore_eos=False, max_tokens=90),
    "choice": GREEDY.clone(structured_outputs={"choice": ["a long choice", "another long one"]}),
}
#: How messages list the methods.
METHODS = "'ngram', 'grammar', 'self', 'mtp', 'draft_model', 'eagle', 'eagle3' or 'medusa'"
NO_DRAFTS = ("mirostat", "callbacks", "guided")
#: Options of the engine; each is one row of the matrix.
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "adaptive": {},
    "operator by operator": {"enforce_eager": True},
    "k8v4": {"kv_cache_dtype": "k8v4"},
    "int8": {"kv_cache_dtype": "int8"},
    "float32": {"kv_cache_dtype": "float32"},
    "exact": {"compute": "exact"},
    "short steps": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "tiers": {"kv_policy": "fp16>int8"},
}


class Method(NamedTuple):
    """A model and how it drafts."""

    path: Path
    config: dict[str, Any]


@pytest.fixture(
    params=[
        *("ngram", "self", "mtp", "draft_model", "eagle", "eagle3", "medusa"),
        "weights and matches",
    ]
)
def method(request: pytest.FixtureRequest, golden: Path) -> Method:
    if request.param in ("eagle", "eagle3", "medusa"):
        heads: TinyHeads = request.getfixturevalue("tiny_heads")
        config = SMALLER | {"method": request.param, "model": heads.folders[request.param]}
        return Method(heads.target, config)
    if request.param == "mtp":
        tiny: NextToken = request.getfixturevalue("tiny_next_token")
        return Method(tiny.folder, {"method": "mtp", **ONLY_WEIGHTS})
    if request.param == "ngram":
        return Method(golden / "gguf-Q8_0" / "model.gguf", ALWAYS)
    if request.param in ("draft_model", "weights and matches"):
        config = SMALLER | {"model": golden / "gguf-Q4_0" / "model.gguf"}
        if request.param != "draft_model":
            config |= {"prompt_lookup_min": 2}
        return Method(golden / "gguf-Q8_0" / "model.gguf", config)
    return Method(golden / "arch-llama3" / "hf", SELF)


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"max_model_len": 128, "max_num_seqs": 6, **options})


def drafting(path: Path, **options: Any) -> LLM:
    return opened(path, **{"speculative_config": ALWAYS, **options})


def facts(outputs: Sequence[Any]) -> list[Any]:
    """Everything that answers have, except times."""
    return [
        (
            output.outputs,
            [dict(row) if row else None for row in output.prompt_logprobs or ()],
            output.num_cached_tokens,
        )
        for output in outputs
    ]


def seen(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: Any = PROMPTS) -> Any:
    found = facts(llm.generate(prompts, params))
    llm._driver._engine.scheduler.check()
    return found


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(method: Method, kind: str) -> None:
    params = KINDS[kind]
    with opened(method.path) as llm:
        plain = seen(llm, params)
    with drafting(method.path, speculative_config=method.config) as llm:
        assert seen(llm, params) == plain
        metrics = llm.get_metrics()
        assert (metrics["num_draft_tokens"] > 0) == (kind not in NO_DRAFTS)
        llm.reset_prefix_cache()
        assert seen(llm, params) == plain


def test_forced_tokens_are_all_accepted(tiny_path: Path) -> None:
    params = [KINDS["object"].clone(seed=seed) for seed in range(4)]
    prompts = [PROMPTS[0]] * 4
    with opened(tiny_path) as llm:
        plain = seen(llm, params, prompts)
        steps = llm.get_metrics()["num_steps"]
    with drafting(tiny_path, speculative_config={"method": "grammar", "adaptive": False}) as llm:
        assert seen(llm, params, prompts) == plain
        metrics = llm.get_metrics()
        assert metrics["num_accepted_tokens"] == metrics["num_draft_tokens"] > 40
        assert metrics["num_steps"] < 0.7 * steps


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_those_without_drafts_on_every_engine(method: Method, engine: str) -> None:
    """All kinds of requests run together."""
    options = {"speculative_config": method.config, **ENGINES[engine]}
    if engine == "adaptive":
        options["speculative_config"] = method.config | {"adaptive": True}
    params = [params for params in KINDS.values() if params.n == 1]
    if engine in ("whole prompts", "one at a time"):  # not with negative prompts
        params = [params for params in params if params.guidance_scale == 1]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    with opened(method.path, **options | {"speculative_config": None}) as llm:
        plain = [found[:2] for found in seen(llm, params, prompts)]
    with opened(method.path, **options) as llm:
        assert [found[:2] for found in seen(llm, params, prompts)] == plain
        again = [found[:2] for found in seen(llm, params, prompts)]  # prefix hits, known answers
        assert again == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0


@pytest.mark.quick_cases(3)
def test_preempted_requests_come_back_to_the_same_answers(method: Method) -> None:
    params = [COLD.clone(max_tokens=70, seed=seed) for seed in range(5)]
    with opened(method.path) as llm:
        plain = [found[0] for found in seen(llm, params)]
    options: dict[str, Any] = {"speculative_config": method.config}
    size = LLM.plan(method.path, max_model_len=128, max_num_seqs=6, **options).page_bytes
    options["kv_cache_memory_bytes"] = 12 * size
    with drafting(method.path, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert [output.outputs for output in outputs] == plain
        metrics = llm.get_metrics()
        assert metrics["num_preemptions"] > 0 < metrics["num_accepted_tokens"]


def test_no_page_moves_to_a_lower_tier_for_a_draft(tiny_path: Path) -> None:
    """Two requests of one page each, in two pages: a draft in a third page does not run."""
    options = {"max_model_len": 256, "kv_policy": "fp16>int8", "kv_keep": (0, 0)}
    params = GREEDY.clone(max_tokens=126)
    with opened(tiny_path, **options) as llm:
        memory = 2 * llm.memory_plan.page_bytes
    with drafting(tiny_path, **options, kv_cache_memory_bytes=memory) as llm:
        llm.generate([[7, 7], [9, 9]], params)
        metrics = llm.get_metrics()
        assert metrics["num_accepted_tokens"] > 0
        assert metrics["num_pages_lowered"] == 0


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("stop", [{"stop": ["e"]}, {"stop_regex": "[a-f]{2}"}])
def test_text_that_stops_within_accepted_drafts_ends_there(
    method: Method, stop: dict[str, Any]
) -> None:
    params = COLD.clone(**stop, min_tokens=6)
    with opened(method.path) as llm:
        plain = seen(llm, params)
    assert any(found[0][0].finish_reason == "stop" for found in plain)
    with drafting(method.path, speculative_config=method.config) as llm:
        assert seen(llm, params) == plain
        told = sum(len(found[0][0].token_ids) for found in plain)
        assert llm.get_metrics()["num_generation_tokens"] == told


def test_a_stream_has_the_same_text_in_fewer_pieces(tiny_path: Path) -> None:
    params = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
    with opened(tiny_path) as llm:
        plain = seen(llm, GREEDY)[0][0][0]
    with drafting(tiny_path) as llm:
        pieces = [output.outputs[0] for output in llm.stream(PROMPTS[0], params)]
        assert "".join(piece.text for piece in pieces) == plain.text
        assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
        assert len(pieces) < 40


@pytest.mark.slow
def test_two_ranks_verify_the_same_drafts(tiny_path: Path) -> None:
    options = {"tensor_parallel_size": 2, "compute": "exact", "num_threads": 2}
    params = [GREEDY, COLD, DRAWN, COLD.clone(logprobs=2), GREEDY]
    with opened(tiny_path, **options) as llm:
        plain = seen(llm, params)
    with drafting(tiny_path, **options) as llm:
        assert seen(llm, params) == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0


def test_a_question_that_was_asked_before_takes_fewer_steps(tiny_path: Path) -> None:
    """Its answer is known, but not to requests with another cache salt."""
    params = DRAWN.clone(max_tokens=64)
    steps = []
    with drafting(tiny_path, max_model_len=160) as llm:
        for salt in ("a", "a", "b"):
            before = llm.get_metrics()["num_steps"]
            llm.generate({"prompt_token_ids": PROMPTS[3], "cache_salt": salt}, params)
            steps.append(llm.get_metrics()["num_steps"] - before)
    assert steps[1] <= 12
    assert steps[2] == steps[0] > 40


def test_steps_without_drafts_repeat_the_last_batch(tiny_path: Path) -> None:
    """Nothing is planned request by request, and the rank repeats the same rows."""
    params = DRAWN.clone(temperature=2.0, top_p=1.0, max_tokens=100)
    with opened(tiny_path, speculative_config="ngram") as llm:
        rows: list[Any] = []
        launch = llm._driver._engine._executor.launch

        def noted(plan: Any) -> None:
            rows.append(plan.rows)
            launch(plan)

        llm._driver._engine._executor.launch = noted  # type: ignore[method-assign]
        llm.generate(PROMPTS[3], params)
        again = sum(rows[i] is rows[i - 1] for i in range(1, len(rows)))
        assert again > 90


def test_what_was_drafted_and_accepted_is_counted(tiny_path: Path) -> None:
    with drafting(tiny_path) as llm:
        outputs = llm.generate(PROMPTS, [*[GREEDY] * 4, GREEDY.clone(n=2)])
        metrics = llm.get_metrics()
        counted = [output.metrics for output in outputs if output.metrics is not None]
        drafted = sum(one.num_draft_tokens for one in counted)
        accepted = sum(one.num_accepted_tokens for one in counted)
        assert len(counted) == 5 and drafted > accepted > 0
        assert metrics["num_draft_tokens"] == drafted
        assert metrics["num_accepted_tokens"] == accepted
        assert metrics["draft_acceptance_rate"] == accepted / drafted
    with opened(tiny_path) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.get_metrics()["draft_acceptance_rate"] == 0.0


def test_the_plan_counts_the_logits_of_drafts_and_what_is_looked_up(tiny_path: Path) -> None:
    def workspace(**options: Any) -> int:
        return LLM.plan(tiny_path, max_model_len=128, max_num_seqs=16, **options).workspace

    plain, few = workspace(), workspace(speculative_config={**ALWAYS, "num_speculative_tokens": 1})
    many = workspace(speculative_config="ngram")
    assert many - few == (64 - 8) * 448 * 4
    assert few - plain > 50_000 * SuffixAutomaton.STATE_BYTES
    plan = LLM.plan(tiny_path, speculative_config="ngram", max_num_seqs=4)
    assert plan.draft_tokens == 32
    assert "4 requests and 32 draft tokens" in str(plan)


def test_the_plan_counts_the_weights_that_draft(golden: Path) -> None:
    path, options = golden / "arch-llama3" / "hf", {"max_model_len": 64, "max_num_seqs": 2}
    plain = LLM.plan(path, **options)
    only_weights = {"method": "self", "prompt_lookup_min": 0}
    plan = LLM.plan(path, **options, speculative_config=only_weights)
    packed = LLM.plan(path, **options, quantization="rtn-w6g64-h6")
    assert plan.drafting_weights == packed.weights
    assert plan.weights == plain.weights + packed.weights
    assert plan.loading >= plain.weights + packed.weights
    rows = 2 * (448 * 4 + 2 * 64 * 4 + (4 * 64 + 3 * 128) * 4) + 16 * 448 * 4
    assert plan.workspace == plain.workspace + rows
    assert "of these are the weights that draft" in str(plan)
    both = LLM.plan(path, **options, speculative_config="self")
    assert both.workspace == plan.workspace + LOOKUP_BYTES
    with LLM(path, **options, speculative_config=only_weights) as llm:
        assert "drafts     self: up to 8 draft tokens per request, from the model" in llm.explain()
        assert llm.memory_plan.drafting_weights == plan.drafting_weights


def test_drafts_of_the_models_own_weights_follow_its_samples(golden: Path) -> None:
    """The draws of drafts use the random numbers of the tokens they predict: 64 % are accepted.
    With other random numbers it is 0.2 %, because this model's probabilities are flat.
    """
    config = SELF | {"quantization": "int8"}
    with drafting(golden / "arch-llama3" / "hf", speculative_config=config) as llm:
        llm.generate(PROMPTS, DRAWN)
        assert llm.get_metrics()["draft_acceptance_rate"] > 0.4


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_forced_text_and_matches_come_before_weights(
    golden: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """One engine uses all of them, some in the same step."""
    seen_rows: list[Sequence[StepRow]] = []
    learn = Drafts.learn_step

    def learning(self: Drafts, rows: Sequence[StepRow], *rest: Any) -> None:
        seen_rows.append(rows)
        learn(self, rows, *rest)

    monkeypatch.setattr(Drafts, "learn_step", learning)
    path, smaller = (golden / f"gguf-{name}" / "model.gguf" for name in ("Q8_0", "Q4_0"))
    options = {"compute": "exact", "num_threads": ranks}
    params = [KINDS["object"], GREEDY, COLD, KINDS["object"].clone(seed=8)]
    prompts = [PROMPTS[0], [5, 6, 7, 8] * 6, PROMPTS[1], PROMPTS[2]]
    with opened(path, **options) as llm:
        plain = seen(llm, params, prompts)
    config = {**SMALLER, "model": smaller, "prompt_lookup_min": 3}
    options |= {"tensor_parallel_size": ranks}
    with drafting(path, **options, speculative_config=config) as llm:
        assert seen(llm, params, prompts) == plain
        drafted = [outputs.metrics for outputs in llm.generate(prompts, params)]
    kinds = {row.drafts_on_rank for rows in seen_rows for row in rows if row.drafts}
    assert kinds == {True, False}
    assert any(
        len({row.drafts_on_rank for row in rows if row.drafts}) == 2 for rows in seen_rows
    ), "no step had both"
    assert all(one is not None and one.num_accepted_tokens for one in drafted[:2])


def test_sliding_windows_and_their_own_weights_agree(golden: Path) -> None:
    params = [GREEDY, COLD, KINDS["penalties"], KINDS["logprobs"], GREEDY]
    with opened(golden / "arch-gemma3" / "hf") as llm:
        plain = seen(llm, params)
    with drafting(golden / "arch-gemma3" / "hf", speculative_config=SELF) as llm:
        assert seen(llm, params) == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0


def test_a_model_quantized_while_loading_drafts_with_fewer_bits(golden: Path) -> None:
    path, options = golden / "arch-llama3" / "hf", {"quantization": "int8"}
    with opened(path, **options) as llm:
        plain = seen(llm, COLD)
    with drafting(path, **options, speculative_config=SELF) as llm:
        assert seen(llm, COLD) == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0


def smaller_model(golden: Path, **settings: Any) -> dict[str, Any]:
    return SMALLER | {"model": golden / "gguf-Q4_0" / "model.gguf"} | settings


def test_a_smaller_model_follows_prompts_in_chunks_and_shared_prefixes(
    tiny_path: Path, golden: Path
) -> None:
    """A prompt that comes in chunks, the same one again, and one that goes on differently."""
    long = [int(token) for token in range(5, 105)]
    prompts = [long, [*long[:70], 9, 9], [8, 7]]
    params = GREEDY.clone(max_tokens=20)
    options = {"max_model_len": 160, "max_num_batched_tokens": 32}
    with opened(tiny_path, **options) as llm:
        plain = [seen(llm, params, prompts)[0][0] for _ in range(2)]
    with drafting(tiny_path, **options, speculative_config=smaller_model(golden)) as llm:
        rates = []
        for answers in plain:
            before = llm.get_metrics()
            assert seen(llm, params, prompts)[0][0] == answers
            after = llm.get_metrics()
            rates.append(
                (after["num_accepted_tokens"] - before["num_accepted_tokens"])
                / (after["num_draft_tokens"] - before["num_draft_tokens"])
            )
    assert rates[0] == pytest.approx(rates[1], abs=0.1) and rates[0] > 0.1


def test_a_model_drafts_for_itself_and_all_drafts_are_accepted(tiny_path: Path) -> None:
    """So its keys and values are those of the right tokens, also of tokens that it runs later."""
    config = SMALLER | {"model": tiny_path}
    with drafting(tiny_path, speculative_config=config) as llm:
        llm.generate(PROMPTS, [GREEDY, DRAWN, COLD, GREEDY, DRAWN])
        metrics = llm.get_metrics()
        assert metrics["num_accepted_tokens"] > 0.97 * metrics["num_draft_tokens"] > 0


@pytest.mark.slow
def test_two_ranks_draft_the_same_tokens(tiny_path: Path, golden: Path) -> None:
    options = {"tensor_parallel_size": 2, "compute": "exact", "num_threads": 2}
    params = [GREEDY, COLD, DRAWN, COLD.clone(logprobs=2), GREEDY]
    with opened(tiny_path, **options) as llm:
        plain = seen(llm, params)
    with drafting(tiny_path, **options, speculative_config=smaller_model(golden)) as llm:
        assert seen(llm, params) == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0


def test_memory_of_a_smaller_model_is_planned_and_can_be_left_out(
    tiny_path: Path, golden: Path
) -> None:
    options = {"max_model_len": 128, "max_num_seqs": 6}
    plain = LLM.plan(tiny_path, **options)
    made = LLM.plan(tiny_path, **options, speculative_config=smaller_model(golden))
    assert made.page_bytes == 2 * plain.page_bytes
    assert made.weights == plain.weights + made.drafting_weights > plain.weights
    small = LLM.plan(
        tiny_path,
        **options,
        memory=(plain.total + made.total) // 2 - 2**18,
        speculative_config=smaller_model(golden),
    )
    assert not small.fits and small.alternatives[0].options == {"speculative_config": None}


def test_requests_longer_than_the_context_of_the_smaller_model_get_no_drafts(
    golden: Path, tmp_path: Path
) -> None:
    path = golden / "arch-llama3" / "hf"
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    params = GREEDY.clone(max_tokens=90)
    with opened(path) as llm:
        plain = seen(llm, params)
    with drafting(path, speculative_config=SMALLER | {"model": str(tmp_path)}) as llm:
        assert seen(llm, params) == plain
        assert 0 < llm.get_metrics()["num_draft_tokens"] < 48 * len(PROMPTS)


def test_a_model_with_another_vocabulary_does_not_draft(
    tiny_path: Path, smollm2: Path, golden: Path, tmp_path: Path
) -> None:
    path = golden / "arch-llama3" / "hf"
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(known, reversed(known.values()), strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError, match=r"found \d+ of \d+ tokens that differ: token 0 is"):
        LLM(path, speculative_config={"model": str(tmp_path)})
    with pytest.raises(RequestError, match=r"expected a vocabulary of \d+ tokens as in the model"):
        LLM.plan(tiny_path, speculative_config={"model": str(smollm2)})
    with pytest.raises(CheckpointError, match=r"^speculative_config: model: .*nowhere"):
        LLM.plan(tiny_path, speculative_config={"model": str(tmp_path / "nowhere")})


def test_weights_that_are_already_packed_do_not_draft(tiny_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"method 'self'.*expected float matrices to pack"):
        LLM(tiny_path, speculative_config="self")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "needs tensor_parallel_size=1, found 2"),
        ({"disk_offload": "auto"}, "needs disk_offload=0, found 'auto'"),
        ({"device": "cuda"}, "'self' is not supported on a GPU"),
        ({"speculative_config": {**SELF, "quantization": "int9"}}, "expected"),
        ({"speculative_config": {**SELF, "quantization": 4}}, "quantization: expected a string"),
    ],
)
def test_what_the_models_own_weights_cannot_do_is_refused(
    golden: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^speculative_config: .*{message}"):
        LLM.plan(golden / "arch-llama3" / "hf", **{"speculative_config": "self", **options})


def test_explain_names_the_method(tiny_path: Path) -> None:
    with opened(tiny_path, speculative_config="ngram") as llm:
        assert "drafts     ngram: up to 8 draft tokens per request" in llm.explain()
        assert "48 per step" in llm.explain()


def test_the_example_of_the_docs_runs(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(example.replace("model.gguf", str(tiny_path)), scope)
    scope["llm"].close()
    verified, share = capsys.readouterr().out.splitlines()
    assert int(verified.split()[0]) >= int(verified.split()[2]) > 0
    assert "0%" not in share.split()


def test_a_method_a_dict_and_json_mean_the_same() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    given = {"method": "ngram", "num_speculative_tokens": 5}
    assert speculative_config(given) == speculative_config(json.dumps(given)) == config
    assert speculative_config(config) is config
    smaller = {"model": "small", "quantization": "int4"}
    assert speculative_config(smaller) == speculative_config(smaller | {"method": "draft"})
    assert speculative_config(smaller) == SpeculativeConfig(method="draft_model", **smaller)
    assert speculative_config("ngram") == SpeculativeConfig(method="ngram")
    assert speculative_config(None) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, f"method is missing; expected {METHODS}"),
        (3, "expected a dict such as .* found 3"),
        ("ngramm", f"method: expected {METHODS}, found 'ngramm'"),
        ("{'method': 'ngram'}", "expected a method's name or a JSON object"),
        ("[" * 100_000, f"method: expected {METHODS}, found"),
        (
            {"method": ["ngram"]},
            rf"method: expected {METHODS}, found \['ngram'\]",
        ),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "qqq": 3}, "unknown key 'qqq'; expected method, num_spec"),
        ({"method": "ngram", 7: 3}, "unknown key 7"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"an integer in 1\.\.64, found 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, r"in 1\.\.64, found True"),
        ({"method": "ngram", "prompt_lookup_min": 1.5}, "prompt_lookup_min: .* found 1.5"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max: .* found 0"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_max: expected at least prompt_lookup_min \(4\), found 3",
        ),
        ({"method": "ngram", "prompt_lookup_min": 0}, r"prompt_lookup_min: .* 1\.\.\d+, found 0"),
        ({"method": "self", "prompt_lookup_max": 3}, r"at least prompt_lookup_min \(8\), found 3"),
        ({"method": "grammar", "prompt_lookup_min": 3}, "prompt_lookup_min belongs to .* 'ngram'"),
        ({"method": "ngram", "quantization": "int4"}, "quantization belongs to method 'self'"),
        ({"method": "ngram", "adaptive": "yes"}, "adaptive: expected True or False, found 'yes'"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^speculative_config: .*{message}"):
        speculative_config(value)
