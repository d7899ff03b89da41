"""The command line as a user meets it: parsing, exit codes, texts (``main`` in this process)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from sdk import __version__, bench
from sdk.cli import _OTHER_COMMANDS, COMMANDS, build_parser, main
from sdk.cli.inspect_file import part_of, sum_parts
from sdk.cli.table import format_table
from sdk.quant.checkpoint import TensorEntry

Captured = pytest.CaptureFixture[str]


def test_the_version_is_printed(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"embedlm {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text_and_a_summary(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: embedlm {command}" in capsys.readouterr().out
    assert import_module(COMMANDS[command]).__doc__


def test_no_command_is_a_user_error(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "usage: embedlm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("chat", "use embedlm run MODEL"),
        ("pull", "models are fetched when they are first used"),
        ("servee", "did you mean 'serve'?"),
        ("model.gguf", "to chat with a model: embedlm run model.gguf"),
        ("nonsense", "expected one of run, inspect, plan"),
    ],
)
def test_an_unknown_command_gets_one_line(command: str, advice: str, capsys: Captured) -> None:
    assert main([command, "--port", "1"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"embedlm: no such command: {command!r}") and advice in line


def test_advice_names_commands_that_exist() -> None:
    words = [re.findall(r"embedlm (\w[\w-]*)", hint) for hint in _OTHER_COMMANDS.values()]
    assert {word for found in words for word in found} <= {*COMMANDS}
    assert not {*COMMANDS} & {*_OTHER_COMMANDS}


def test_options_may_be_written_with_underscores(golden: Path, capsys: Captured) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    assert main(["run", model, "hi", "--max_tokens=0"]) == 2
    assert "max_tokens must be an integer in [1," in capsys.readouterr().err
    assert main(["run", "/nowhere/m.gguf", "a_b", "--max_model_len", "64"]) == 2
    assert "/nowhere/m.gguf" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdk", "--version"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, f"embedlm {__version__}\n")


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_missing_file_is_one_line_and_exit_code_2(command: str, capsys: Captured) -> None:
    assert main([command, "/nowhere/model.gguf"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "embedlm: /nowhere/model.gguf: no such file or folder\n"


def test_verbose_adds_the_traceback(capsys: Captured) -> None:
    assert main(["-v", "inspect", "/nowhere/model.gguf"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.endswith("embedlm: /nowhere/model.gguf: no such file or folder\n")


def test_a_closed_pipe_is_not_an_error(golden: Path) -> None:
    command = [sys.executable, "-m", "sdk", "inspect", str(golden / "gguf-Q4_1"), "--tensors"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    process.stderr.close()


# ---- inspect ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("token_embd.weight", "embeddings"),
        ("model.embed_tokens.weight", "embeddings"),
        ("output.weight", "head"),
        ("lm_head.weight", "head"),
        ("blk.0.attn_output.weight", "attention"),
        ("blk.0.attn_q.bias", "attention"),
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("blk.0.attn_norm.weight", "norms"),
        ("output_norm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("blk.0.ffn_down.weight", "mlp"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_a_tensor_belongs_to_a_part(name: str, part: str) -> None:
    assert part_of(name) == part


def test_parts_add_up() -> None:
    entries = [
        TensorEntry("blk.0.ffn_up.weight", (64, 32), "Q4_1", 1280),
        TensorEntry("blk.0.ffn_down.weight", (32, 64), "Q8_0", 2176),
        TensorEntry("output_norm.weight", (32,), "F32", 128),
    ]
    parts = sum_parts(entries)
    assert list(parts) == ["norms", "mlp"]
    mlp = parts["mlp"]
    assert (mlp.tensors, mlp.parameters, mlp.nbytes) == (2, 4096, 3456)
    assert mlp.bits == pytest.approx(6.75)
    assert mlp.formats == {"Q4_1": 1280, "Q8_0": 2176}


def test_inspect_shows_formats_and_bits_of_every_part(golden: Path, capsys: Captured) -> None:
    assert main(["inspect", str(golden / "gguf-Q4_1" / "model.gguf")]) == 0
    out = capsys.readouterr().out
    assert "llama, 2 layers" in out
    [mlp] = [line for line in out.splitlines() if line.startswith("mlp")]
    assert mlp.split()[1] == "Q4_1"
    assert mlp.split()[-1] == "5.00"
    assert "blk.0" not in out


def test_inspect_lists_tensors_when_asked(golden: Path, capsys: Captured) -> None:
    assert main(["inspect", str(golden / "gguf-Q4_1" / "model.gguf"), "--tensors"]) == 0
    assert "blk.0.ffn_down.weight" in capsys.readouterr().out


def test_inspect_prints_json_whose_parts_add_up(golden: Path, capsys: Captured) -> None:
    path = golden / "arch-llama3" / "hf"
    assert main(["inspect", str(path), "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "safetensors"
    assert report["config"]["model_type"] == "llama"
    assert sum(part["bytes"] for part in report["parts"].values()) == report["total"]["bytes"]
    assert sum(tensor["bytes"] for tensor in report["tensors"]) == report["total"]["bytes"]


def test_inspect_names_the_kernel_of_every_matrix_and_why(golden: Path, capsys: Captured) -> None:
    path = golden / "gguf-Q4_K_M" / "model.gguf"
    assert main(["inspect", str(path), "--kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [head] = [line.split() for line in lines if line.startswith("lm_head")]
    assert head[1:3] == ["q6_k", "cpu.linear_a16"]
    [value] = [line.split() for line in lines if "layers.1.self_attn.qkv_proj[384:512]" in line]
    assert value[1] == "q6_k"
    assert any("not cpu.linear: quantizes activations to 8 bits" in line for line in lines)
    assert main(["inspect", str(path), "--kernels", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["kernels"]
    assert sum(layer["nbytes"] for layer in report["layers"]) == report["bytes"]
    assert report["bits_per_weight"] == pytest.approx(report["bytes"] * 8 / report["weights"], 1e-3)


def test_inspect_shows_the_scales_of_a_kv_cache(golden: Path, capsys: Captured) -> None:
    assert main(["inspect", str(golden / "ct-kv8")]) == 0
    assert "KV scales     4, " in capsys.readouterr().out


def test_inspect_counts_the_weights_of_packed_layers(golden: Path, capsys: Captured) -> None:
    assert main(["inspect", str(golden / "gptq-w4-g128-act"), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [mlp] = [line for line in lines if line.startswith("mlp")]
    assert mlp.split()[1:5] == ["gptq-w4g128", "F32", "12", "0.8"]
    [down] = [line for line in lines if line.startswith("model.layers.1.mlp.down_proj ")]
    assert down.split()[1:3] == ["gptq-w4g128", "256x512"]


# ---- plan ---------------------------------------------------------------------------------------


def test_plan_prints_the_sums_of_the_library(smollm2: Path, capsys: Captured) -> None:
    from sdk import LLM

    assert main(["plan", str(smollm2), "--memory", "1GiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = LLM.plan(smollm2, memory="1GiB")
    assert (
        report["total"]
        == expected.total
        == sum(report[part] for part in ("weights", "workspace", "graphs", "kv_cache", "tokenizer"))
    )
    assert report["total"] <= report["budget"] == 2**30
    # 30 layers, 3 heads of 64 for keys and values, float16
    assert report["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert main(["plan", str(smollm2), "--memory", "1GiB"]) == 0
    *lines, speed = capsys.readouterr().out.splitlines()
    assert lines == str(expected).splitlines()
    assert "q4_1: cpu.linear" in lines[0]
    assert speed.startswith("decoding")
    assert report["decode_tokens_per_second"] > 1
    assert {share["kernel"] for share in report["kernels"]} == {"cpu.linear", "cpu.linear_a16"}
    assert (report["problem"], report["alternatives"]) == ("", [])


@pytest.mark.slow
def test_plan_with_too_small_a_budget_says_what_would_help(smollm2: Path, capsys: Captured) -> None:
    assert main(["plan", str(smollm2), "--memory", "100MB"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("embedlm: the model does not fit")
    helps = err.partition("what would help:\n")[2].splitlines()
    assert len(helps) >= 2
    assert helps[0].startswith("  --memory ")
    assert main(["plan", str(smollm2), "--memory", "200MiB", "--max-model-len", "8192"]) == 2
    err = capsys.readouterr().err
    assert "  --max-model-len " in err
    options = ["--memory", "200MiB", "--max-model-len", "8192", "--json"]
    assert main(["plan", str(smollm2), *options]) == 2
    report = json.loads(capsys.readouterr().out)
    assert all(other["total"] <= 200 * 2**20 for other in report["alternatives"])
    changed = [set(other["options"]) for other in report["alternatives"]]
    assert {"kv_cache_dtype", "max_model_len"} in changed
    assert report["problem"].partition("what would help")[0] in err


def test_plan_refuses_a_size_it_cannot_read(smollm2: Path, capsys: Captured) -> None:
    assert main(["plan", str(smollm2), "--memory", "lots"]) == 2
    assert "expected a size such as '2GiB'" in capsys.readouterr().err
    assert main(["plan", str(smollm2), "--memory", "-1GiB"]) == 2
    assert "expected a size such as '2GiB'" in (err := capsys.readouterr().err)
    assert "'-1GiB'" in err and err.count("\n") == 1


def followed(argv: list[str], line: str) -> list[str]:
    """A command with the arguments that a line of advice names in place of its own."""
    given = shlex.split(line.partition(" is ")[0].partition(" needs ")[0])
    with_limits = line.partition(" is enough with ")[2]
    given += shlex.split(with_limits)
    new = dict(zip(given[::2], given[1::2], strict=True))
    old = dict(zip(argv[2::2], argv[3::2], strict=True))
    return [*argv[:2], *(word for pair in {**old, **new}.items() for word in pair)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_the_advice_of_a_command_works_in_that_command(
    command: str, golden: Path, capsys: Captured
) -> None:
    argv = [command, str(golden / "arch-llama3" / "hf"), "--memory", "12MiB"]
    if command == "run":
        argv += ["--prompt", "Hi", "--max-tokens", "2"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    lines = err.partition("what would help:\n")[2].splitlines()
    lines = [line.strip() for line in lines if line.startswith("  --")]
    assert len(lines) >= 2, err
    assert "max_num_seqs" not in err and "='" not in err
    for line in lines:
        flags = re.fullmatch(r"--skip-tokenizer-init True is enough.*", line)
        assert main([*argv, "--skip-tokenizer-init"] if flags else followed(argv, line)) == 0, line
    capsys.readouterr()


def test_quantizing_a_gguf_file_without_a_scheme_makes_another(
    golden: Path, tmp_path: Path, capsys: Captured
) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    assert main(["quantize", model, str(tmp_path / "folder")]) == 2
    err = capsys.readouterr().err
    assert "name a .gguf file as the result, with scheme q4_k_m" in err
    assert main(["quantize", model, str(tmp_path / "made.gguf")]) == 0
    assert (tmp_path / "made.gguf").is_file()


# ---- the rest -----------------------------------------------------------------------------------


def test_fetch_demo_prints_the_path_of_a_valid_file(
    smollm2: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "cache" / "embedlm"
    folder.mkdir(parents=True)
    (folder / smollm2.name).symlink_to(smollm2)
    assert main(["fetch-demo"]) == 0
    assert capsys.readouterr().out == f"{folder / smollm2.name}\n"


def test_tables_align_text_left_and_numbers_right() -> None:
    assert format_table(["a", "bits"], [["long", "5"], ["x", "16.5"]]).splitlines() == [
        "a     bits",
        "----  ----",
        "long     5",
        "x     16.5",
    ]


def test_the_parser_knows_every_command() -> None:
    args = build_parser().parse_args(["bench", "--streams", "1,4"])
    assert args.run is bench.run
    assert args.streams == (1, 4)
