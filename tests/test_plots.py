"""Plots show the numbers they are given, need no display, and say what is not installed."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

import tinygrad_mha as tg

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot is tested")
from matplotlib import font_manager  # noqa: E402 (after the check that it is there)
from matplotlib.text import Text  # noqa: E402

from tinygrad_mha.viz import fonts  # noqa: E402
from tinygrad_mha.viz.diagram import heat  # noqa: E402
from tinygrad_mha.viz.plots import attention_weights, figures, layer_predictions  # noqa: E402
from tinygrad_mha.viz.plots.training_curves import running_mean  # noqa: E402

WORDS = ["the", "cat", "sat", "on", "mats"]


def image(plot):
    (shown,) = plot.axes[0].get_images()
    return np.asarray(shown.get_array())


def texts(plot):
    return [text.get_text() for text in plot.findobj(Text) if text.get_text()]


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.fixture
def model():
    config = tg.nn.GPTConfig(vocab_size=13, block_size=7, n_layer=3, n_head=2, n_embd=10)
    return tg.nn.GPT(config)


# --------------------------------------------------------------------------------------------------------------------
# Attention


def test_a_heatmap_shows_the_weights_and_names_of_one_head(rng):
    weights = rng.dirichlet(np.ones(5), size=5)
    plot = tg.viz.heatmap(weights, WORDS)
    assert np.array_equal(image(plot), weights)
    assert labels(plot.axes[0].xaxis) == labels(plot.axes[0].yaxis) == WORDS
    assert heat.write_value(weights[3, 1]) in texts(plot)


def test_each_number_stands_in_its_cell():
    weights = np.arange(1, 13).reshape(4, 3) / 78
    plot = tg.viz.heatmap(weights)
    cells = {text.get_position(): text.get_text() for text in plot.axes[0].texts}
    assert cells == {(j, i): heat.write_value(weights[i, j]) for i in range(4) for j in range(3)}


def test_a_heatmap_has_a_panel_for_each_head_and_a_line_for_each_layer(rng):
    weights = rng.dirichlet(np.ones(7), size=(3, 2, 5))
    plot = tg.viz.heatmap(weights, WORDS, keys=list("abcdefg"))
    shown = image(plot)
    for layer, head in np.ndindex(3, 2):
        panel = shown[layer * 6 : layer * 6 + 5, head * 8 : head * 8 + 7]
        assert np.array_equal(panel, weights[layer, head])
    assert {"head 1", "head 2", "layer 1", "layer 3"} <= set(texts(plot))
    assert labels(plot.axes[0].xaxis) == list("abcdefg") * 2
    assert [frame.get_fill() for frame in plot.axes[0].patches] == [False] * 6
    assert (plot.axes[0].get_ylabel(), plot.axes[0].get_xlabel()) == ("query", "key")


def test_traces_of_an_attention_and_of_a_gpt_are_accepted(model, rng):
    mha = tg.nn.MultiHeadAttention(5, n_head=2, rng=0)
    x = rng.standard_normal((1, 5, 5)).astype(np.float32)
    _, trace = mha(x, causal=True, trace=True)
    assert np.array_equal(attention_weights.as_weights(trace)[0], trace.weights.data[0])
    _, trace = model(rng.integers(0, 13, 7), trace=True)
    stack = attention_weights.as_weights(trace)
    assert stack.shape == (3, 2, 7, 7)
    assert np.array_equal(stack[2], trace.attention[2].weights.data)


def test_one_layer_has_no_label_of_its_own(rng):
    plot = tg.viz.heatmap(rng.dirichlet(np.ones(5), size=(1, 2, 5)), WORDS)
    assert "head 2" in texts(plot)
    assert "layer 1" not in texts(plot)


def test_a_missing_chinese_font_is_one_warning_that_says_what_to_install(monkeypatch, tmp_path, rng):
    monkeypatch.setattr(fonts, "CHINESE_FONTS", "No Such Font")
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    with pytest.warns(UserWarning, match=r"no font with Chinese characters was found.*fonts-noto-cjk") as caught:
        tg.viz.heatmap(rng.random((2, 2)), ["猫", "鱼"], path=tmp_path / "x.png")
    assert len(caught) == 1
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_nan_is_black_and_gaps_are_white():
    colours = figures.make_colormap("attention")
    assert colours(np.nan) == matplotlib.colors.to_rgba(heat.INK)
    assert colours(attention_weights.GAP) == (1, 1, 1, 1)
    tg.viz.heatmap(np.full((2, 2), np.nan))


def test_text_is_dark_on_light_cells_and_white_on_dark_ones():
    assert [figures.text_color(weight) for weight in (0.0, 0.5, 0.6, 1.0, np.nan)] == [heat.INK] * 2 + ["white"] * 3


def test_labels_of_panels_stand_at_their_middle(rng):
    plot = tg.viz.heatmap(rng.dirichlet(np.ones(7), size=(3, 2, 5)))
    places = {text.get_text(): text.get_position() for text in plot.findobj(Text)}
    assert [places[f"head {n}"][0] for n in (1, 2)] == [3, 8 + 3]
    assert [places[f"layer {n}"][1] for n in (1, 2, 3)] == [2, 6 + 2, 12 + 2]


@pytest.mark.parametrize("weight", [-0.3, 1.7])
def test_weights_outside_0_and_1_have_a_diverging_colour_map_with_symmetric_limits(weight, rng):
    weights = rng.uniform(0.0, 0.7, (2, 5, 5))
    weights[1, 2, 3] = weight
    (shown,) = tg.viz.heatmap(weights).axes[0].get_images()
    most = np.abs(weights).max()
    assert shown.get_clim() == (-most, most)
    zero, negative, positive = (shown.to_rgba(x) for x in (0.0, -0.3, 0.3))
    assert negative != zero != positive != negative
    assert shown.to_rgba(np.asarray(shown.get_array())[0, 5]) == (1, 1, 1, 1)  # the gap between the panels


def test_a_probability_that_exceeds_1_by_rounding_keeps_the_scale_of_probabilities():
    (shown,) = tg.viz.heatmap(np.diag([1.0, 1.0 + 1e-7])).axes[0].get_images()
    assert shown.get_cmap().name == "attention"
    assert shown.to_rgba(1.0 + 1e-7) == shown.to_rgba(1.0) != (1, 1, 1, 1)


def test_tokens_are_not_mathtext_and_white_space_is_visible():
    plot = tg.viz.heatmap(np.eye(5), ["$x$", " ", "\n", "a\nb", "</s>"])
    assert labels(plot.axes[0].yaxis) == ["$x$", "␣", "⏎", "a⏎b", "</s>"]
    assert not any(text.get_parse_math() for text in plot.findobj(Text))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tg.viz.heatmap(np.ones(3)), r"got shape \(3,\)"),
        (lambda: tg.viz.heatmap(np.ones((0, 3))), r"got shape \(0, 3\)"),
        (lambda: tg.viz.heatmap(np.eye(3), WORDS), "tokens must be 3 names, one for each, got 5"),
        (lambda: tg.viz.heatmap(np.ones((5, 3)), WORDS, keys=["a"]), "keys must be 3 names, one for each, got 1"),
    ],
)
def test_errors_state_the_expected_and_the_given_shape(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 3, 3), (0, 3)])
def test_weights_with_too_few_or_too_many_axes_are_refused(shape):
    with pytest.raises(ValueError, match=r"weights must be \(T_q, T_k\)"):
        tg.viz.heatmap(np.ones(shape))


def test_a_batch_of_several_is_refused(rng):
    mha = tg.nn.MultiHeadAttention(5, n_head=1, rng=0)
    _, trace = mha(rng.standard_normal((2, 3, 5)), trace=True)
    with pytest.raises(ValueError, match="a batch of 2"):
        tg.viz.heatmap(trace)


# --------------------------------------------------------------------------------------------------------------------
# Training


LOG = """step,learning_rate,loss,grad_norm,validation_loss
0,1e-05,4.25,1.5,4.125
1,2e-05,3.75,1.25,
2,3e-05,3.5,1.0,3.625
3,4e-05,3.2"""


def test_losses_are_read_from_the_log_of_a_run(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    for given in (tmp_path, tmp_path / "log.csv", str(tmp_path)):
        each, mean, validation = tg.viz.plot_losses(given).axes[0].get_lines()
        assert each.get_xydata().tolist() == [[0, 4.25], [1, 3.75], [2, 3.5]]  # without the row that was cut short
        assert mean.get_label() == "training"
        assert validation.get_xydata().tolist() == [[0, 4.125], [2, 3.625]]


def test_the_log_that_training_writes_can_be_plotted(tmp_path):
    run = tg.training.train(
        "tiny", text="hello world. " * 99, steps=3, sample_interval=0, show="quiet", folder=tmp_path
    )
    for given in (run, tmp_path, run.log.rows):
        each, *_ = tg.viz.plot_losses(given).axes[0].get_lines()
        assert each.get_ydata().tolist() == [row["loss"] for row in run.log.rows if "loss" in row]


def test_several_runs_share_a_plot():
    rows = [{"step": i, "loss": 4.0 - i} for i in range(3)]
    plot = tg.viz.plot_losses({"wide": rows, "narrow": rows[:2]})
    assert {"wide, training", "narrow, training"} <= set(texts(plot))
    assert len(plot.axes[0].get_lines()) == 4


def test_one_point_has_a_marker_and_a_divergence_a_line():
    axes = tg.viz.plot_losses([{"step": 0, "loss": 4.2}]).axes[0]
    assert axes.lines[-1].get_marker() == "o"
    losses = [4.2, 3.9, float("nan"), float("nan")]
    plot = tg.viz.plot_losses([{"step": 3 * i, "loss": loss} for i, loss in enumerate(losses)])
    assert "diverged at step 6" in texts(plot)


def test_the_running_mean_averages_the_values_around(rng):
    values = rng.standard_normal(23)
    for window in (1, 2, 5):
        for i, mean in enumerate(running_mean(values, window)):
            around = values[max(0, i - window // 2) : i - window // 2 + window]
            assert mean == pytest.approx(around.mean(), abs=1e-12)


def test_other_files_than_logs_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv is not the log of a run: .* found \['a', 'b'\]"):
        tg.viz.plot_losses(path)
    path.write_text("step,loss\n0,high\n")
    with pytest.raises(ValueError, match=r"other\.csv holds something other than numbers"):
        tg.viz.plot_losses(path)
    path.write_text("step,loss\n")
    with pytest.raises(ValueError, match="no loss to plot"):
        tg.viz.plot_losses(path)
    with pytest.raises(FileNotFoundError):
        tg.viz.plot_losses(tmp_path / "missing.csv")


def test_gradient_norms_are_those_of_each_layer(model, rng):
    ids = rng.integers(0, 13, 8)
    with pytest.raises(ValueError, match=r"call loss\.backward"):
        tg.viz.plot_gradient_norms(model)
    model.loss(ids[:-1], ids[1:]).backward()
    axes = tg.viz.plot_gradient_norms(model).axes[0]
    lengths = dict(zip(labels(axes.yaxis), axes.lines[0].get_xdata(), strict=True))
    layer = model.h[1].mlp.c_fc
    expected = np.sqrt(np.square(layer.weight.grad).sum() + np.square(layer.bias.grad).sum())
    assert lengths["h.1.mlp.c_fc"] == pytest.approx(expected, rel=1e-6)
    total = np.sqrt(sum(np.square(p.grad).sum() for p in model.parameters()))
    assert np.linalg.norm(list(lengths.values())) == pytest.approx(total, rel=1e-6)


# --------------------------------------------------------------------------------------------------------------------
# The logit lens


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_last_row_of_the_lens_is_the_prediction_of_the_model(rng, norm_first):
    config = tg.nn.GPTConfig(vocab_size=13, block_size=7, n_layer=3, n_head=2, n_embd=10, norm_first=norm_first)
    model, ids = tg.nn.GPT(config), rng.integers(0, 13, 7)
    likely, probability = layer_predictions.predict_from_layers(model, ids)
    assert likely.shape == probability.shape == (4, 7)
    said = tg.ops.softmax(model(ids)).numpy()
    assert np.array_equal(likely[-1], said.argmax(axis=-1))
    np.testing.assert_allclose(probability[-1], said.max(axis=-1), rtol=1e-5)


def test_the_lens_names_tokens_and_layers(model):
    tokenizer = tg.data.CharTokenizer.of("abcdefghijkl\n")
    ids = tokenizer.encode("bad\n")
    plot = tg.viz.plot_logit_lens(model, ids[None], tokenizer)
    assert labels(plot.axes[0].yaxis) == ["embedding", "layer 1", "layer 2", "layer 3"]
    assert labels(plot.axes[0].xaxis) == ["b", "a", "d", "⏎"]
    likely, probability = layer_predictions.predict_from_layers(model, ids)
    cells = [text.get_text() for text in plot.axes[0].texts]
    assert cells == [tokenizer.decode([i]).replace("\n", "⏎") for i in likely.ravel()]
    np.testing.assert_allclose(image(plot), probability)
    with pytest.raises(ValueError, match="one sequence"):
        tg.viz.plot_logit_lens(model, [[1, 2], [3, 4]])


# --------------------------------------------------------------------------------------------------------------------
# Files, fonts, and what is not there


def test_a_plot_is_written_in_the_format_of_its_suffix_or_not_at_all(tmp_path):
    plot = tg.viz.heatmap(np.eye(3), path=tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plot._repr_png_().startswith(b"\x89PNG")
    assert plot.save(tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in plot.save(tmp_path / "c.svg").read_text()
    with pytest.raises(ValueError, match="docx"):
        plot.save(tmp_path / "d.docx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.pdf", "c.svg"]


def test_chinese_text_uses_a_font_that_covers_it(tmp_path):
    wanted = {name.strip() for name in fonts.CHINESE_FONTS.split(",")}
    installed = {font.name for font in font_manager.fontManager.ttflist}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none
        chosen = figures.choose_fonts("猫")
    if wanted.isdisjoint(installed | set(chosen)):
        pytest.skip("no font with Chinese characters is installed")
    plot = tg.viz.heatmap(np.eye(2), ["猫", "坐"])
    assert plot.axes[0].get_yticklabels()[0].get_fontfamily()[-1] in wanted
    plot.save(tmp_path / "a.png")  # a character without a glyph would be a warning, and so an error here


def test_without_fonts_on_the_system_chinese_is_drawn_with_the_font_of_the_extra(monkeypatch, tmp_path):
    pytest.importorskip("pylopdf_fonts_zh_cn", reason="only Linux has the font of the extras plot and render")
    latin = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", latin)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    tg.viz.heatmap(np.eye(2), ["猫", "坐"])
    plot = tg.viz.heatmap(np.eye(2), ["猫", "坐"])
    assert plot.axes[0].get_yticklabels()[0].get_fontfamily()[-1] == "Noto Sans SC"
    assert [font.name for font in font_manager.fontManager.ttflist].count("Noto Sans SC") == 1
    assert b"NotoSansSC" in plot.save(tmp_path / "a.pdf").read_bytes()


def test_without_a_chinese_font_a_warning_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fonts, "CHINESE_FONTS", "No Such Font")
    with pytest.warns(UserWarning, match="no font with Chinese characters was found.*pip install pylopdf-fonts-zh-cn"):
        tg.viz.heatmap(np.eye(1), ["猫"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tg.viz.heatmap(np.eye(1), ["cat ␣ é 🐈"])


IMPORTS = """
import sys, numpy as np, tinygrad_mha as tg
assert "matplotlib" not in sys.modules, "it takes long to import"
tg.viz.heatmap(np.eye(2))._repr_png_()
assert "matplotlib.pyplot" not in sys.modules, "it has a state, and may want a display"
"""

MISSING = """
import sys, numpy as np, tinygrad_mha as tg
sys.modules["matplotlib"] = None
try:
    tg.viz.heatmap(np.eye(2))
except ImportError as error:
    assert 'pip install "tinygrad_mha[plot]"' in str(error), error
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize("script", [IMPORTS, MISSING], ids=["no pyplot, and no matplotlib before a plot", "missing"])
def test_only_plots_import_matplotlib(script):
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


def test_other_names_are_not_plots():
    with pytest.raises(AttributeError, match="heatmaps"):
        _ = tg.viz.heatmaps
    assert {"heatmap", "plot_losses", "walkthrough", "graph"} <= set(dir(tg.viz))


def test_many_heads_of_one_layer_are_in_several_lines_with_a_title_and_names_each(rng):
    weights = rng.dirichlet(np.ones(7), size=(11, 7))
    plot = tg.viz.heatmap(weights, list("abcdefg"))
    (axes, _) = plot.axes
    assert {f"head {i}" for i in range(1, 12)} <= set(texts(plot))
    corners = sorted((round(p.get_y() + 0.5), round(p.get_x() + 0.5)) for p in axes.patches)
    shown = image(plot)
    for head, (row, column) in enumerate(corners):
        assert np.array_equal(shown[row : row + 7, column : column + 7], weights[head])
    lines = len({row for row, _ in corners})
    assert lines > 1
    assert labels(axes.yaxis) == list("abcdefg") * lines


def test_names_that_do_not_fit_are_left_out_with_a_warning(rng):
    with pytest.warns(UserWarning, match=r"the names of 9 tokens do not fit at 12 panels .* plot fewer tokens"):
        plot = tg.viz.heatmap(rng.dirichlet(np.ones(9), size=(12, 12, 9)), list("abcdefghi"))
    assert labels(plot.axes[0].xaxis) == []


@pytest.mark.parametrize(("heads", "n"), [(2, 3), (3, 11), (1, 23), (13, 5)])
def test_all_texts_of_a_heatmap_are_inside_of_the_plot(rng, heads, n):
    plot = tg.viz.heatmap(rng.dirichlet(np.ones(n), size=(heads, n)), [f"a long word {i}" for i in range(n)])
    plot.draw_without_rendering()
    for text in plot.findobj(Text):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= -1, text
            assert max(box.x1 - plot.bbox.x1, box.y1 - plot.bbox.y1) <= 1, text
