"""Every primitive has samples, facts and rules that pass the gradient check, and equals its composition."""

from __future__ import annotations

import numpy as np
import pytest

from tinygrad_mha import Tensor, gradcheck, ops
from tinygrad_mha.cli import check_primitive, main
from tinygrad_mha.primitives import KINDS

pytestmark = pytest.mark.usefixtures("kind")  # both kinds of kernels

OWN = [op for op in ops.REGISTRY.values() if op.forward.__module__.startswith("tinygrad_mha.")]
FUSED = [op for op in OWN if op.composition is not None]


def samples(op):
    assert op.samples is not None, f"primitive {op.name} has no samples: give it some in check/samples.py"
    found = op.samples(np.random.default_rng(0))
    assert found, f"primitive {op.name} has an empty list of samples"
    return found


def tensors(inputs, dtype=np.float64):
    return [
        Tensor(x, requires_grad=True, dtype=dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for x in inputs
    ]


@pytest.mark.parametrize("op", OWN, ids=lambda op: op.name)
def test_every_primitive_passes_the_check_to_second_order(op):
    samples(op)
    for report in check_primitive(op, order=2, seed=0):
        assert report.ok, str(report)
        assert any(e.checked and e.order == 2 for e in report.entries) or not any(e.checked for e in report.entries)


@pytest.mark.parametrize("op", OWN, ids=lambda op: op.name)
def test_every_array_argument_has_a_rule_or_takes_no_floats(op):
    for inputs, keywords in samples(op):
        xs = tensors(inputs)
        y = op(*xs, **keywords)
        y.backward(np.ones(y.shape))
        for x in xs:
            assert not isinstance(x, Tensor) or x.grad is not None


@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.name)
def test_fused_primitives_equal_their_composition_in_value_and_gradient(op, rng):
    for inputs, keywords in samples(op):
        fused, composed = tensors(inputs), tensors(inputs)
        y, z = op(*fused, **keywords), op.composition(*composed, **{**op.defaults, **keywords})
        np.testing.assert_allclose(y.numpy(), z.numpy(), rtol=1e-12, atol=1e-13)
        g = rng.standard_normal(y.shape)
        y.backward(g)
        z.backward(g)
        for a, b in zip(fused, composed, strict=True):
            if isinstance(a, Tensor):
                np.testing.assert_allclose(a.grad, b.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", OWN, ids=lambda op: op.name)
def test_arrays_in_arrays_out(op):
    for inputs, keywords in samples(op):
        y = op(*inputs, **keywords)
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, op(*tensors(inputs), **keywords).numpy())


@pytest.mark.parametrize("op", [op for op in OWN if op.name != "cast"], ids=lambda op: op.name)
def test_float32_stays_float32_in_value_and_gradients(op):
    for inputs, keywords in samples(op):
        xs = tensors(inputs, np.float32)
        y = op(*xs, **keywords)
        assert y.dtype == np.float32
        y.backward(np.ones(y.shape))
        assert all(x.grad.dtype == np.float32 for x in xs if isinstance(x, Tensor))


@pytest.mark.parametrize("op", [op for op in OWN if op.name != "cast"], ids=lambda op: op.name)
def test_values_and_gradients_in_float32_equal_those_in_float64(op, rng):
    for inputs, keywords in samples(op):
        single = tensors(inputs, np.float32)
        double = [Tensor(x.data, requires_grad=True, dtype=np.float64) if isinstance(x, Tensor) else x for x in single]
        y, z = op(*single, **keywords), op(*double, **keywords)
        np.testing.assert_allclose(y.data, z.data, rtol=1e-5, atol=1e-5)
        g = rng.standard_normal(y.shape).astype(np.float32)
        y.backward(g)
        z.backward(g.astype(np.float64))
        for a, b in zip(single, double, strict=True):
            if isinstance(a, Tensor):
                np.testing.assert_allclose(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OWN, ids=lambda op: op.name)
def test_every_primitive_has_a_docstring(op):
    assert op.__doc__


@pytest.mark.parametrize("op", OWN, ids=lambda op: op.name)
def test_every_primitive_states_its_kind_and_the_roles_of_its_arguments(op):
    assert op.kind in set(KINDS) - {"function"}
    assert len(op.roles) == len(op.arguments)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"kind": "sum"}, "kind must be one of function, elementwise"),
        ({"roles": ("data", "data")}, r"roles must hold one of .* for each of \('x',\)"),
        ({"roles": ("weights",)}, "roles must hold one of"),
    ],
)
def test_facts_that_do_not_fit_are_refused(own_primitives, facts, message):
    with pytest.raises(ValueError, match=message):
        ops.primitive(**facts)(lambda_named("mine", lambda x: 2 * x))
    assert "mine" not in own_primitives


def test_the_command_line_checks_all_of_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["gradcheck", "--order", "1"]) == 0
    out = capsys.readouterr().out
    for op in OWN:
        assert f"\n{op.name} " in "\n" + out
    assert "FAILED" not in out
    assert max(map(len, out.splitlines())) <= 50


def test_a_primitive_without_samples_fails_on_the_command_line(own_primitives, capsys):
    ops.primitive(lambda_named("unchecked", lambda x: x * 2)).vjps(lambda g, y, x: 2 * g)
    assert main(["gradcheck", "--order", "1"]) == 1
    assert "unchecked            FAILED no samples" in capsys.readouterr().out


def test_the_command_line_checks_a_function_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "import tinygrad_mha as tg\n"
        "def good(x, w): return (x @ w).tanh()\n"
        "def vacuous(x=np.ones((2, 3))): return x.softmax().sum()\n"
        "@tg.ops.primitive\n"
        "def my_square(x): return x * x\n"
        "my_square.vjps(lambda g, y, x: 2.01 * g * x)\n"
    )
    try:
        assert main(["gradcheck", f"{file}:good", "--shape", "2x3", "3x5"]) == 0
        assert "gradcheck of good: ok" in capsys.readouterr().out
        assert main(["gradcheck", f"{file}:vacuous"]) == 1
        assert "could not fail" in capsys.readouterr().out
        assert main(["gradcheck", f"{file}:my_square", "--shape", "2x3"]) == 1
        assert "my_square: FAILED" in capsys.readouterr().out
        assert main(["gradcheck", f"{file}:good"]) == 2
        assert "needs inputs" in capsys.readouterr().err
        assert main(["gradcheck", f"{file}:nothing"]) == 2
        assert "it defines good, vacuous" in capsys.readouterr().err
        assert main(["gradcheck", f"{tmp_path}/missing.py:f"]) == 2
        assert "no such file" in capsys.readouterr().err
        assert main(["gradcheck", f"{file}:good", "--shape", "2xx", "a"]) == 2
        assert "is not a shape" in capsys.readouterr().err
    finally:
        ops.REGISTRY.pop("my_square", None)


def test_a_primitive_of_ones_own_is_checked_by_the_same_call(own_primitives, rng):
    @ops.primitive
    def swish(x):
        return x / (1 + np.exp(-x))

    swish.vjps(lambda g, y, x: g * (ops.sigmoid(x) * (1 + x * (1 - ops.sigmoid(x)))))
    assert gradcheck(swish, rng.standard_normal((2, 3)), order=2).ok


def lambda_named(name, f):
    f.__name__ = name
    return f
