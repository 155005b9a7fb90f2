"""`show` prints every matrix of an attention with its name, shape, labels and numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import cli
from tinygrad_mha.cli import main
from tinygrad_mha.data import split_words

WORDS = ["the", "cat", "坐"]


@pytest.fixture
def trace():
    mha = tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
    x = np.random.default_rng(1).standard_normal((3, 5))
    return mha(x, causal=True, trace=True)[1]


def headings(text):
    """(name, shape) of each matrix that was printed."""
    return [tuple(line.split()[:2]) for line in text.splitlines() if line and not line.startswith(" ")]


def test_every_matrix_of_every_head_has_its_name_and_shape(trace, capsys):
    tg.show(trace, WORDS)
    shapes = {"Q": "3x7", "K": "3x7", "V": "3x11", "scores": "3x3", "masked": "3x3", "S": "3x3", "H": "3x11"}
    expected = [(f"{name}_{i}", shape) for i in (1, 2) for name, shape in shapes.items()]
    assert headings(capsys.readouterr().out) == [*expected, ("Concat", "3x22")]


def test_the_printed_numbers_are_those_of_the_trace_beside_the_labels_of_their_rows(trace, capsys):
    tg.show(trace, WORDS, head=2)
    block = capsys.readouterr().out.split("\n\n")[5].splitlines()
    assert block[0].startswith("S_2  3x3")
    assert block[1].split() == WORDS
    assert [line.split()[0] for line in block[2:]] == WORDS
    numbers = [[float(cell) for cell in line.split()[1:]] for line in block[2:]]
    np.testing.assert_allclose(numbers, trace.weights.numpy()[1], atol=0.006)


def test_masked_scores_are_written_as_infinite(trace, capsys):
    tg.show(trace, WORDS, head=1)
    assert capsys.readouterr().out.count("−∞") == 1 + 3  # the meaning of the matrix, and three cells


def test_a_chinese_label_takes_two_columns(trace, capsys):
    tg.show(trace, WORDS, head=1)
    lines = capsys.readouterr().out.splitlines()
    cat, zuo = lines[2], lines[3]
    assert len(cat) - len(zuo) == 1


def test_heads_that_share_keys_print_them_once(capsys):
    mha = tg.nn.MultiHeadAttention(12, n_head=4, n_kv_head=2, rng=0)
    tg.show(mha(np.eye(5, 12), trace=True)[1])
    names = [name for name, _ in headings(capsys.readouterr().out)]
    assert [name for name in names if name[0] in "KQ"] == ["Q_1", "K_1", "Q_2", "Q_3", "K_2", "Q_4"]


def test_a_layer_of_a_gpt_and_an_own_attention_without_some_steps_are_shown(capsys):
    model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=7, n_layer=2, n_head=2, n_embd=6))
    trace = model([[1, 2, 3]], trace=True)[1]
    tg.show(trace, layer=1, head=1)
    assert headings(capsys.readouterr().out)[-1] == ("H_1", "3x3")
    tg.show(tg.nn.heads.AttentionTrace(weights=tg.Tensor(np.eye(3))))
    assert headings(capsys.readouterr().out) == [("S", "3x3")]


def test_columns_that_do_not_fit_are_left_out_visibly(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    tg.show(trace, WORDS)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert max(map(len, rows)) <= 40
    assert any(row.endswith("…") for row in rows)


def test_a_long_label_widens_its_own_column_only_and_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["an", "internationalization", "注意力机制注意力机制", "x"]
    tg.show(np.full((4, 4), -0.25), words, words)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "                    an  internation…  …",
        "  an             −0.25         −0.25  …",
        "  internationa…  −0.25         −0.25  …",
        "  注意力机制注…  −0.25         −0.25  …",
        "  x              −0.25         −0.25  …",
        "",
    ]


def test_labels_cannot_give_orders_to_a_terminal(capsys):
    tg.show(np.eye(2), ["a\x1b[31m", "\n "], ["b\tc", "\x9b\r"])
    assert capsys.readouterr().out.splitlines() == [
        "2x2",
        "           b⇥c    \ufffd␍",
        "  a␛[31m  1.00     0",
        "  ⏎␣         0  1.00",
        "",
    ]


def test_colours_are_for_terminals_and_no_color_or_a_dumb_one_turns_them_off(trace, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    tg.show(trace)
    assert "\033[48;2;" in capsys.readouterr().out
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            tg.show(trace)
        assert "\033" not in capsys.readouterr().out


def test_a_matrix_several_and_a_dict_of_them_are_shown_with_the_labels_given(capsys):
    x = tg.Tensor(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), name="X")
    tg.show(x, WORDS)
    assert capsys.readouterr().out.splitlines() == [
        "X  3x2",
        "  the  1.00  2.00",
        "  cat  3.00  4.00",
        "  坐   5.00  6.00",
        "",
    ]
    tg.show([x, (x * 2).named("Z")])
    assert headings(capsys.readouterr().out) == [("X", "3x2"), ("Z", "3x2")]
    tg.show({"dX": np.eye(3)}, WORDS, keys=["a", "b", "c"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "b", "c"]
    tg.show(np.eye(2))
    assert capsys.readouterr().out.splitlines()[0] == "2x2"


def test_what_cannot_be_shown_is_refused(trace):
    with pytest.raises(ValueError, match="tokens must be 3 labels"):
        tg.show(trace, ["the"])
    with pytest.raises(ValueError, match="keys must be 3 labels"):
        tg.show(trace, keys=["the"])
    with pytest.raises(IndexError, match="head must be 1 to 2, got 0"):
        tg.show(trace, head=0)
    with pytest.raises(TypeError, match="expected a trace"):
        tg.show("Q")
    with pytest.raises(ValueError, match=r"X has the shape \(3,\)"):
        tg.show(tg.Tensor(np.ones(3), name="X"))
    with pytest.raises(ValueError, match="keys must be 3 labels"):
        tg.show(np.eye(2, 3), ["the", "cat"], ["the"])
    mha = tg.nn.MultiHeadAttention(6, n_head=2, rng=0)
    with pytest.raises(ValueError, match="a batch of 2"):
        tg.show(mha(np.ones((2, 3, 6)), trace=True)[1])
    model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=7, n_layer=1, n_head=2, n_embd=6))
    with pytest.raises(IndexError, match="layer must be 0 to 0, got 1"):
        tg.show(model([1, 2], trace=True)[1], layer=1)


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_prints_what_computes_y_by_hand(capsys):
    assert main(["show", "the cat sat", "--head", "1"]) == 0
    names = [name for name, _ in headings(capsys.readouterr().out)]
    steps = ["Q_1", "K_1", "V_1", "scores_1", "masked_1", "S_1", "H_1"]
    assert names == ["X", "W_Q1", "W_K1", "W_V1", *steps, "W_O", "Y"]


def test_a_sentence_needs_no_quotation_marks(capsys):
    assert main(["show", "the cat sat"]) == 0
    quoted = capsys.readouterr().out
    assert main(["show", "the", "cat", "sat"]) == 0
    assert capsys.readouterr().out == quoted


def test_a_chinese_sentence_is_cut_into_characters(capsys):
    assert split_words("猫坐在 mat上。") == ["猫", "坐", "在", "mat", "上", "。"]
    assert main(["show", "猫坐下"]) == 0
    assert capsys.readouterr().out.startswith("X  3x5")


def test_the_language_of_the_page_is_that_of_the_locale(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert cli.guess_language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert cli.guess_language() == "zh"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert cli.guess_language() == "en"


@pytest.mark.parametrize("command", ["demo", "show", "train", "generate", "graph", "walkthrough", "gradcheck", "check"])
def test_the_help_of_a_command_has_examples_that_can_be_parsed(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"Examples:\n  tinygrad-mha {command}" in capsys.readouterr().out


def test_pictures_have_default_names_and_open_in_a_browser(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    monkeypatch.chdir(tmp_path)
    assert main(["walkthrough", "the cat", "--open"]) == 0
    assert opened == [(tmp_path / "walkthrough.html").as_uri()]


def test_head_ends_a_command_silently():
    code = f"{sys.executable} -m tinygrad_mha gradcheck --order 1 | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------------- the small GPT


def test_the_small_gpt_writes_without_a_folder_and_is_at_most_two_megabytes(capsys):
    assert main(["generate", "--prompt", "The ", "--seed", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("The ")
    assert sum(word in said.out.split() for word in ("the", "of", "is", "a", "class", "object")) >= 3
    assert said.err == ""
    folder = tg.training.resume.PRETRAINED
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2e6


def test_the_small_gpt_predicts_text_that_it_has_not_seen():
    model, tokenizer = tg.training.load_trained()
    ids = tokenizer.encode("The statement is executed in the order of the list. If the value is a function")
    with tg.no_grad():
        assert float(model.loss(ids[None, :-1], ids[None, 1:])) < 1.6


def test_show_and_walkthrough_open_the_small_gpt(tmp_path, capsys):
    assert main(["show", "The cat", "--layer", "1", "--head", "2", "--model"]) == 0
    assert headings(capsys.readouterr().out)[0] == ("Q_2", "7x24")
    assert main(["walkthrough", "The cat", "-o", str(tmp_path / "page.html"), "--model"]) == 0
