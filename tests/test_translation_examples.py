"""The translation examples run in their short form, on numbers and on files, and name errors in a file."""

from __future__ import annotations

import doctest
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "translation"))

import c_attention
import common
import g_encoder_decoder
import ladder
import models
import number_words
import pictures
import recurrent
import word_by_word

EXAMPLES = Path(__file__).parent.parent / "examples"
RUNGS = sorted(path.stem for path in (EXAMPLES / "translation").glob("[a-g]_*.py"))


@pytest.fixture(scope="module")
def corpus():
    return common.make_number_corpus(n_train=7200, n_held_out=30)


@pytest.fixture
def tsv(tmp_path):
    """Sixty pairs whose words all occur several times."""
    names = {"Tom": "汤", "Mary": "玛", "Ann": "安", "Bob": "鲍"}
    verbs = {"sees": "看", "hears": "听", "likes": "爱"}
    things = names | {"it": "它"}
    rows = [f"{a} {v} {b}.\t{names[a]}{verbs[v]}{things[b]}。\t1 2" for a in names for v in verbs for b in things]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def run_script(path, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    runpy.run_path(str(path), run_name="__main__")


# --------------------------------------------------------------------------------------------------------------------
# Short runs


@pytest.mark.parametrize("name", RUNGS)
def test_each_rung_runs_by_itself_and_reports(name, monkeypatch, tmp_path, capsys):
    run_script(EXAMPLES / "translation" / f"{name}.py", "--short", "--out", tmp_path, monkeypatch=monkeypatch)
    (row,) = json.loads((tmp_path / "ladder.json").read_text(encoding="utf-8"))["rows"]
    assert row["rung"] == name[0]
    assert row["by_group"].keys() == {f"{n} digits" for n in (4, 5, 6, 7, 8)}
    assert f"| {row['rung']}) {row['title']} | {row['parameters']:,} |" in capsys.readouterr().out


@pytest.mark.parametrize("module", [models, number_words, recurrent], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module):
    assert doctest.testmod(module).failed == 0


def test_there_are_seven_rungs_and_the_ladder_has_all():
    assert [name[0] for name in RUNGS] == list("abcdefg")
    assert {rung for rung, _, _ in ladder.RUNGS} == set("abcdefg")


def test_the_ladder_prints_one_table_and_draws_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = ladder.main(["--short", "--only", "a", "b", "--out", str(tmp_path)])
    assert [row.title for row in rows] == ["per word", "RNN", "GRU"]
    table = (tmp_path / "ladder.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert len(table.splitlines()) == 5
    assert (tmp_path / "accuracy_by_length.png").stat().st_size > 10_000


def test_an_interrupted_ladder_continues_and_other_conditions_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out = str(tmp_path)
    (first,) = ladder.main(["--short", "--only", "a", "--out", out])
    measured = []
    measure = common.measure
    monkeypatch.setattr(common, "measure", lambda *args: measured.append(args[0]) or measure(*args))
    rows = ladder.main(["--short", "--only", "a", "c", "--out", out])
    assert measured == ["c"]
    assert rows[0].seconds == first.seconds
    with pytest.raises(SystemExit, match=r"measured under other conditions.*'seed': 0"):
        ladder.main(["--short", "--only", "a", "--seed", "1", "--out", out])


@pytest.mark.filterwarnings("ignore:no font with Chinese characters")
def test_the_ladder_runs_on_a_file_of_pairs(tsv, tmp_path, capsys):
    rows = ladder.main(["--short", "--only", "a", "g", "--pairs", str(tsv), "--out", str(tmp_path / "out")])
    assert [row.rung for row in rows] == ["a", "g"]
    assert rows[0].by_group.keys() == {"1-4 words"}
    assert "60 lines, 60 different sources" in capsys.readouterr().out


def test_loaded_weights_translate_as_the_saved_model(tmp_path, corpus, capsys):
    model = g_encoder_decoder.build(common.make_number_corpus(7200, 40), seed=0)
    model.save(tmp_path / "weights.safetensors")
    arguments = ["--short", "--weights", str(tmp_path / "weights.safetensors"), "--say", "two million and five"]
    g_encoder_decoder.main([*arguments, "--beam", "2"])
    out = capsys.readouterr().out
    found = model.search(
        common.make_number_corpus(7200, 40).source.encode(["two", "million", "and", "five"]),
        beam=2,
    )
    assert found.tree(common.make_number_corpus(7200, 40).target.words.__getitem__) in out


def test_training_is_deterministic_and_lowers_the_loss(corpus):
    settings = common.Settings(steps=12, batch=16, warmup=2)
    histories, after = [], []
    for _ in range(2):
        model = c_attention.build(corpus)
        before = common.measure_validation_loss(model, corpus)
        histories.append(common.train(model, corpus, settings, show=lambda line: None))
        after.append(common.measure_validation_loss(model, corpus))
    assert histories[0] == histories[1]
    assert after[0] == after[1] < before - 0.5


# --------------------------------------------------------------------------------------------------------------------
# Sentences and batches


def test_an_epoch_has_every_pair_once_in_batches_of_one_length(corpus):
    seen = []
    for source, target in common.make_batches(corpus, corpus.train, 32, np.random.default_rng(0)):
        assert len(source) == len(target) <= 32
        assert (source != common.PAD).all()
        seen += [tuple(s) + tuple(t[t != common.PAD]) for s, t in zip(source.tolist(), target, strict=True)]
    assert sorted(seen) == sorted(tuple(s + t) for s, t in map(corpus.encode, corpus.train))


def test_translations_are_in_the_order_of_the_pairs(corpus):
    model = c_attention.build(corpus)
    pairs = corpus.test[:9]
    together = common.translate(model, corpus, pairs, size=4)
    alone = [common.translate(model, corpus, [pair])[0] for pair in pairs]
    assert together == alone
    assert common.compute_exact_match(pairs, [pair.target for pair in pairs[:4]] + together[4:]) >= 4 / 9


def test_held_out_pairs_of_a_file_are_not_in_training_but_their_words_are(tsv):
    corpus = common.read_corpus(tsv)
    parts = [corpus.train, corpus.validation, corpus.test]
    assert [len(part) for part in parts] == [54, 3, 3]
    assert len({tuple(pair.source) for part in parts for pair in part}) == 60
    assert corpus.max_len == 5


def test_text_is_split_into_words_marks_and_characters():
    assert common.split_words("I don't know, Tom!") == ["i", "don't", "know", ",", "tom", "!"]
    assert common.split_words("我不知道，Tom。") == ["我", "不", "知", "道", "，", "tom", "。"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no tab here", "line 61: expected a sentence, a tab and its translation, got 'no tab here'"),
        ("", "line 61: expected a sentence, a tab"),
        ("words\t", "line 61: the translation is empty"),
        (" \t字", "line 61: the source is empty"),
        ("Tom sees " * 9 + "it\t字", "line 61: the source has 19 words, at most 11 are allowed"),
        ("Tom\t" + "字" * 12, "line 61: the translation has 12 words"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tsv, line, message):
    with tsv.open("a", encoding="utf-8") as file:
        file.write(line + "\nTom sees it\t字\n")
    with pytest.raises(SystemExit) as stopped:
        ladder.main(["--short", "--pairs", str(tsv), "--max-len", "12"])
    assert str(stopped.value).startswith(f"error: {tsv}, {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "nowhere.tsv"], "there is no text file nowhere.tsv"),
        (["--max-len", "5"], "--max-len needs --pairs"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        ladder.main(["--short", *arguments])


def test_a_file_of_two_lines_is_too_small(tmp_path):
    path = tmp_path / "two.tsv"
    path.write_text("one\t一\ntwo\t二\n", encoding="utf-8")
    with pytest.raises(ValueError, match="2 pairs are too few"):
        common.read_corpus(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [("two bananas", "has the unknown word 'bananas'"), ("", "is empty"), ("two " * 17, "at most 16 are allowed")],
)
def test_a_sentence_that_cannot_be_translated_is_refused(corpus, words, message):
    with pytest.raises(ValueError, match=message):
        g_encoder_decoder.translate_text(g_encoder_decoder.build(corpus), corpus, words, beam=2)


# --------------------------------------------------------------------------------------------------------------------
# What the examples show


def test_without_positions_the_order_of_the_words_changes_no_answer(corpus):
    model = c_attention.build(corpus)
    words = ["two", "thousand", "and", "five"]
    ids = np.array(corpus.source.encode(words))
    order = [3, 1, 2, 0]
    np.testing.assert_allclose(model(ids).numpy()[order], model(ids[order]).numpy()[:4], atol=1e-5)


@pytest.mark.filterwarnings("ignore:no font with Chinese characters")
def test_the_alignment_is_a_heat_map_of_written_and_read_words(corpus, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shown = {}
    draw = tg.viz.heatmap
    monkeypatch.setattr(tg.viz, "heatmap", lambda *given, **options: shown.update(options) or draw(*given, **options))
    sentences = [["two", "million"], ["seven"]]
    pictures.draw_alignments(g_encoder_decoder.build(corpus), corpus, sentences, tmp_path / "alignment.png")
    assert shown["keys"] == ["seven"]
    assert shown["axes_names"] == ("written", "read")
    assert {file.name for file in tmp_path.iterdir()} == {"alignment_1.png", "alignment_2.png"}


# --------------------------------------------------------------------------------------------------------------------
# Word by word


@pytest.mark.parametrize("seed", range(4))
def test_one_word_at_a_time_equals_all_words_as_matrices(seed):
    run = word_by_word.run_all_stages(seed)
    rows = np.concatenate([word["A"].numpy() for word in run["words"]])
    assert rows.dtype == np.float64
    assert word_by_word.compare(rows, run["whole"]["A"].numpy())[1] <= 8
    for i, word in enumerate(run["words"]):
        products = np.concatenate([product.numpy().ravel() for product in word["products"]])
        whole = run["whole"]["Q"].numpy()[i] @ run["whole"]["K"].numpy().T
        np.testing.assert_allclose(products, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_two_matrices_in_a_row_equal_their_product(seed):
    run = word_by_word.run_all_stages(seed)
    for head, combined in zip(run["heads"], run["combined"], strict=True):
        np.testing.assert_allclose(head.numpy(), combined.numpy(), rtol=0, atol=1e-13)


def test_the_two_heads_equal_multi_head_attention(rng):
    run = word_by_word.run_all_stages()
    p = run["p"]
    mha = tg.nn.MultiHeadAttention(6, 2, d_k=3).astype(np.float64)
    for x in "QKV":
        both = [p[f"W_{x}"].numpy() @ p[f"W_{x}{i}"].numpy() for i in (1, 2)]
        getattr(mha, f"w{x.lower()}").assign_(np.concatenate(both, axis=1))
    mha.wo.assign_(p["W_O"].numpy())
    np.testing.assert_allclose(mha(run["X"]).numpy(), run["Y"].numpy(), rtol=0, atol=1e-13)


def test_every_stage_is_drawn(tmp_path, monkeypatch, capsys):
    run_script(EXAMPLES / "word_by_word.py", "--out", tmp_path, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "A_1, the sum of the four values with these weights" in out
    stages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(stages) == 7
    for name, titles in {
        "2_products_of_one_word": ["q_1·k_4", "W_K"],
        "3_result_of_one_word": ["A_1"],
        "7_output": ["W_O"],
    }.items():
        for title in titles:
            assert title in stages[name]
