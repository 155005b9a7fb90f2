"""`check.dependencies` finds the rows that each output row depends on."""

import json
import signal
import sys

import numpy as np
import pytest

from tinygrad_mha import check, nn, ops
from tinygrad_mha.files import python_files
from tinygrad_mha.tensors import Tensor

RNG = np.random.default_rng(0)
T, C = 7, 3
X = RNG.standard_normal((T, C))
OUT, IN = np.indices((T, T))
CAUSAL = OUT >= IN


def attend(allow):
    return lambda x: ops.softmax(ops.where(allow, x @ x.swapaxes(-1, -2), -np.inf), axis=-1) @ x


@pytest.mark.parametrize(
    "allow",
    [CAUSAL, CAUSAL & (OUT - IN < 3), OUT // 3 == IN // 3, OUT >= -1, OUT >= IN - 1],
    ids=["causal", "window", "block", "full", "off"],
)
@pytest.mark.parametrize("shape", [(), (2,)], ids=["one", "batch"])
def test_the_matrix_is_the_mask_of_an_attention(allow, shape):
    x = RNG.standard_normal((*shape, T, C))
    found = check.dependencies(attend(allow), x)
    np.testing.assert_array_equal(found.matrix, allow | (OUT == IN))
    assert not found.below_rounding.any()


def test_strictly_lower_and_permuted_rows():
    lower = np.where(OUT > IN, 1.0, 0.0)
    np.testing.assert_array_equal(check.dependencies(lambda x: lower @ x, X).matrix, OUT > IN)
    order = RNG.permutation(T)
    np.testing.assert_array_equal(check.dependencies(lambda x: x[order], X).matrix, np.eye(T, dtype=bool)[order])


def make_gpt():
    return nn.GPT(nn.GPTConfig(vocab_size=11, block_size=T, n_layer=2, n_head=2, n_embd=8, dropout=0.1), seed=0)


def test_a_gpt_is_causal_and_left_as_it_was():
    model = make_gpt()
    found = check.dependencies(model, RNG.integers(0, 11, T))
    np.testing.assert_array_equal(found.matrix, CAUSAL)
    found.assert_causal()
    assert model.training
    assert model.wte.weight.dtype == np.float32
    assert "forward" not in vars(model.wte)


def test_a_leak_in_a_layer_is_named_with_its_path():
    model = make_gpt()

    class Leaky(nn.Module):
        def __init__(self, inner):
            self.inner = inner

        def forward(self, x, **options):
            return self.inner(x, **options) + 0.1 * x.mean(axis=-2, keepdims=True)

    model.h[0].attn = Leaky(model.h[0].attn)
    found = check.dependencies(model, RNG.integers(0, 11, T))
    assert found.matrix.all()
    assert "the first to mix rows is mean over axis -2 in h.0.attn;" in found.paths[0, 1]
    assert found.paths[0, 1].endswith(" return self.inner(x, **options) + 0.1 * x.mean(axis=-2, keepdims=True)")
    with pytest.raises(check.CheckError, match="output row 0 depends on input row 1"):
        found.assert_causal()


def test_a_leak_of_relative_size_1e_12_is_found_and_one_below_rounding_is_told_apart():
    assert (0, T - 1) in check.dependencies(lambda x: x + 1e-12 * x[::-1], X).leaks
    found = check.dependencies(lambda x: x.tanh() + 1e-17 * x[::-1].tanh(), X)
    assert not found.leaks
    assert found.below_rounding[0, T - 1]
    assert "~" in str(found)


def test_a_sum_that_cancels_up_to_rounding_is_no_dependence():
    def cancel(x):
        mean = x.mean(axis=-2, keepdims=True)
        return (x + mean) - mean

    found = check.dependencies(cancel, X)
    np.testing.assert_array_equal(found.matrix, np.eye(T, dtype=bool))
    assert found.below_rounding.any()


def test_a_detached_leak_is_seen_by_finite_changes_only():
    found = check.dependencies(lambda x: x + x.detach().mean(axis=-2, keepdims=True), X)
    assert found.matrix.all()
    assert "only finite changes see" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["matrix"] == found.matrix.tolist()


def test_a_notebook_shows_a_dependence_in_blue_and_a_leak_in_red():
    html = check.dependencies(lambda x: x + 0.1 * np.eye(T, k=2) @ x, X)._repr_html_()
    assert html.count("background:#048") == T
    assert html.count("background:#c00") == T - 2
    assert html.count("background:#eee") == T * T - T - (T - 2)


def test_a_path_through_numpy_is_named_as_such():
    found = check.dependencies(lambda x: x + x.numpy().mean(axis=-2, keepdims=True), X)
    assert "a constant carries it" in found.paths[0, 1]
    found = check.dependencies(lambda x: x * float(x.numpy()[-1, 0]), X)
    assert "a constant carries it (.numpy()?) into scale" in found.paths[0, T - 1]


def test_a_normalization_over_time_leaks_through_its_mean_and_variance():
    def normalize(x):
        centered = x - x.mean(axis=-2, keepdims=True)
        return centered / (centered.var(axis=-2, keepdims=True) + 1e-5) ** 0.5

    found = check.dependencies(normalize, X)
    assert found.matrix.all()
    assert "mean over axis -2" in found.paths[0, 1]


def test_the_matrix_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    plot = check.dependencies(attend(CAUSAL), X).heatmap(tmp_path / "rows.png")
    (image,) = plot.axes[0].get_images()
    np.testing.assert_array_equal(image.get_array(), CAUSAL)
    assert (tmp_path / "rows.png").exists()


def test_a_mask_off_by_one_leaks_through_the_scores():
    path = check.dependencies(attend(IN <= OUT + 1), X).paths[0, 1]
    assert path.startswith("the first to mix rows is matmul;")
    assert "softmax over axis -1 -> matmul; line: " in path


@pytest.mark.parametrize(
    ("f", "x", "error", "message"),
    [
        (lambda x: (x, x), X, TypeError, "tuple"),
        (lambda x: x + np.random.default_rng().standard_normal(x.shape), X, ValueError, "different values"),
        (lambda x: x * np.nan, X, ValueError, "nan"),
        (lambda x: x.sum(), X, ValueError, "rows"),
        (lambda x: 1.0, X, TypeError, "floating tensor"),
        (lambda x: x, X[0], ValueError, "T, C"),
        (lambda x: Tensor(X), np.arange(3), TypeError, "Embedding"),
    ],
)
def test_what_cannot_be_measured_is_an_error(f, x, error, message):
    with pytest.raises(error, match=message):
        check.dependencies(f, x)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the time limit needs the alarm signal")
def test_a_function_that_does_not_return_is_stopped(monkeypatch):
    monkeypatch.setattr(python_files, "SECONDS", 0.2)

    def endless(x):
        while True:
            pass

    with pytest.raises(RuntimeError, match="did not return within"):
        check.dependencies(endless, X)


def test_a_function_that_exits_is_an_error():
    with pytest.raises(RuntimeError, match="calls sys"):
        check.dependencies(lambda x: sys.exit(3), X)
