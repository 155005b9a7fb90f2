"""The toy examples: their training data are as described, and the models learn."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import tinygrad_mha as tg

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["sort_digits", "add_numbers", "reverse", "names", "char_gpt", "variants"])
def test_the_loss_of_a_short_run_falls(name, capsys):
    losses = load(name).main(short=True)["losses"]
    assert losses[-1] < 0.9 * losses[0]
    assert f"{losses[-1]:.4f}" in capsys.readouterr().out


def test_a_seed_decides_the_whole_run():
    example = load("sort_digits")
    assert example.main(short=True) == example.main(short=True)


def test_an_example_is_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sort_digits.py", "--short"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "sort_digits.py"), run_name="__main__")
    assert end.value.code == 0
    assert "of 729" in capsys.readouterr().out


@pytest.mark.slow
def test_sorting_reaches_its_target():
    assert load("sort_digits").main()["sorted"] == 729


def test_the_targets_of_sorting_are_the_six_sorted_digits():
    x, y = load("sort_digits").make_batch(np.array([[0, 2, 1, 1, 0, 1]]))
    np.testing.assert_array_equal(x, [[0, 2, 1, 1, 0, 1, 0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(y, [[-100, -100, -100, -100, -100, 0, 0, 1, 1, 1, 2]])


def test_the_targets_of_addition_are_the_three_digits_of_the_sum_ones_first():
    x, y = load("add_numbers").make_batch(np.array([85, 7]), np.array([50, 4]))
    np.testing.assert_array_equal(x, [[8, 5, 5, 0, 5, 3], [0, 7, 0, 4, 1, 1]])
    np.testing.assert_array_equal(y, [[-100, -100, -100, 5, 3, 1], [-100, -100, -100, 1, 1, 0]])


def test_the_targets_of_copying_and_reversing_are_the_answer():
    example = load("reverse")
    assert example.make_answer(">lamp=") == "lamp."
    assert example.make_answer("<lamp=") == "pmal."
    x, y = example.make_batch(["<ab=", ">c="])
    read = [example.TOKENIZER.decode(row) for row in x]
    assert [text.rstrip("a") for text in read] == ["<ab=b", ">c=c"]  # id 0, "a", is the padding
    targets = [(np.flatnonzero(row != -100).tolist(), example.TOKENIZER.decode(row[row != -100])) for row in y]
    assert targets == [([3, 4, 5], "ba."), ([2, 3], "c.")]


def test_the_targets_of_names_go_from_line_feed_to_line_feed():
    example = load("names")
    tokenizer = example.tg.data.CharTokenizer("\nabc")
    x, y = example.as_examples(["cab", "b"], tokenizer, 5)
    np.testing.assert_array_equal(x, [[0, 3, 1, 2, 0], [0, 2, 0, 0, 0]])
    np.testing.assert_array_equal(y, [[3, 1, 2, 0, -100], [2, 0, -100, -100, -100]])


def test_the_list_of_names_holds_each_once():
    names = (EXAMPLES / "names.txt").read_text().split("\n")[:-1]
    assert len(set(names)) == len(names) == 1300
    assert names == sorted(names)
    assert all(name.isascii() and name.isalpha() and name.islower() for name in names)


def test_names_can_be_read_from_another_file(tmp_path, capsys):
    path = tmp_path / "planets.txt"
    path.write_text("\n".join(["Merkur", "Venus", "Erde", "Mars", "Jupiter", "Saturn", "Uranus", "Neptun"] * 3))
    assert load("names").main(short=True, file=path)["losses"]
    assert "22 names to train on, 2 held out" in capsys.readouterr().out


def test_the_variants_of_attention_are_drawn_in_one_picture(tmp_path):
    example = load("variants")
    weights = {name: np.tri(5) / np.arange(1, 6)[:, None] * np.ones((2, 1, 1)) for name in example.VARIANTS}
    example.draw(weights, "abcde", tmp_path / "variants.png")
    assert (tmp_path / "variants.png").read_bytes().startswith(b"\x89PNG")


PROGRAMS = [path for path in sorted(EXAMPLES.rglob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_example_answers_help_and_ends_quietly(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(path.parent))
    with patch.dict(tg.ops.REGISTRY), pytest.raises(SystemExit) as end:  # an example may define a primitive
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert "with ending_quietly():" in path.read_text(encoding="utf-8").partition("__main__")[2]


@pytest.mark.parametrize(
    ("error", "code", "said"), [(KeyboardInterrupt, 130, "-c: interrupted\n"), (BrokenPipeError, 141, "")]
)
def test_a_script_that_is_stopped_prints_no_traceback(error, code, said):
    script = f"from tinygrad_mha.programs import ending_quietly\nwith ending_quietly():\n    raise {error.__name__}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, said)


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX pipe")
def test_an_example_whose_reader_has_enough_ends_silently():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, EXAMPLES / "attention_by_hand.py"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")
