"""The command line. (`tinygrad-mha gradcheck` is in test_registry.py.)"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest

import tinygrad_mha as tg
from tinygrad_mha import cli
from tinygrad_mha.cli import main
from tinygrad_mha.laboratory import LabServer
from tinygrad_mha.training.report import open_report

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
SMALL = ["--set", "n_layer=1", "n_embd=8", "n_head=2", "block_size=8", "batch_size=2", "eval_batches=1"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(text, tmp_path, capsys):
    """The folder of a small training run."""
    folder = tmp_path / "run"
    assert main(["train", "--text", str(text), "--out", str(folder), "--steps", "5", "--quiet", *SMALL]) == 0
    capsys.readouterr()
    return folder


def refused(capsys, *argv):
    """The message of a usage error."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tinygrad-mha: ")
    assert "Traceback" not in captured.err
    return captured.err


# ------------------------------------------------------------------------------------------------------ train, generate


def test_train_prints_its_result_and_the_next_command(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--text", str(text), "--out", str(out), "--steps", "3", "--quiet", *SMALL]) == 0
    said = capsys.readouterr().out
    assert re.search(r"finished at step 3; validation loss [\d.]+ \(at first [\d.]+\)", said)
    assert f"tinygrad-mha generate {out}" in said


def test_train_accepts_the_configuration_of_a_run_its_state_and_a_file(text, run, tmp_path, capsys):
    (tmp_path / "options.json").write_text(json.dumps({"n_layer": 1, "n_embd": 8, "n_head": 2, "block_size": 8}))
    configs = [run, run / "step-5" / "state.json", tmp_path / "options.json", run / "step-5"]
    for i, config in enumerate(configs):
        call = ["train", "--text", str(text), "--out", str(tmp_path / str(i)), "--steps", "2", "--quiet"]
        assert main([*call, "--config", str(config), "--set", "batch_size=2", "eval_batches=1"]) == 0
    logs = [(tmp_path / str(i) / "log.csv").read_text() for i in (0, 1)]
    losses = [[line.split(",")[1] for line in log.splitlines()] for log in logs]
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "2" / "step-2" / "state.json").read_text())["config"]["n_embd"] == 8


def test_a_configuration_that_cannot_be_read_is_refused_before_the_folder_is_made(tmp_path, capsys):
    out = tmp_path / "new"
    (tmp_path / "empty").mkdir()
    for name, content, message in [
        ("nothing", None, "must be tiny, cpu, finetune, a JSON file, or the folder of a run, got"),
        ("typo.json", '{"n_layr": 1}', "did you mean 'n_layer'?"),
        ("list.json", "[1]", "must contain a JSON object"),
        ("state.json", "{}", "has no configuration"),
        ("cut.json", '{"n_layer', "is not valid JSON"),
    ]:
        if content is not None:
            (tmp_path / name).write_text(content)
        assert message in refused(capsys, "train", "--config", tmp_path / name, "--out", out)
    assert "contains no run" in refused(capsys, "train", "--config", tmp_path / "empty", "--out", out)
    assert not out.exists()


def test_train_resumes_and_equals_the_uninterrupted_run(text, tmp_path, run, capsys):
    half = tmp_path / "half"
    for steps in ("2", "5"):
        call = ["train", "--text", str(text), "--out", str(half), "--steps", steps, "--resume", "--quiet"]
        # The schedule depends on the number of steps; a constant rate keeps it the same.
        assert main([*call, *SMALL, "learning_rate=0.001", "min_lr=0.001"]) == 0
    whole = tmp_path / "whole"
    call = ["train", "--text", str(text), "--out", str(whole), "--steps", "5", "--quiet"]
    assert main([*call, *SMALL, "learning_rate=0.001", "min_lr=0.001"]) == 0
    weights = [(path / "step-5" / "model.safetensors").read_bytes() for path in (half, whole)]
    assert weights[0] == weights[1]


def test_train_prints_events_as_json(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--text", str(text), "--out", str(out), "--steps", "2", "--json", *SMALL]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [0, 1, 2]


def test_train_refuses_invalid_arguments(text, tmp_path, run, capsys):
    out = tmp_path / "new"
    assert "there is no text file" in refused(capsys, "train", "--text", tmp_path / "missing", "--out", out)
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(capsys, "train", "--text", tmp_path / "bad", "--out", out)
    (tmp_path / "empty").write_text("")
    refused(capsys, "train", "--text", tmp_path / "empty", "--out", out)
    assert "n_layer" in refused(capsys, "train", "--text", text, "--out", out, "--set", "n_layers=2")
    assert "NAME=VALUE" in refused(capsys, "train", "--text", text, "--out", out, "--set", "n_layer")
    assert "contains a run already" in refused(capsys, "train", "--text", text, "--out", run)
    assert not out.exists()


def test_generate_continues_a_prompt_reproducibly_with_a_seed(run, capsys):
    texts = []
    for seed in ("0", "0", "1"):
        assert main(["generate", str(run), "--prompt", "the ", "-n", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert texts[0].startswith("the ")
    assert len(texts[0]) == len("the ") + 20 + 1


def test_generate_gives_the_same_text_without_the_cache_and_prints_the_cost(run, capsys):
    said = []
    for more in ([], ["--no-cache"]):
        call = ["generate", str(run), "--prompt", "fox", "-n", "5", "--temperature", "0", "--stats", *more]
        assert main(call) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out
    assert "with the cache; multiply-adds:" in said[0].err
    assert "without the cache; multiply-adds:" in said[1].err


def test_generate_prints_a_note_if_the_context_slides(run, capsys):
    assert main(["generate", str(run), "--prompt", "the ", "-n", "30", "--seed", "0"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("note: ")
    assert "exceed the context: block_size is 8" in said
    assert "block_size is 8" in refused(capsys, "generate", run, "--prompt", "the ", "-n", "30", "--on-full", "error")


def test_generate_opens_a_hugging_face_folder(tmp_path, capsys):
    config = tg.nn.GPTConfig(vocab_size=11, block_size=16, n_layer=1, n_head=2, n_embd=8)
    model = tg.nn.GPT(config).eval()
    model.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--ids", "1", "2", "3", "-n", "4", "--temperature", "0"]) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert ids == tg.generate(model, [1, 2, 3], 4, temperature=0)[0].tolist()
    assert "with --ids" in refused(capsys, "generate", tmp_path, "--prompt", "hello")


def test_generate_refuses_invalid_arguments(run, tmp_path, capsys):
    said = refused(capsys, "generate", tmp_path / "missing")
    assert "no such folder" in said
    assert '\n  tinygrad-mha generate --prompt "The "\n' in said
    assert f"\n  tinygrad-mha train --text FILE --out {tmp_path / 'missing'}\n" in said
    refused(capsys, "generate", tmp_path)
    assert "'%' (U+0025) at position 3" in refused(capsys, "generate", run, "--prompt", "fox%")
    refused(capsys, "generate", run, "--prompt", "")
    assert "--top-k must be" in refused(capsys, "generate", run, "--top-k", "-1")
    assert "temperature" in refused(capsys, "generate", run, "--temperature", "-1")


# ------------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("what", ["mha", "block", "gpt"])
@pytest.mark.parametrize("more", [[], ["--no-values"], ["--ops", "separate", "--direction", "LR"]], ids=" ".join)
def test_graph_draws_the_built_in_subjects(what, more, tmp_path, capsys):
    out = tmp_path / "x.dot"
    assert main(["graph", what, "-o", str(out), *more]) == 0
    assert out.read_text().startswith("digraph")
    assert "boxes" in capsys.readouterr().out


def test_graph_draws_the_small_gpt_or_a_run(run, tmp_path, capsys):
    for model in ([], [str(run)]):
        out = tmp_path / "x.dot"
        assert main(["graph", "gpt", "-o", str(out), "--model", *model]) == 0
        assert "loss" in out.read_text()
    assert "--model is for the target gpt" in refused(capsys, "graph", "mha", "--model")


def test_graph_of_attention_names_its_matrices(tmp_path):
    main(["graph", "mha", "-o", str(tmp_path / "x.dot")])
    dot = (tmp_path / "x.dot").read_text()
    for name in ("X", "W_Q1", "K_2", "scores_1", "S_2", "H_1", "Concat", "W_O", "Y", "head 1", "head 2"):
        assert f">{name}<" in dot


def test_graph_draws_a_users_function(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(x, w): return (x @ w).tanh().named('out')\n")
    out = tmp_path / "x.dot"
    assert main(["graph", f"{file}:f", "--shape", "2x3", "3x5", "-o", str(out), "--backward"]) == 0
    assert "out" in out.read_text()
    assert "expected mha, block, gpt or FILE.py:NAME" in refused(capsys, "graph", "what", "-o", out)
    assert "needs inputs" in refused(capsys, "graph", f"{file}:f", "-o", out)
    assert ".svg" in refused(capsys, "graph", "mha", "-o", tmp_path / "x.bmp")
    file.write_text("def attend(q, k, v): return (q @ k.mT).softmax() @ v\ndef double(x): return 2 * x\n")
    for name, said in {"attend": "q 3x5, k 3x5, v 3x7", "double": "x 3x5"}.items():
        assert main(["graph", f"{file}:{name}", "-o", str(out)]) == 0
        assert f"inputs: {said}; --shape takes others" in capsys.readouterr().err


def test_show_speaks_the_language_of_the_option_or_else_of_the_locale(monkeypatch, capsys):
    said = {}
    for lang in ("en", "zh"):
        assert main(["show", "猫 坐", "--lang", lang]) == 0
        said[lang] = capsys.readouterr().out
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert main(["show", "猫 坐"]) == 0
    assert capsys.readouterr().out == said["zh"]
    assert [line for line in said["en"].splitlines() if line.startswith(" ")] == [
        line for line in said["zh"].splitlines() if line.startswith(" ")
    ]
    english = set(re.findall("[a-z]{3,}", said["zh"]))
    assert english <= {"model", "softmax", "masked", "scores", "oncat"}


def test_walkthrough_writes_a_page_of_a_users_sentence(tmp_path, run, capsys):
    page = tmp_path / "page.html"
    assert main(["walkthrough", "the cat sat on mats", "-o", str(page)]) == 0
    assert "mats" in page.read_text()
    assert "5 tokens and 2 heads" in capsys.readouterr().out
    assert main(["walkthrough", "the fox", "-o", str(page), "--model", str(run)]) == 0
    assert "no words" in refused(capsys, "walkthrough", "  ", "-o", page)
    assert "5x7x11" in refused(capsys, "walkthrough", "a b", "-o", page, "--widths", "5x7")


# ----------------------------------------------------------------------------------------------------------------- demo


def test_the_demo_prints_all_parts_and_the_folder(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main(["demo", "--steps", "6", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for part in (
        "S_1  3x3",
        "gradcheck of Block: ok",
        "scaled_by_d: FAILED (scale)",
        "validation loss",
        "the same tokens: True",
        str(out),
    ):
        assert part in said
    assert {"gradcheck.txt", "sample.txt", "walkthrough.html", "gpt"} <= {path.name for path in out.iterdir()}
    assert "is not empty" in refused(capsys, "demo", "--out", out)


def test_the_commands_that_the_demo_ends_with_can_be_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LabServer, "run", LabServer.server_close)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "1", "--out", "my demo"]) == 0
    commands = re.findall("^  tinygrad-mha (.*)", capsys.readouterr().out, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["lab", "walkthrough", "check", "train"]
    for command in commands:
        argv = shlex.split(command.replace("--steps 1501", "--steps 2"))
        assert main(argv) == 0, capsys.readouterr()


def test_an_interrupted_demo_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tinygrad_mha.demo.check_block", interrupt)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().err == "tinygrad-mha: interrupted\n"
    assert not (tmp_path / "demo").exists()


def test_the_demo_without_graphviz_gives_its_advice_once(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise tg.viz.NoEngineError("SVG", ["dot is not installed"])

    monkeypatch.setattr("tinygrad_mha.viz.diagram.graphviz_engines.render", fail)
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "my demo")]) == 0
    said = capsys.readouterr().out
    assert said.count("tinygrad_mha[render]") == 1
    assert "-0.00" not in said
    assert f"--steps 1501 --out '{tmp_path / 'my demo' / 'gpt'}'" in said


def test_the_package_runs_as_a_module():
    call = [sys.executable, "-m", "tinygrad_mha", "--version"]
    assert subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip() == (
        f"tinygrad-mha {tg.__version__}"
    )


# --------------------------------------------------------------------------------------------------------------- errors


def call(argv, **options):
    """Run the command line in a process of its own."""
    return subprocess.run([sys.executable, "-m", "tinygrad_mha", *map(str, argv)], timeout=100, **options)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("Unable to allocate 7 TiB"), "not enough memory: Unable to allocate 7 TiB"),
        (MemoryError(), "not enough memory: choose smaller sizes"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "No space left on device", "run/a"), "run/a: No space left on device"),
        (KeyError("step"), "KeyError: 'step'"),
        (RecursionError("too deep"), "too deep"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (AssertionError(), "AssertionError:"),
        (tg.viz.NoEngineError("SVG", ["dot is not installed"]), "cannot make SVG: no working Graphviz"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError("x" * 100_000), "xxx"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_exception_becomes_one_line_and_debug_shows_the_traceback(error, line, monkeypatch, capsys):
    def fail(folder, steps):
        raise error

    monkeypatch.setattr(cli, "write_demo", fail)
    message = refused(capsys, "demo")
    assert message.startswith(f"tinygrad-mha: {line}")
    assert message.count("\n") == 1
    assert len(message) < 2100
    assert main(["demo", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_silently(run):
    read, write = os.pipe()
    os.close(read)
    result = call(["generate", run, "-n", "3"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.stderr in ("", None)
    assert result.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["show", "--help"]], ids=" ".join)
def test_a_help_that_cannot_be_written_is_an_error(argv):
    with open("/dev/full", "w") as full:
        result = call(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "tinygrad-mha: No space left on device\n"


def test_standard_output_that_is_not_utf_8_receives_replaced_characters(tmp_path, run):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = ["graph", "mha", "-o", tmp_path / "注意.dot"]
    result = call(command, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert b"??.dot: " in result.stdout


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("closing", ["2>&-", ">&- 2>&-", "2>/dev/full"])
def test_training_survives_that_its_terminal_is_closed(closing, text, tmp_path):
    out = tmp_path / "run"
    words = [sys.executable, "-m", "tinygrad_mha", "train", "--text", text, "--out", out, "--steps", "2", *SMALL]
    command = f'"$@" {closing}'
    result = subprocess.run(["sh", "-c", command, "sh", *map(str, words)], timeout=100)
    assert result.returncode == 0
    assert (out / "LATEST").read_text() == "step-2\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("walkthrough x --heads 1000", "--heads must be at most 64"),
        ("show x --heads 100000000", "--heads must be at most 64"),
        ("show x --head 3", "--head must be from 1 to 2, got 3"),
        (f"show {'猫' * 501}", "at most 500 words, got 501"),
        ("walkthrough x --widths 5x7x9999", "from 1 to 1024"),
        ("walkthrough x --widths 0x7x11", "from 1 to 1024"),
        ("walkthrough x --layer 1", "--model"),
        ("graph mha --shape 3x5", "--shape needs a FILE.py:NAME"),
    ],
)
def test_sizes_and_options_that_cannot_be_used_are_refused_before_any_work(command, reason, capsys):
    assert reason in refused(capsys, *command.split())


@pytest.mark.parametrize("option", ["--heads=2", "--widths=5x7x11", "--seed=0"])
def test_options_of_random_weights_are_refused_with_a_trained_model(option, run, capsys):
    assert option.partition("=")[0] in refused(capsys, "walkthrough", "the fox", "--model", run, option)


@pytest.mark.parametrize("shape", ["3x", "x3", "3xx5", "3x-5", "a", "", "3.5", "9999999x9999999", "(3,"])
def test_a_shape_is_naturals_between_signs(shape, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(x): return x\n")
    assert "shape" in refused(capsys, "gradcheck", f"{file}:f", f"--shape={shape}")


@pytest.mark.parametrize(
    ("text", "shape"), [("3x5", (3, 5)), ("()", ()), ("7", (7,)), ("(3,5)", (3, 5)), ("0x2", (0, 2))]
)
def test_shapes_are_read(text, shape):
    assert cli.parse_shape(text) == shape


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("demo --steps -1", "expected an integer of at least 0"),
        ("train --out x --workers 0", "expected an integer of at least 1"),
        ("walkthrough x --heads 0", "expected an integer of at least 1"),
        ("generate x -n -5", "expected an integer of at least 0"),
        ("train --out x --stepps 3", "unrecognized arguments: --stepps"),
    ],
)
def test_numbers_out_of_range_and_mistyped_options_show_the_usage_of_their_command(command, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.startswith(f"usage: tinygrad-mha {command.split()[0]}")


def test_the_encoding_of_standard_output_is_kept(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    cli.prepare_streams()
    print("注意", flush=True)
    print("−0.54", flush=True)
    assert stream.buffer.getvalue() == b"??\n-0.54\n"


# ------------------------------------------------------------------------------------------------------------ examples


def test_examples_are_copied_and_run_and_a_full_folder_is_refused(tmp_path, capsys):
    folder = tmp_path / "lesson"
    assert main(["examples", str(folder)]) == 0
    assert f"next: python {folder / 'attention_by_hand.py'}" in capsys.readouterr().out
    subprocess.run([sys.executable, folder / "attention_by_hand.py"], check=True, capture_output=True, cwd=tmp_path)
    assert not list(folder.rglob("__pycache__"))
    assert "is not an empty folder: choose another" in refused(capsys, "examples", folder)


def test_every_command_shows_examples_in_its_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"Examples:\n  tinygrad-mha {command}" in capsys.readouterr().out
    assert len(commands) >= 10


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


def test_graph_without_graphviz_says_what_to_install_and_what_needs_none(monkeypatch, capsys, tmp_path):
    def fail(*args):
        raise tg.viz.NoEngineError("SVG", ["dot is not installed"])

    monkeypatch.setattr("tinygrad_mha.viz.diagram.graphviz_engines.render", fail)
    assert main(["graph", "mha", "-o", str(tmp_path / "a.svg")]) == 2
    assert 'pip install "tinygrad_mha[render]" contains it; -o graph.dot' in capsys.readouterr().err


def test_a_warning_is_one_line_without_code(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    main([])
    assert warnings.formatwarning("no font", UserWarning, "cli.py", 3) == "tinygrad-mha: warning: no font\n"


# ------------------------------------------------------------------------------------- what is typed for the first time


def test_resume_starts_a_run_only_if_told_what_to_train(text, tmp_path, capsys):
    out = tmp_path / "typo"
    assert f"{out} contains no run to resume: name the folder of a run" in refused(
        capsys, "train", "--resume", "--out", out
    )
    assert not out.exists()
    assert main(["train", "--resume", "--out", str(out), "--text", str(text), "--steps", "1", *SMALL]) == 0
    assert f"note: {out} contains no run: a new one starts" in capsys.readouterr().err


def test_a_run_without_a_text_says_what_it_reads_and_a_finished_one_that_it_is(tmp_path, capsys):
    call = ["train", "--out", str(tmp_path / "my run"), "--steps", "1", *SMALL]
    assert main(call) == 0
    said = capsys.readouterr()
    assert "the text is Python's language reference" in said.err
    assert f"next: tinygrad-mha generate '{tmp_path / 'my run'}'" in said.out
    assert "continue it with --resume, or choose another folder with --out" in refused(capsys, *call)
    assert main([*call, "--resume", "--quiet"]) == 0
    assert "already finished at step 1; a higher --steps continues" in capsys.readouterr().out
    assert "--steps must be at least 1" in refused(capsys, *call[:3], "--resume", "--steps", "0")


def test_generate_says_once_that_the_context_slides(run, capsys):
    assert main(["generate", str(run), "--prompt", "the ", "-n", "30", "--temperature", "0", "--stats"]) == 0
    said = capsys.readouterr().err
    assert said.count("exceed the context") == 1
    assert "ContextFullWarning" not in said


def test_the_examples_with_a_file_accept_the_function_of_the_help(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(cli.OWN_FILE.partition("such as:")[2].replace("\n    ", "\n"))
    examples = [
        line.split()[1:]
        for run in (cli.run_graph, cli.run_gradcheck, cli.run_check)
        for line in run.__doc__.splitlines()
        if "model.py" in line
    ]
    assert len(examples) == 4
    for example in examples:
        more = ["-o", "x.dot"] if example[0] == "graph" else []
        assert main([*example, *more]) == 0, capsys.readouterr()


@pytest.mark.parametrize("command", ["graph", "gradcheck", "check"])
def test_a_wrong_number_of_shapes_names_the_inputs(command, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(q, k, v): return q @ k.mT @ v")
    said = refused(capsys, command, f"{file}:f", "--shape", "7x11")
    assert "give one shape for each of q, k, v, such as --shape 7x11 7x11 7x11" in said


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["genrate"], "did you mean generate?"),
        (["generate", "--promt", "a"], "did you mean --prompt?"),
        (["generate", "—temperature", "0"], "'—temperature' has another sign than the plain '--temperature'"),
        (["train", "--out", ""], "expected the name of a file or folder"),
        (["generate", __file__], "expected a folder"),
    ],
    ids=str,
)
def test_what_is_mistyped_is_named(command, reason, capsys):
    with pytest.raises(SystemExit):
        main(command)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["check", "mine.py：f"], "than the plain 'mine.py:f'"),
        (["generate", "-n", "999", "--on-full", "error"], "lower --max-new-tokens, or pass --on-full slide"),
        (["generate", "--prompt", "床前"], "writes English only"),
        (["show", "The cat", "--layer", "9", "--model"], "--layer must be from 0 to 3, got 9"),
        (["show", "The cat", "--head", "9", "--model"], "--head must be from 1 to 4, got 9"),
        (["generate", "--temperature", "-1"], "tinygrad-mha: --temperature must be a finite number"),
        (["graph", "mah"], "got 'mah'; did you mean mha?"),
        (["walkthrough", "the cat", "-o", "."], "expected -o PAGE.html, got '.'"),
        (["train", "--quiet", "--json"], "not both"),
    ],
    ids=str,
)
def test_a_refusal_names_options_and_what_to_do(command, reason, capsys):
    assert reason in refused(capsys, *command)


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize(
    ("command", "unbroken"),
    [
        (["generate", "nowhere"], "\n  tinygrad-mha train --text FILE --out nowhere\n"),
        (["generate", "-n", "999", "--on-full", "error"], "--on-full slide"),
        (["genrate"], "generate?"),
        (["check", "model.py:f", "--model"], "--model"),
    ],
    ids=str,
)
def test_a_refusal_fits_the_terminal_without_breaking_what_is_copied(command, unbroken, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with suppress(SystemExit):
        main(command)
    said = capsys.readouterr().err
    assert unbroken in said
    assert all(len(line) < columns for line in said.splitlines() if not line.startswith("  "))


def test_a_log_receives_the_progress_every_ten_seconds(monkeypatch):
    run = SimpleNamespace(step=0, config=SimpleNamespace(steps=3))
    for is_terminal, seconds in ((True, 0.1), (False, 10)):
        monkeypatch.setattr("sys.stderr.isatty", lambda answer=is_terminal: answer)
        with open_report("bar", run) as report:
            assert report.bar.mininterval == seconds


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use: give another --port" in refused(capsys, "lab", "--port", port)
