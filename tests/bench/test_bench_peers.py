"""Other engines in ``embedlm bench``: what each is given, how it is timed, and what it may lack.

The engines' own packages are stand-ins here, except in the test with the marker ``peers``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sdk
from sdk import LLM
from sdk.api.errors import SdkError
from sdk.bench import embedding
from sdk.bench.engines import READ_GGUF, Engines, Load, environment, parse_peers
from sdk.bench.peers import mistralrs, worker
from sdk.bench.peers.opening import Opening
from sdk.bench.peers.timing import Timing
from sdk.bench.peers.worker import open_peer
from sdk.cli import main
from sdk.testing.tiny_models import tiny_model

OPENING: dict[str, Any] = {
    "model": "/models/m.gguf",
    "threads": 2,
    "requests": 2,
    "context": 192,
    "prefix_cache": False,
}


def measured(timing: Timing, *steps: tuple[float, list[tuple[str, float, bool]]]) -> Any:
    start = timing._start
    for at, outputs in steps:
        timing.step(outputs, start + at)
    return timing.times()


def test_decoding_is_timed_while_all_requests_run() -> None:
    found = measured(
        Timing(2),
        (1.0, [("a", 1, False)]),
        (2.0, [("a", 1, False), ("b", 1, False)]),  # from here on both decode
        (3.0, [("a", 1, False), ("b", 1, False)]),
        (4.5, [("a", 1, True), ("b", 1, False)]),  # until here
        (6.0, [("b", 1, True)]),
    )
    assert found == pytest.approx({"prefill_s": 2.0, "decode_s": 2.5, "decode_tokens": 4})


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(1.0, [("a", 1, True), ("b", 1, True)])], id="one token"),
        pytest.param(
            [(0.7, [("a", 1, True)]), (1.0, [("b", 1, False)]), (2.0, [("b", 1, True)])],
            id="one after another",
        ),
    ],
)
def test_requests_that_never_decode_together_have_no_decoded_tokens(steps: Any) -> None:
    found = measured(Timing(2), *steps)
    assert found == pytest.approx({"prefill_s": 1.0, "decode_s": 0.0, "decode_tokens": 0})


def test_every_peer_is_told_the_number_of_threads() -> None:
    for engine in ("llama.cpp", "openvino", "mistral.rs", "vllm", "transformers"):
        found = environment(Opening(engine, "m", 3, 1, 64))
        assert found["OMP_NUM_THREADS"] == found["RAYON_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("kv", "value"), [("auto", "0"), ("float16", "0"), ("float32", "1")])
def test_mistral_rs_is_told_its_type_of_keys_and_values(kv: str, value: str) -> None:
    found = environment(Opening("mistral.rs", "m", 2, 1, 64, kv=kv))
    assert found["MISTRALRS_CPU_KV_F32"] == value


# ---- OpenVINO GenAI ------------------------------------------------------------------------------


class Pipeline:
    """Stands in for ContinuousBatchingPipeline: a token for each request in each step."""

    opened: tuple[Any, ...] = ()

    def __init__(self, *args: Any) -> None:
        type(self).opened = args
        self.handles: list[Handle] = []

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(get_vocab=lambda: dict.fromkeys("abc"))

    def add_request(self, number: int, ids: Any, params: Any) -> Handle:
        assert ids.shape == (1, 3) and str(ids.dtype) == "int64"
        assert (params.do_sample, params.ignore_eos) == (False, True)
        self.handles.append(Handle(params.max_new_tokens))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles)

    def step(self) -> None:
        for handle in self.handles:
            handle.left, handle.ready = handle.left - 1, 1


class Handle:
    def __init__(self, left: int) -> None:
        self.left, self.ready = left, 0

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> Any:
        self.ready = 0
        return {0: SimpleNamespace(generated_ids=[7])}

    def get_status(self) -> str:
        return "running" if self.left else "finished"


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"KV_CACHE_PRECISION": "u8", "INFERENCE_PRECISION_HINT": "bf16"}
    core = SimpleNamespace(
        get_property=lambda device, name: SimpleNamespace(to_string=lambda: defaults[name])
    )
    package, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    package.__dict__.update(Core=lambda: core, Tensor=lambda array: array)
    genai.__dict__.update(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        GenerationStatus=SimpleNamespace(FINISHED="finished"),
        ContinuousBatchingPipeline=Pipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino", package)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setattr("sdk.bench.peers.openvino.version", lambda name: "1.2")


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(
    ("engine_name", "kv", "given", "computes", "shown"),
    [
        ("openvino", "auto", {}, "bf16", "u8"),
        ("openvino", "float16", {"KV_CACHE_PRECISION": "f16"}, "bf16", "f16"),
        ("openvino-f32", "auto", {"INFERENCE_PRECISION_HINT": "f32"}, "f32", "u8"),
    ],
)
def test_openvino_opens_the_file_with_threads_and_room_for_all(
    engine_name: str, kv: str, given: dict[str, str], computes: str, shown: str
) -> None:
    engine = open_peer(Opening(engine=engine_name, kv=kv, **OPENING))
    model, limits, device, options = Pipeline.opened
    assert (model, device) == ("/models/m.gguf", "CPU")
    assert options == {"INFERENCE_NUM_THREADS": 2, **given}
    assert (limits.max_num_seqs, limits.enable_prefix_caching) == (2, False)
    assert limits.num_kv_blocks * 32 >= 2 * 192
    hello = engine.hello
    assert hello["name"] == f"OpenVINO GenAI 1.2 {computes}"
    assert (hello["kv"], hello["vocab_size"]) == (shown, 3)


@pytest.mark.usefixtures("openvino")
def test_openvino_is_stepped_until_all_requests_have_ended() -> None:
    engine = open_peer(Opening(engine="openvino", kv="auto", **OPENING))
    for _ in range(2):  # a second load does not see the first one's requests
        found = engine.measure([[1, 2, 3], [4, 5, 6]], 5)
        engine.pipeline.handles.clear()
        assert found["decode_tokens"] == 2 * 4
        assert found["prefill_s"] > 0 and found["decode_s"] > 0


# ---- mistral.rs ----------------------------------------------------------------------------------


class Runner:
    """Stands in for mistral.rs: ids 1000 to 1009 are words, the others are not."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.template = Path(options["jinja_explicit"]).read_text()
        self.prompts: list[list[str]] = []
        self.short = 0

    def detokenize_text(self, tokens: list[int], skip: bool) -> str:
        [token] = tokens
        return f" word{'abcdefghij'[token - 1000]}" if token < 1010 else f"x{token}"

    def tokenize_text(self, text: str, special: bool, thinking: None) -> list[int]:
        return [1000 + "abcdefghij".index(text[-1])] if text[:5] == " word" else [1, 2]

    def send_chat_completion_request(self, request: Any) -> Iterator[Any]:
        assert (request.temperature, request.ignore_eos, request.stream) == (0.0, True, True)
        self.prompts.append(request.messages.split())
        count = len(self.prompts[-1]) - self.short
        usage = SimpleNamespace(prompt_tokens=count, completion_tokens=request.max_tokens)
        chunks = [SimpleNamespace(usage=None)] * (request.max_tokens - 1)
        return iter([*chunks, SimpleNamespace(usage=usage)])


@pytest.fixture
def mistral(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("mistralrs")
    module.__dict__.update(
        Runner=Runner,
        Which=SimpleNamespace(GGUF=lambda folder, name: (folder, name)),
        ChatCompletionRequest=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "mistralrs", module)
    monkeypatch.setattr(mistralrs, "version", lambda name: "0.9.5")
    return open_peer(Opening(engine="mistral.rs", kv="auto", **OPENING))


def test_mistral_rs_opens_the_file_and_finds_words_of_one_token(mistral: Any) -> None:
    assert mistral.runner.options["which"] == ("/models", "m.gguf")
    assert mistral.runner.options["max_seqs"] == 2
    assert mistral.words == [f" word{letter}" for letter in "abcdefghij"]
    assert (mistral.hello["name"], mistral.hello["kv"]) == ("mistral.rs 0.9.5", "f16")
    assert mistral.runner.template == "{{ messages[0]['content'] }}"


def test_mistral_rs_gets_words_for_ids_and_prompts_of_different_lengths(mistral: Any) -> None:
    mistral.measure([[11, 12, 13], [25, 26, 27]], 3)
    # the shorter one first
    assert mistral.runner.prompts == [["wordg", "wordh"], ["wordb", "wordc", "wordd"]]


def test_a_prompt_of_mistral_rs_that_became_longer_is_an_error(mistral: Any) -> None:
    mistral.runner.short = 1
    with pytest.raises(
        RuntimeError, match="expected a prompt of 4 tokens and an answer of 3, found 3"
    ):
        mistral.measure([[11, 12, 13, 14]], 3)


def test_a_vocabulary_without_words_is_an_error() -> None:
    runner = SimpleNamespace(detokenize_text=lambda tokens, skip: "?")
    with pytest.raises(RuntimeError, match="has no words that are one token"):
        mistralrs.words_of(runner)


def test_chunks_of_streams_become_the_steps_that_brought_them() -> None:
    # The second stream begins a step later; its second chunk has two of its four tokens.
    first, second = [1.0, 2.0, 3.0, 4.0], [2.1, 3.1, 4.1]
    found = list(mistralrs.steps([first, second], 4))
    share = pytest.approx(4 / 3)
    assert found == [
        (1.0, [(0, 1.0, False)]),
        (2.1, [(0, 1.0, False), (1, share, False)]),
        (3.1, [(0, 1.0, False), (1, share, False)]),
        (4.1, [(0, 1.0, True), (1, share, True)]),
    ]


@pytest.mark.slow
def test_another_installation_of_this_package_is_a_peer(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "prefill,startup"]
    argv += ["--rounds", "1", "--prompt-len", "8", "--against", f"embedlm-other={sys.executable}"]
    assert main([*argv, "--json", str(file)]) == 0, capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    for suite in ("prefill", "startup"):
        names = [f"{engine} {sdk.__version__}" for engine in ("embedlm", "embedlm-other")]
        assert [row["engine"] for row in results[suite]] == names


# ---- Embedding ----------------------------------------------------------------------------------


def embedder(monkeypatch: pytest.MonkeyPatch, engine: str, model: Path, **modules: Any) -> Any:
    """An engine of the embed suite with stand-ins for its packages."""
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), SimpleNamespace(**members))
    return worker.open_peer(Opening(engine, str(model), 3, 1, 0, embeds=True))


def test_sentence_transformers_reads_as_many_tokens_as_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Model:
        def __init__(self, path: str, device: str, local_files_only: bool) -> None:
            assert (path, device, local_files_only) == (str(tmp_path), "cpu", True)

        def encode(self, texts: list[str], show_progress_bar: bool) -> Any:
            return [[float(len(text)), self.max_seq_length] for text in texts]  # type: ignore[attr-defined]

    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    module = {"SentenceTransformer": Model, "__version__": "9"}
    engine = embedder(monkeypatch, "sentence-transformers", tmp_path, sentence_transformers=module)
    file = tmp_path / "vectors"
    assert worker.embedded(engine, ["a", "bcd"], str(file))["seconds"] >= 0
    assert np.fromfile(file, np.float32).tolist() == [1, 512, 3, 512]
    assert engine.hello["name"] == "sentence-transformers 9"


def test_fastembed_opens_the_fastest_file_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: dict[str, Any] = {}

    class Text:
        add_custom_model = staticmethod(lambda **options: opened.update(options))

        def __init__(self, name: str, specific_model_path: str, threads: int) -> None:
            opened.update(path=specific_model_path, threads=threads)
            tokenizer = SimpleNamespace(enable_truncation=lambda most: opened.update(most=most))
            self.model = SimpleNamespace(tokenizer=tokenizer)

        def embed(self, texts: list[str]) -> Any:
            return iter([[0.5] for _ in texts])

    kinds = {
        "ModelSource": lambda hf: hf,
        "PoolingType": SimpleNamespace(MEAN="mean"),
    }
    modules: dict[str, Any] = {
        "fastembed": {"TextEmbedding": Text, "__version__": "1"},
        "fastembed__common": {},
        "fastembed__common__model_description": kinds,
    }
    with pytest.raises(ValueError, match=r"expected one of onnx/model_qint8_avx512_vnni"):
        embedder(monkeypatch, "fastembed", tmp_path, **modules)
    (tmp_path / "onnx").mkdir()
    for name in ("model.onnx", "model_quint8_avx2.onnx"):
        (tmp_path / "onnx" / name).write_bytes(b"")
    engine = embedder(monkeypatch, "fastembed", tmp_path, **modules)
    assert opened["model_file"] == "onnx/model_quint8_avx2.onnx"
    assert (opened["path"], opened["threads"], opened["most"]) == (str(tmp_path), 3, 512)
    assert engine.embed(["a", "b"]) == [[0.5], [0.5]]


def test_llama_cpp_embeds_with_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Llama:
        def __init__(self, path: str, **options: Any) -> None:
            assert options["embedding"] is True and options["n_threads_batch"] == 3

        def embed(self, texts: list[str], normalize: bool, truncate: bool) -> Any:
            return [[1.0, 0.0] for _ in texts]

    module = {"Llama": Llama, "__version__": "0"}
    engine = embedder(monkeypatch, "llama.cpp", tmp_path, llama_cpp=module)
    assert engine.embed(["a"]) == [[1.0, 0.0]]


@pytest.mark.slow
def test_the_embed_suite_measures_texts_together_and_alone(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "SINGLE", 2)
    file = tmp_path / "bench.json"
    argv = ["bench", str(minilm), "--suite", "embed", "--rounds", "1", "--json", str(file)]
    argv += ["--texts", "6"]
    assert main([*argv, "--against", f"embedlm-other={sys.executable}"]) == 0
    results = json.loads(file.read_text())["results"]["embed"]
    engines = ["embedlm", "embedlm-int8", "embedlm-other"]
    cases = [(engine, count) for count in (6, 1) for engine in engines]
    assert [(row["engine"].split()[0], row["texts at once"]) for row in results] == cases
    assert all(row["median"]["texts_s"] > 0 for row in results)


def test_the_embed_suite_says_what_it_needs(
    golden: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(golden / "arch-llama3" / "hf")
    assert main(["bench", model, "--suite", "embed,decode"]) == 2
    assert "expected embed alone" in capsys.readouterr().err
    argv = ["bench", model, "--suite", "embed", "--against", "llama.cpp=/nowhere/python"]
    assert main(argv) == 2
    assert "expected --gguf FILE" in capsys.readouterr().err


# ---- The packages themselves ---------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.model
@pytest.mark.timeout(1200)  # vLLM opens in a minute, on a busy machine in several
def test_each_engine_of_an_environment_decodes_the_load(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = os.environ["EMBEDLM_PEERS"]
    file, model = tmp_path / "bench.json", tmp_path / "model.gguf"
    sdk.quantize(smollm2, model, "q4_0")  # mistral.rs takes minutes for Q4_1
    argv = ["bench", str(model), "--suite", "prefill,decode", "--rounds", "1", "--streams", "1,3"]
    argv += ["--prompt-len", "32", "--output-len", "16", "--against", named, "--json", str(file)]
    assert main(argv) == 0, capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    peers = parse_peers(named)
    assert len(results["prefill"]) == 1 + len(peers)
    assert len(results["decode"]) == 2 * (1 + len(peers))
    for row in (*results["prefill"], *results["decode"]):
        assert all(value > 0 for value in row["median"].values()), row
    assert any(peer.engine in READ_GGUF for peer in peers)


def test_prompts_may_be_longer_than_the_models_context(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path))
    longest = LLM.plan(model, max_num_seqs=1).max_model_len
    with Engines() as opened:
        worker = opened.open(Opening("embedlm", model, 1, 1, longest + 40))
        assert worker.measure(Load(((5,) * (longest + 8),), 4)).decode_tokens == 3
        with pytest.raises(SdkError, match="max_num_seqs"):  # no other error is passed over
            opened.open(Opening("embedlm", model, 1, 0, longest))
