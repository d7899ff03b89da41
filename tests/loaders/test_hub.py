"""Models named by hub ids, from a small server that speaks the hub's API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, LoadCancelled, SamplingParams
from sdk.cli import main
from sdk.loaders.adapters.open import locate_adapter
from sdk.loaders.hub.files import gguf_files, weight_files
from sdk.loaders.hub.hub import HubAccess, parse_hub_id
from sdk.loaders.open import locate, open_checkpoint
from sdk.quant.errors import CheckpointError
from tests.loaders.hub_server import COMMIT, Hub, serving

TYPES = ("Q4_K_M", "Q8_0", "IQ4_XS", "UD-Q4_K_XL", "bf16")


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does when huggingface_hub is imported."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving() as made:
        point_at(monkeypatch, made.url)
        yield made


@pytest.fixture
def quants(hub: Hub, golden: Path) -> Hub:
    """``org/tiny-GGUF`` with one model in five types, as far as their names go."""
    data = (golden / "gguf-Q8_0" / "model.gguf").read_bytes()
    files = {f"tiny-{kind}.gguf": data + bytes([i]) for i, kind in enumerate(TYPES)}
    files |= {"README.md": b"#", "config.json": b"{}", "mmproj-tiny-f16.gguf": b"GGUF"}
    hub.add("org/tiny-GGUF", **files)
    return hub


def offline(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """Nobody listens there any more."""
    point_at(monkeypatch, "http://127.0.0.1:9")
    hub.asked.clear()


@pytest.mark.parametrize("name", ["org/tiny-GGUF:Q8_0", "org/tiny-GGUF:q8_0"])
def test_a_type_behind_the_id_opens_that_gguf_file_alone(quants: Hub, name: str) -> None:
    path = locate(name)
    assert path.name == "tiny-Q8_0.gguf"
    assert path.read_bytes() == quants.repositories["org/tiny-GGUF"].files[path.name]
    assert set(quants.got()) == {"tiny-Q8_0.gguf"}
    open_checkpoint(name).close()


@pytest.mark.parametrize("filename", ["tiny-IQ4_XS.gguf", "*iq4_xs.gguf", "*-IQ4_XS.gguf"])
def test_a_file_is_named_by_its_name_or_a_pattern(quants: Hub, filename: str) -> None:
    if filename.islower():
        with pytest.raises(CheckpointError, match=re.escape(repr(filename))):
            locate("org/tiny-GGUF", filename=filename)
    else:
        assert locate("org/tiny-GGUF", filename=filename).name == "tiny-IQ4_XS.gguf"


def test_what_there_is_is_listed_where_the_name_fits_none_or_several(quants: Hub) -> None:
    there = "name one, like org/tiny-GGUF:IQ4_XS; there are IQ4_XS, Q4_K_M, Q8_0, UD-Q4_K_XL, bf16"
    for asked, message in (
        ("org/tiny-GGUF", f"org/tiny-GGUF: several GGUF models in it; {there}"),
        ("org/tiny-GGUF:Q5_K_M", f"org/tiny-GGUF: no GGUF model in it is 'Q5_K_M'; {there}"),
        ("org/tiny-GGUF:Q4_K", f"org/tiny-GGUF: no GGUF model in it is 'Q4_K'; {there}"),
    ):
        with pytest.raises(CheckpointError) as caught:
            locate(asked)
        assert str(caught.value) == message
    assert quants.got() == []


def test_llm_plan_and_the_command_line_take_hub_ids(
    quants: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    size = len(quants.repositories["org/tiny-GGUF"].files["tiny-Q8_0.gguf"])

    def note(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))

    plan = LLM.plan("org/tiny-GGUF:Q8_0", max_model_len=64, on_progress=note)
    assert seen[-1] == ("download", size, size)
    assert plan.fits
    options: dict[str, Any] = {"filename": "tiny-Q8_0.gguf", "max_model_len": 64}
    with LLM("org/tiny-GGUF", **options) as llm:
        assert llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=1))[0].finished
    command = ["run", "org/tiny-GGUF:Q8_0", "--raw", "-p", "Hi", "--max-tokens", "2"]
    assert main(command) == 0
    assert main(["run", "org/tiny-GGUF:Q3_K", "-p", "Hi"]) == 2
    assert "no GGUF model in it is 'Q3_K'" in capsys.readouterr().err
    assert quants.got() == ["tiny-Q8_0.gguf"]


def test_all_parts_of_a_split_model_are_fetched(hub: Hub) -> None:
    parts = {f"Q4_0/big-Q4_0-{i:05d}-of-00003.gguf": b"GGUF%d" % i for i in (1, 2, 3)}
    hub.add("org/big", **parts, **{"big-Q8_0.gguf": b"GGUF"})
    for asked in ({}, {"filename": "big-Q4_0-00001-of-00003.gguf"}, {"filename": "*-00002-*"}):
        path = locate("org/big" if asked else "org/big:Q4_0", **asked)
        assert path.name == "big-Q4_0-00001-of-00003.gguf"
    assert sorted(hub.got()) == sorted(parts)
    assert [found.read_bytes() for found in sorted(path.parent.iterdir())] == [*parts.values()]


def test_of_a_safetensors_folder_only_what_is_needed_is_fetched(hub: Hub, golden: Path) -> None:
    folder = golden / "arch-llama3" / "hf"
    needed = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = ("pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors")
    unneeded = dict.fromkeys((*others, "README.md", "onnx/model.onnx", "code.py"), b"x")
    hub.add("org/folder", **needed, **unneeded)
    checkpoint = open_checkpoint("org/folder")
    assert checkpoint.has("model.embed_tokens")
    assert set(hub.got()) == set(needed)


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    names = ["model-1.safetensors", "model-2.safetensors", "old.safetensors"]
    index = "model.safetensors.index.json"
    (tmp_path / index).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert weight_files([*names, index], tmp_path) == ["model-1.safetensors"]
    (tmp_path / index).write_text("[]")
    with pytest.raises(CheckpointError, match="expected an index of shards"):
        weight_files([*names, index], tmp_path)
    mistral = ["consolidated.safetensors", "params.json"]
    assert weight_files(mistral, tmp_path) == ["consolidated.safetensors"]


def test_a_second_call_asks_for_no_file_and_works_without_a_network(
    quants: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = locate("org/tiny-GGUF:Q8_0")
    quants.asked.clear()
    assert locate("org/tiny-GGUF:Q8_0") == path
    assert quants.got() == quants.got("HEAD") == []
    offline(monkeypatch, quants)
    assert locate("org/tiny-GGUF:Q8_0") == path
    assert "the hub cannot be reached, using the cached files" in caplog.text
    assert locate("org/tiny-GGUF:Q8_0", hub=HubAccess(local_files_only=True)) == path
    assert locate("org/tiny-GGUF:Q8_0", hub=HubAccess(COMMIT, local_files_only=True)) == path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate("org/tiny-GGUF:Q8_0") == path
    with pytest.raises(CheckpointError, match=r"is 'Q4_K_M'; .*there are Q8_0 \(in the local cach"):
        locate("org/tiny-GGUF:Q4_K_M")
    assert quants.asked == []


@pytest.fixture
def large(quants: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Where the tiny files count as large ones."""
    monkeypatch.setattr("sdk.loaders.hub.download._LARGE", 1000)
    monkeypatch.setattr("sdk.loaders.hub.download._CHUNK", 1 << 16)
    monkeypatch.setattr("sdk.loaders.hub.download.time.sleep", lambda seconds: None)
    return quants


def ranges(hub: Hub) -> list[str | None]:
    return [asked for how, path, asked in hub.asked if how == "GET" and "/resolve/" in path]


def test_a_cancelled_download_goes_on_where_it_ended(large: Hub, tmp_path: Path) -> None:
    data = large.repositories["org/tiny-GGUF"].files["tiny-Q8_0.gguf"]

    def stop(stage: str, done: int, total: int) -> bool:
        assert (stage, total) == ("download", len(data))
        return done < 300_000

    with pytest.raises(LoadCancelled, match="download was cancelled"):
        LLM("org/tiny-GGUF:Q8_0", on_progress=stop)
    [partial] = (tmp_path / "cache").rglob("*.incomplete")
    have = partial.stat().st_size
    assert 300_000 <= have < len(data)
    seen: list[tuple[int, int]] = []
    path = locate("org/tiny-GGUF:Q8_0", hub=HubAccess(report=lambda *counts: seen.append(counts)))
    assert ranges(large) == ["bytes=0-", f"bytes={have}-"]
    assert path.read_bytes() == data
    assert seen[0] == (have, len(data)) and seen[-1] == (len(data), len(data))
    assert not [*(tmp_path / "cache").rglob("*.incomplete")]


def test_a_lost_connection_is_taken_up_again(large: Hub) -> None:
    large.cut_after = [200_000, 100_000]
    path = locate("org/tiny-GGUF:Q8_0")
    assert path.read_bytes() == large.repositories["org/tiny-GGUF"].files[path.name]
    assert len(ranges(large)) == 3


def test_a_server_without_ranges_is_read_from_the_start(large: Hub) -> None:
    large.cut_after, large.ignore_range = [200_000], True
    path = locate("org/tiny-GGUF:Q8_0")
    assert path.read_bytes() == large.repositories["org/tiny-GGUF"].files[path.name]


def test_a_connection_that_is_always_lost_is_an_error(large: Hub) -> None:
    large.cut_after = [0] * 50
    with pytest.raises(CheckpointError, match="cannot be reached"):
        locate("org/tiny-GGUF:Q8_0")


def test_an_exception_of_the_callers_callback_is_not_taken_for_the_hubs(large: Hub) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        locate("org/tiny-GGUF:Q8_0", hub=HubAccess(report=fail))


def test_a_new_commit_of_the_branch_is_fetched(quants: Hub) -> None:
    old = locate("org/tiny-GGUF:Q8_0")
    repository = quants.repositories["org/tiny-GGUF"]
    repository.commit, repository.files["tiny-Q8_0.gguf"] = "beef" + "0" * 36, b"GGUF new"
    assert locate("org/tiny-GGUF:Q8_0").read_bytes() == b"GGUF new"
    assert locate("org/tiny-GGUF:Q8_0", hub=HubAccess(COMMIT, local_files_only=True)) == old


def test_what_is_wrong_is_said(quants: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    quants.add("org/gated", **{"gated-Q8_0.gguf": b"GGUF"}).gated = True
    quants.add("org/pickles", **{"config.json": b"{}", "pytorch_model.bin": b"x"})
    quants.add("org/empty")
    for name, options, message in (
        ("org/none", {}, f"org/none: not a local path, and no repository on {quants.url}; for a "),
        ("org/none", {}, "log in with `hf auth login` or set HF_TOKEN"),
        ("org/gated:Q8_0", {}, f"gated: accept its terms at {quants.url}/org/gated, then log in "),
        (
            "org/tiny-GGUF:Q8_0",
            {"hub": HubAccess("v2")},
            "org/tiny-GGUF:Q8_0: it has no revision 'v2'",
        ),
        ("org/pickles", {}, "found config.json, pytorch_model.bin"),
        ("org/empty", {}, "found nothing"),
        ("org/pickles:Q8_0", {}, "org/pickles: expected a .gguf file in it, found config.json, py"),
        (
            "org/none",
            {"hub": HubAccess(local_files_only=True)},
            "not found in the local cache (local_files_only)",
        ),
        ("org/tiny-GGUF:Q8_0", {"filename": "x.gguf"}, "with a type; give one of them"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            locate(name, **options)
    offline(monkeypatch, quants)
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9 cannot be reached: Connect"):
        locate("org/none")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        locate("org/none")


def test_a_file_of_a_local_folder_is_named_the_same_way(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "a-Q8_0.gguf").symlink_to(golden / "gguf-Q8_0" / "model.gguf")
    (tmp_path / "a-Q4_0.gguf").symlink_to(golden / "gguf-Q4_0" / "model.gguf")
    assert locate(tmp_path, filename="*Q8_0.gguf").name == "a-Q8_0.gguf"
    with pytest.raises(CheckpointError, match=r"no GGUF model in it is filename='b\.gguf'"):
        locate(tmp_path, filename="b.gguf")
    with pytest.raises(CheckpointError, match="with a file; leave it out"):
        locate(tmp_path / "a-Q8_0.gguf", filename="a.gguf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "https://huggingface.co/org/repo/resolve/main/sub/x-Q4_0.gguf?download=true",
            "write LLM('org/repo', filename='sub/x-Q4_0.gguf')",
        ),
        (
            "https://huggingface.co/org/repo/blob/v1/x.gguf",
            "write LLM('org/repo', filename='x.gguf', revision='v1')",
        ),
        ("https://huggingface.co/org/repo", "write LLM('org/repo')"),
        ("https://huggingface.co/org/repo/tree/main", "write LLM('org/repo')"),
        ("hf.co/org/repo:Q4_K_M", "write LLM('org/repo:Q4_K_M')"),
        ("https://example.com/x.gguf", "a URL; models are local files, folders, or ids"),
        ("s3://bucket/x.gguf", "download the file and open that"),
        ("file:///models/x.gguf", "write the file's path, '/models/x.gguf'"),
        ("org/repo/x-Q4_0.gguf", "on the hub? LLM('org/repo', filename='x-Q4_0.gguf')"),
    ],
)
def test_a_url_is_told_what_to_write_instead(name: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        LLM.plan(name)
    assert str(caught.value).startswith(name)


def test_ids_are_told_from_paths() -> None:
    found = parse_hub_id("org/name.v1:UD-Q4_K_XL")
    assert found is not None and (found.repo, found.tag) == ("org/name.v1", "UD-Q4_K_XL")
    for name in ("org/name:", "org/na me:Q4", "name:Q4_0", "a/b/c:Q4", "C:/models/x"):
        assert parse_hub_id(name) is None


def test_two_models_of_one_type_are_named_by_their_files() -> None:
    names = ["a-Q4_0.gguf", "b-Q4_0.gguf"]
    with pytest.raises(CheckpointError) as caught:
        gguf_files("org/two", names, "Q4_0", None)
    assert str(caught.value) == (
        "org/two: several GGUF models in it; name one, like filename='a-Q4_0.gguf'; there are "
        "a-Q4_0.gguf, b-Q4_0.gguf"
    )


def test_hf_endpoint_names_another_hub(quants: Hub, tmp_path: Path) -> None:
    code = "import sys; from sdk.loaders.open import locate; print(locate(sys.argv[1]))"
    environment = {**os.environ, "HF_ENDPOINT": quants.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, "org/tiny-GGUF:Q8_0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert Path(done.stdout.strip()).name == "tiny-Q8_0.gguf"
    assert str(tmp_path / "home") in done.stdout


# ---- adapters ------------------------------------------------------------------------------------


def test_an_adapter_is_fetched_without_the_rest_of_its_repository(hub: Hub) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}
    more = {"adapter_model.bin": b"1", "README.md": b"#", "training_args.bin": b"1"}
    hub.add("org/adapter", **files, **more)
    path = locate_adapter("org/adapter", HubAccess())
    assert {file.name for file in path.iterdir()} == set(files) == set(hub.got())
    hub.asked.clear()
    assert locate_adapter("org/adapter", HubAccess(local_files_only=True)) == path
    assert not hub.asked


def test_a_gguf_adapter_is_fetched(hub: Hub) -> None:
    hub.add("org/adapter", **{"style-f16.gguf": b"GGUF", "README.md": b"#"})
    assert locate_adapter("org/adapter", HubAccess()).name == "style-f16.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b"#"}, r"expected a LoRA adapter in it .*, found README\.md"),
        ({"adapter_model.bin": b"1"}, r"adapter_model\.bin, a pickle, which is not opened"),
    ],
)
def test_a_repository_without_an_adapter_says_so(
    hub: Hub, files: dict[str, bytes], message: str
) -> None:
    hub.add("org/adapter", **files)
    with pytest.raises(CheckpointError, match=message):
        locate_adapter("org/adapter", HubAccess())


@pytest.mark.parametrize("name", ["nowhere/at/all", "./nowhere", "org/name:Q4_0", Path("nowhere")])
def test_an_adapter_that_is_nowhere_is_named(hub: Hub, name: str | Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        locate_adapter(name, HubAccess())
