"""A graph shows each tensor once, with its name, its formula, its values and its gradient."""

import ast
import copy
import gc
import json
import os
import re
import subprocess
import sys
import types
import weakref
from dataclasses import astuple
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_mha as tg
from tinygrad_mha import engine, modes, nn, ops
from tinygrad_mha.check import samples  # noqa: F401  # gives primitives their samples
from tinygrad_mha.primitives import KINDS
from tinygrad_mha.viz import GraphTooLargeError
from tinygrad_mha.viz.diagram import dot, heat
from tinygrad_mha.viz.diagram.closing import close_frames
from tinygrad_mha.viz.diagram.mermaid import to_mermaid
from tinygrad_mha.viz.diagram.picture import Cluster, Node, Picture, Table


def two_heads(seed=0, heads=2, causal=True):
    """The attention of the paper in prime dimensions, written out: X 3x5, heads of 7 and 11, Y 3x5."""
    rng = np.random.default_rng(seed)

    def parameter(n, m, name):
        return tg.Tensor(rng.normal(size=(n, m)), requires_grad=True, name=name)

    X = tg.Tensor(rng.normal(size=(3, 5)), requires_grad=True, name="X")
    H = []
    for i in range(1, heads + 1):
        with modes.scope(nn.Scope(f"head {i}", is_attention=True)):
            Q = (X @ parameter(5, 7, f"W_Q{i}")).named(f"Q_{i}")
            K = (X @ parameter(5, 7, f"W_K{i}")).named(f"K_{i}")
            V = (X @ parameter(5, 11, f"W_V{i}")).named(f"V_{i}")
            scores = (Q @ K.T / np.sqrt(7)).named(f"scores_{i}")
            S = ops.softmax(ops.mask(scores, nn.causal(3)) if causal else scores).named(f"S_{i}")
            H.append((S @ V).named(f"H_{i}"))
    concat = ops.concat(H, axis=-1).named("Concat")
    return (concat @ parameter(11 * heads, 5, "W_O")).named("Y")


def swept(y, seed=1):
    y.backward(np.random.default_rng(seed).normal(size=y.shape))
    return y


def gpt(**options):
    config = {"vocab_size": 13, "block_size": 7, "n_layer": 4, "n_head": 2, "n_embd": 6} | options
    return nn.GPT(nn.GPTConfig(**config)).eval()


IDS = np.array([[3, 1, 4, 1, 5]])


def boxes(graph):
    """The boxes by title. Fails if a title occurs twice."""
    found = {}
    for node in graph.picture.nodes:
        assert node.title not in found, node.title
        found[node.title] = node
    return found


def titles(graph):
    return [node.title for node in graph.picture.nodes]


def arrows(graph):
    """Pairs of titles, in order."""
    title = {node.id: node.title for node in graph.picture.nodes}
    return [(title[edge.source], title[edge.target]) for edge in graph.picture.edges]


def frame_of(graph, title):
    """The titles of the frames around a box, inner ones first."""
    clusters = {cluster.id: cluster for cluster in graph.picture.clusters}
    cluster, path = next(node.cluster for node in graph.picture.nodes if node.title == title), []
    while cluster is not None:
        path.append(clusters[cluster].title)
        cluster = clusters[cluster].parent
    return path


# --------------------------------------------------------------------------------------------------------------------
# Contents of a box


def test_every_tensor_of_two_heads_is_one_box_with_its_name_and_shape():
    shown = {node.title: node.shape for node in tg.graph(two_heads()).picture.nodes}
    expected = {"X": "3×5", "Concat": "3×22", "W_O": "22×5", "Y": "3×5"}
    for i in (1, 2):
        expected |= {f"W_Q{i}": "5×7", f"W_K{i}": "5×7", f"W_V{i}": "5×11", f"Q_{i}": "3×7", f"K_{i}": "3×7"}
        expected |= {f"V_{i}": "3×11", f"scores_{i}": "3×3", f"S_{i}": "3×3", f"H_{i}": "3×11"}
    assert shown == expected


@pytest.mark.parametrize(
    ("title", "formula"),
    [
        ("Q_1", "X @ W_Q1"),
        ("scores_1", "scaled: Q_1 @ K_1ᵀ / √7"),
        ("S_1", "attention: softmax over each row, causal mask"),
        ("H_2", "S_2 @ V_2"),
        ("Concat", "[H_1 | H_2]"),
        ("Y", "output: Concat @ W_O"),
        ("W_O", "parameter"),
        ("X", "input"),
    ],
)
def test_a_formula_is_written_as_in_the_paper(title, formula):
    assert " ".join(boxes(tg.graph(two_heads()))[title].lines) == formula


def test_brackets_appear_only_where_they_are_needed():
    a, b, c = (tg.Tensor(np.ones((2, 2)), requires_grad=True, name=name) for name in "abc")
    for y, formula in (
        ((a + b) * 2, "2 · (a + b)"),
        ((a * b) * 2, "2 · (a * b)"),
        ((a @ b).T / 3, "bᵀ @ aᵀ / 3"),
        (-(a - b), "−(a − b)"),
        (a - (b + 1), "a − (b + 1)"),
        (a - (b - 1), "a − (b − 1)"),
        (a / (b + 1), "a / (b + 1)"),
        (a / (b * 0.3), "a / (0.3 · b)"),
        ((a + 1) ** 2 - b, "(a + 1)² − b"),
        (ops.sqrt(ops.sum(a, axis=-1) + 1), "√(row sum(a) + 1)"),
        (a[0, 1:] * c, "a[0, 1:] * c"),
        ((a * 0.25) @ c, "a / 4 @ c"),
        (a * 6**0.5, "√6 · a"),
        (a @ c * 0.25, "scaled: a @ c / 4"),
        (a @ c * 11**-0.5, "scaled: a @ c / √11"),
        (a * 990001**0.5, "√990001 · a"),
        (a * 1210001**0.5, "1100 · a"),
        (a @ c * 0.3, "0.3 · (a @ c)"),
        ((a @ b @ c) * 0.1, "0.1 · (matmul @ c)"),
    ):
        assert " ".join(boxes(tg.graph(y))["output"].lines).removeprefix("output: ") == formula


def test_leading_axes_that_are_whole_are_written_as_an_ellipsis():
    x = tg.Tensor(np.ones((2, 3, 5)), requires_grad=True, name="x")
    for y, formula in [(x[:, :, 1], "x[…, 1]"), (x[:, :, 1:], "x[…, 1:]"), (x[:, 1], "x[:, 1]"), (x[0], "x[0]")]:
        assert boxes(tg.graph(y))["output"].lines == [f"output: {formula}"]


def test_constants_are_part_of_formulas_and_never_boxes():
    x = tg.Tensor(np.ones((3, 5)), requires_grad=True, name="x")
    y = ops.where(np.ones((3, 5), bool), (x * 2 + 1) * np.full((3, 5), 3.0), 0.0)
    assert titles(tg.graph(y)) == ["x", "output"]


def test_plain_arrays_of_data_are_boxes():
    model = gpt()
    logits = model(IDS)
    loss = ops.cross_entropy(np.ones((3, 5)) @ logits[0, :, :5], np.array([1, 2, 3]))
    shown = {node.title: node for node in tg.graph(loss).picture.nodes}
    assert shown["ids"].shape == "1×5"
    assert shown["targets"].shape == "3"
    assert shown["input"].shape == "3×5"
    assert "0…4" in " ".join(shown["wpe"].lines)  # consecutive positions are written in the formula


def test_a_leaf_that_is_given_to_a_module_is_an_input():
    mha = nn.MultiHeadAttention(5, 1, rng=0)
    given = tg.Tensor(np.ones((3, 5), dtype=np.float32), requires_grad=True)
    graph = tg.graph(mha(given))
    assert boxes(graph)["input"].kind == "input"
    assert frame_of(graph, "W_Q") == ["MultiHeadAttention"]


@pytest.mark.parametrize("draw", [lambda y: y, lambda y: y + 1, lambda y: {"y": y, "z": y.exp()}])
def test_an_input_stands_in_the_outermost_module_that_uses_it_whatever_else_is_drawn(draw):
    mha = nn.MultiHeadAttention(5, 2, rng=0)
    y = mha.per_head(tg.Tensor(np.ones((3, 5)), requires_grad=True, name="X"))
    graph = tg.graph(draw(y))
    assert frame_of(graph, "X") == ["MultiHeadAttention"]
    assert frame_of(graph, "W_Q2") == ["head 2", "MultiHeadAttention"]


def test_an_input_of_two_modules_stands_outside_of_both():
    first, second = (nn.FeedForward(5, 7, rng=i) for i in range(2))
    x = tg.Tensor(np.ones((3, 5)), name="x")
    assert frame_of(tg.graph(first(x) * second(x)), "x") == []


def test_blocks_that_share_one_table_of_positions_are_drawn_once():
    graph = tg.graph(gpt(n_layer=3, position="relative")(IDS), depth=2)
    assert "h.0…2  ×3" in [cluster.title for cluster in graph.picture.clusters]


@pytest.mark.parametrize("position", ["sinusoidal", "alibi"])
def test_positions_that_are_added_have_a_name(position):
    texts = " ".join(
        " ".join([node.title, *node.lines]) for node in tg.graph(gpt(position=position)(IDS)).picture.nodes
    )
    assert ("alibi" if position == "alibi" else "positions") in texts
    assert "constant" not in texts


def test_the_formula_of_a_fused_attention_names_its_heads():
    node = next(n for n in tg.graph(gpt(n_layer=1)(IDS), depth=None).picture.nodes if n.title == "attention")
    assert " ".join(node.lines).startswith("attention in 2 heads, causal mask: softmax(")


def test_input_parameter_attention_and_output_are_named_in_words_too():
    shown = boxes(tg.graph(two_heads()))
    for title, word in (("X", "input"), ("W_V2", "parameter"), ("S_1", "attention"), ("Y", "output")):
        assert shown[title].kind == word
        assert shown[title].lines[0].startswith(word)


def test_a_softmax_is_attention_only_where_a_module_or_primitive_says_so():
    x = tg.Tensor(np.ones((3, 3)), requires_grad=True, name="x")
    plain = boxes(tg.graph(ops.softmax(x).named("S") @ x))["S"]
    assert (plain.kind, plain.value.palette) == ("op", "value")

    class Mixer(nn.Module):
        is_attention = True

        def forward(self, x):
            return ops.softmax(x).named("S") @ x

    marked = boxes(tg.graph(Mixer()(x)))["S"]
    assert (marked.kind, marked.value.palette) == ("attention", "attention")
    fused = boxes(tg.graph(ops.attention(x, x, x), expand="attention"))["weights"]
    assert (fused.kind, fused.value.palette) == ("attention", "attention")


def test_queries_keys_and_values_of_a_function_are_inputs():
    rng = np.random.default_rng(0)
    q, k, v = (tg.Tensor(rng.standard_normal((3, 5)), requires_grad=True, name=name) for name in "qkv")
    scores = ops.where(np.tri(3, dtype=bool), q @ k.mT / 5**0.5, -np.inf)
    assert {kinds(tg.graph(scores.softmax() @ v))[name] for name in "qkv"} == {"input"}
    assert kinds(tg.graph((q @ k.mT).softmax()))["k"] == "parameter"  # the output layer of a classifier


def test_queries_keys_and_values_are_inputs_also_of_distances_and_of_a_softmax_written_out():
    rng = np.random.default_rng(0)
    q, k, v = (tg.Tensor(rng.standard_normal((3, 5)), requires_grad=True, name=name) for name in "qkv")
    distances = ((q[:, None] - k) ** 2).sum(axis=-1)
    for scores in (-distances / 2, q @ k.mT / 5**0.5):
        e = scores.exp()
        assert {kinds(tg.graph(e / e.sum(axis=-1, keepdims=True) @ v))[name] for name in "qkv"} == {"input"}
        assert kinds(tg.graph(e @ v))["v"] == "parameter"  # rows that do not sum to 1 are no weights
    gain, w = tg.Tensor(rng.standard_normal(5), requires_grad=True, name="gain"), tg.Tensor(np.eye(5), True, name="w")
    x = q - q.mean(axis=-1, keepdims=True)
    layer_norm = kinds(tg.graph(x / (x * x).mean(axis=-1, keepdims=True).sqrt() * gain @ w))
    assert (layer_norm["q"], layer_norm["gain"], layer_norm["w"]) == ("input", "parameter", "parameter")


def test_slices_of_a_parameter_are_drawn_as_the_matrices_of_the_heads():
    shown = boxes(tg.graph(swept(nn.MultiHeadAttention(5, 2, d_k=7, d_v=11, rng=0).per_head(np.ones((3, 5))))))
    assert {"W_Q1", "W_Q2", "W_K1", "W_K2", "W_V1", "W_V2"} < set(shown)
    assert "W_Q" not in shown
    assert shown["W_Q2"].kind == "parameter"
    assert shown["W_Q2"].lines == ["parameter", "W_Q[:, 7:14]"]


def test_unnamed_tensors_are_named_after_their_operation_and_numbered():
    x = tg.Tensor(np.ones((3, 5)), requires_grad=True)
    w = tg.Tensor(np.ones((5, 5)), requires_grad=True)
    y = ((x @ w).relu() @ w).relu()
    assert titles(tg.graph(y)) == ["input", "weight", "matmul_1", "relu", "matmul_2", "output"]


# --------------------------------------------------------------------------------------------------------------------
# Facts decide, not names and numbers


def copy_primitive(op, name):
    """The same primitive under another name: the same function, facts, rules and composition."""
    function = types.FunctionType(op.forward.__code__, op.forward.__globals__, name, None, op.forward.__closure__)
    function.__defaults__, function.__kwdefaults__ = op.forward.__defaults__, op.forward.__kwdefaults__
    function.__module__ = __name__
    facts = {key: getattr(op, key) for key in ("arrange", "kind", "roles", "label", "formula", "sentence")}
    copy = ops.primitive(**facts)(function)
    for key in ("rules", "without_rule", "each_rule", "joint_rule", "composition"):
        setattr(copy, key, getattr(op, key))
    return copy


def other_name(name):
    return name[:-1].upper() + "X"


def describe_picture(graph, names=()):
    """All of a picture as text, with the names of copied primitives put back."""
    parts = [*graph.picture.nodes, *graph.picture.edges, *graph.picture.clusters]
    text = "\n".join(repr(astuple(part)) for part in parts)
    for name in names:
        text = text.replace(other_name(name), name)
    return text


@pytest.mark.parametrize("op", ops.REGISTRY.values(), ids=lambda op: op.name)
def test_a_copy_of_a_primitive_under_another_name_is_drawn_the_same(op, own_primitives, rng):
    copy = copy_primitive(op, other_name(op.name))  # as long as the name, so that lines break at the same words
    names = ("mul", "add", "sigmoid", "sqrt", "stack", "sum")
    mul, add, sigmoid, sqrt, stack, total = (copy_primitive(getattr(ops, name), f"around_{name}") for name in names)
    for inputs, keywords in op.samples(rng)[:3]:
        tensors = [
            tg.Tensor(x, requires_grad=True)
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and (op.joint_rule or op.rule(i))
            else x
            for i, x in enumerate(inputs)
        ]
        losses = []
        for primitive in (op, copy):
            y = primitive(*tensors, **keywords)
            users = [y, mul(y, 2), sigmoid(y), sqrt(add(mul(y, y), 1)), add(y, sigmoid(y))]
            losses.append(total(mul(stack(*users), np.arange(1.0, 6).reshape(5, *[1] * y.ndim))))
        for options in ({}, {"backward": True}, {"fold": False}, {"ops": "separate"}):
            ours, theirs = (tg.graph(loss, **options) for loss in losses)
            assert describe_picture(ours) == describe_picture(theirs, [op.name])


def test_no_file_that_draws_graphs_names_a_primitive():
    folder = Path(tg.__file__).parent / "viz" / "diagram"
    for file in folder.glob("*.py"):
        words = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        assert not words & (set(ops.REGISTRY) - set(KINDS)), file.name


def test_copies_in_a_network_are_drawn_as_the_network(own_primitives, monkeypatch):
    def draw():
        model = gpt(n_layer=3)
        y = two_heads()
        loss = model.loss(IDS, IDS) + (y * ops.gelu(y)).sum()
        graphs = [tg.graph(loss), tg.graph(loss, depth=2), tg.graph(loss, backward=True)]
        return [describe_picture(graph, names) for graph in graphs]

    names = ("softmax", "gelu", "mul", "add", "layer_norm", "linear", "take", "mask", "cross_entropy")
    names += ("attention", "self_attention", "multi_head_attention")
    before = draw()
    for name in names:
        copy = copy_primitive(getattr(ops, name), other_name(name))
        for module in [module for key, module in sys.modules.items() if key.startswith("tinygrad_mha")]:
            for key, value in list(vars(module).items()):
                if value is own_primitives[name]:
                    monkeypatch.setattr(module, key, copy)
    assert draw() == before
    nodes = engine.toposort([gpt().loss(IDS, IDS)])
    assert "SELF_ATTENTIOX" in {tensor.node.op.name for tensor in nodes if tensor.node}


def test_a_primitive_without_facts_is_drawn_as_a_call(own_primitives):
    @ops.primitive
    def blend(x, w, *, amount=0.5, sharp=True):
        return x + amount * w

    blend.vjps(lambda g, y, x, w, amount, sharp: g, lambda g, y, x, w, amount, sharp: g * amount)
    x, w = (tg.Tensor(np.ones((2, 3)), requires_grad=True, name=name) for name in "xw")
    graph = tg.graph(ops.tanh(blend(x, w, amount=0.25)) * 2)
    assert titles(graph) == ["x", "w", "blend", "tanh", "output"]
    assert boxes(graph)["blend"].lines == ["blend(x, w, amount=0.25)"]
    assert boxes(tg.graph(blend(x, np.ones((2, 3)))))["output"].lines == ["output: blend(x,", "constant 2×3)"]


def kinds(graph):
    return {node.title: node.kind for node in graph.picture.nodes}


def test_the_first_letter_of_a_name_decides_nothing():
    for names in (("batch", "x_scale", "X", "words"), ("W", "input", "w", "b")):
        batch, scale, weight, words = (tg.Tensor(np.ones((3, 3)), requires_grad=True, name=name) for name in names)
        shown = kinds(tg.graph((batch @ weight * scale).named("y") + ops.softmax(words).named("s")))
        assert [shown[name] for name in names] == ["input", "parameter", "parameter", "input"]


def test_a_leaf_is_a_parameter_by_its_role():
    def kind(make, requires_grad=True):
        leaf = tg.Tensor(np.ones((3, 3)), requires_grad=requires_grad, name="leaf")
        with tg.record():
            return kinds(tg.graph(make(leaf)))["leaf"]

    data = np.ones((3, 3))
    other = tg.Tensor(np.ones((3, 3)), requires_grad=True, name="other")
    inputs = [
        lambda x: x @ data,
        lambda x: x @ other + x,
        lambda x: x @ x.T,
        lambda x: ops.linear(x, other),
        lambda x: ops.layer_norm(x, other[0], other[1]),
        lambda x: ops.attention(x, other, x),
        lambda x: ops.exp(x) * x,
        lambda x: x * x,
        lambda x: x * 2 + 1,
        lambda x: x.sum(axis=0),
    ]
    parameters = [
        lambda w: data @ w,
        lambda w: data @ w.T,
        lambda w: ops.linear(data, w),
        lambda w: ops.linear(data, data, w[0]),
        lambda w: ops.take(w, np.array([2, 0])),
        lambda w: ops.layer_norm(other, w[0]),
        lambda w: ops.exp(other) * w,
        lambda w: other @ w + (w * w).sum(),
    ]
    assert [kind(make) for make in inputs] == ["input"] * len(inputs)
    assert [kind(make) for make in parameters] == ["parameter"] * len(parameters)
    assert [kind(make, requires_grad=False) for make in parameters] == ["input"] * len(parameters)


def test_what_a_module_owns_is_a_parameter_however_it_is_used_and_if_it_is_frozen():
    class Gate(nn.Module):
        def __init__(self):
            self.x = tg.Tensor(np.ones((3, 3)), requires_grad=True)
            self.table = tg.Tensor(np.ones((3, 3)))

        def forward(self, given):
            return ops.exp(self.x @ self.table) * given

    gate, given = Gate(), tg.Tensor(np.ones((3, 3)), requires_grad=True, name="W")
    assert kinds(tg.graph(gate(given))) | {"exp": ""} == {
        "x": "parameter",
        "table": "parameter",
        "W": "input",
        "exp": "",
        "output": "output",
    }


def test_a_product_with_a_constant_is_no_dropout():
    x = tg.Tensor(np.ones((3, 5)), requires_grad=True, name="x")
    assert boxes(tg.graph(x * np.full((3, 5), 3.0)))["output"].lines == ["output: x * constant 3×5"]
    dropout = nn.Dropout(0.5, rng=0)
    assert boxes(tg.graph((dropout(x) @ np.ones((5, 2))).named("y")))["dropout"].lines == ["dropout(x)"]


def test_a_dropout_is_one_step_whose_formula_has_no_mask():
    x, dropout = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x"), nn.Dropout(0.5, rng=0)
    graph = tg.graph(dropout(x) @ np.ones((3, 5)))
    assert [(node.title, " ".join(node.lines)) for node in graph.picture.nodes] == [
        ("x", "input"),
        ("dropout", "dropout(x)"),
        ("input", "input"),
        ("output", "output: dropout @ input"),
    ]
    text = " ".join(line for node in tg.graph(gpt(dropout=0.1).train()(IDS)).picture.nodes for line in node.lines)
    assert "dropout(" in text
    assert "where" not in text


def test_blocks_with_different_masks_are_not_drawn_as_one():
    class Block(nn.Module):
        def __init__(self, window):
            self.allow = nn.causal(5)
            if window:
                self.allow = self.allow & ~np.tri(5, 5, -2, dtype=bool)
            self.project = nn.Linear(3, 3)

        def forward(self, x):
            return ops.softmax(ops.mask(x @ x.T, self.allow)) @ self.project(x)

    class Stack(nn.Module):
        def __init__(self, windows):
            self.h = [Block(window) for window in windows]

        def forward(self, x):
            for block in self.h:
                x = block(x)
            return x

    x = tg.Tensor(np.ones((5, 3)), requires_grad=True, name="x")
    for windows, frames in (
        ([True] * 4, ["Stack", "h.0…3  ×4"]),
        ([False, True] * 2, ["Stack", *map("h.{}".format, range(4))]),
    ):
        assert [cluster.title for cluster in tg.graph(Stack(windows)(x)).picture.clusters] == frames


def test_an_unnamed_sum_has_no_name_of_another_box():
    x, l1, l2 = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x"), nn.Linear(3, 3), nn.Linear(3, 5)
    y = l2(l1(x) + l1(x)).named("y")
    lines = [" ".join(node.lines) for node in tg.graph(y, values=False).picture.nodes if node.title == "y"]
    assert lines == ["output: add @ weight + bias"]


@pytest.mark.parametrize("by", [np.inf, -np.inf, np.nan, 1e200, 1e-200, 0.0, 1.0, 5e-324])
def test_any_number_can_be_a_factor(by):
    x = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x")
    with np.errstate(all="ignore"):
        for y in (x * by, x / by, x**by, x @ x.T * by):
            assert "output" in tg.graph(y).dot


@pytest.mark.parametrize("name", ["<B>", "backward", "forward", "1", "2", "n_f", "ᵀ", "Aᵀ", "dropout"])
def test_a_tensor_may_have_any_name(name):
    a = tg.Tensor(np.full((2, 2), 2.0), requires_grad=True, name=name)
    b = tg.Tensor(np.full((2, 2), 3.0), requires_grad=True, name="b")
    for y, formula in (
        (b**a, f"b ** {name}"),
        ((a @ b).T, f"bᵀ @ {name}ᵀ"),
        (a + b, f"{name} + b"),
    ):
        assert " ".join(boxes(tg.graph(y))["output"].lines) == f"output: {formula}"
    begins_with_the_name = ops.exp((a + b).named("h"))
    assert f">{escape(name)} + b<" in tg.graph(begins_with_the_name).dot


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_frame_may_have_the_name_of_a_pass(name):
    class Both(nn.Module):
        def forward(self, x):
            return self.layers[name](x)

    both = Both()
    both.layers = {name: nn.Linear(3, 5)}
    x = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x")
    picture = tg.graph(both(x).sum(), depth=1).picture
    lines = [line for cluster in picture.clusters for line in cluster.lines]
    assert "20 parameters" in [*lines, *(node.parameters for node in picture.nodes)]
    with modes.scope(name):
        y = (ops.exp(x) * 2 + x).sum()
    assert boxes(tg.graph(y, values=False))["x"].cluster is None


def test_a_pattern_that_lacks_the_first_letter_of_a_module_is_refused():
    with pytest.raises(ValueError, match="matches nothing"):
        tg.graph(gpt()(IDS), collapse="n_f")


def test_a_fused_primitive_cannot_be_opened_with_its_backward_pass():
    with pytest.raises(ValueError, match="fused=False"):
        tg.graph(gpt().loss(IDS, IDS), backward=True, expand="attention")


def test_a_scale_of_zero_is_written():
    q = tg.Tensor(np.ones((3, 5)), requires_grad=True, name="q")
    assert "0 · q @ qᵀ" in " ".join(boxes(tg.graph(ops.attention(q, q, q, scale=0.0)))["output"].lines)


def test_names_the_wrong_way_round_are_refused():
    x = tg.Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(TypeError, match="names must be"):
        tg.graph(x * 2, names={x: "x"})


def test_a_named_table_that_every_block_makes_anew_is_one_input():
    graph = tg.graph(gpt(position="alibi")(IDS))
    assert len(boxes_titled(graph, "alibi")) == 1
    assert "h.0…3  ×4" in frame_titles(graph)


def test_only_the_gradient_of_a_mask_is_where_allowed():
    x = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x")
    assert boxes(tg.graph(ops.where(x.data > 0, x, 0.0)))["output"].lines == ["output: where(condition", "2×3, x, 0)"]
    for y, word in ((ops.mask(x, x.data > 0).exp(), "allowed"), (ops.relu(x).exp(), "condition")):
        assert word in " ".join(boxes(tg.graph(y.sum(), backward=True))["∂L/∂x"].lines)


def test_a_refilled_array_is_another_input():
    array = np.ones((2, 2))
    w = tg.Tensor(np.ones((2, 2)), requires_grad=True, name="w")
    y1, y2 = array @ w, array @ w
    array[:] = 5
    y3 = array @ w
    graph = tg.graph([y1, y2, y3])
    inputs = [node.value.data[0, 0, 0] for node in graph.picture.nodes if node.kind == "input"]
    assert inputs == [1, 5]
    assert [title for title, _ in arrows(graph) if title != "w"] == ["input_1", "input_1", "input_2"]


# --------------------------------------------------------------------------------------------------------------------
# Values and gradients


def test_tables_hold_the_values_and_the_gradients_of_the_run():
    y = swept(two_heads())
    concat = y.node.inputs[0]
    node = boxes(tg.graph(y))["Concat"]
    assert np.array_equal(node.value.data[0], concat.numpy())
    assert np.array_equal(node.gradient.data[0], concat.grad)
    assert (node.value.palette, node.gradient.palette) == ("value", "gradient")


def test_three_states_of_a_gradient_are_distinguished():
    x = tg.Tensor(np.ones((3, 5)), name="x")
    w = tg.Tensor(np.ones((5, 2)), requires_grad=True, name="w")
    y = (x @ w).named("y")
    before = tg.graph(y).picture
    assert [node.gradient for node in before.nodes] == [None, None, None]
    assert before.caption == ["gradients: not computed"]
    w.grad = np.ones((5, 2))
    assert boxes(tg.graph(y))["y"].gradient == "gradient: not computed"
    after = boxes(tg.graph(swept(y)))
    assert isinstance(after["w"].gradient, Table)
    assert after["x"].gradient == "gradient: not required"


def test_no_gradient_is_drawn_before_backward():
    text = tg.graph(two_heads()).dot
    assert heat.COLOURS["gradient"][heat.STEPS][0] not in text
    assert "gradient ±" not in text


def test_a_recording_without_gradients_does_not_mention_them():
    model = gpt()
    with tg.no_grad(), tg.record():
        logits = model(IDS)
    graph = tg.graph(logits, values=True)
    assert len(graph.picture.nodes) == 32
    assert boxes_titled(graph, "wte.weight")[0].value is not None
    assert "gradient" not in graph.dot


def test_a_graph_is_a_snapshot():
    x = tg.Tensor([[1.0, 2.0]], requires_grad=True, name="x")
    y = (x * x).sum()
    graph = tg.graph(y)
    text = graph.dot
    y.backward()
    x.assign_([[5.0, 6.0]])
    assert graph.dot == text
    assert np.array_equal(boxes(graph)["x"].value.data[0], [[1.0, 2.0]])


@pytest.mark.parametrize("options", [{}, {"backward": True}, {"fold": False}, {"ops": "separate"}])
@pytest.mark.parametrize("make", [lambda: swept(two_heads()), lambda: gpt(n_layer=3).loss(IDS, IDS)])
def test_drawing_keeps_nothing_of_the_run_alive_not_even_in_cycles(make, options):
    gc.collect()
    gc.disable()
    try:
        y = make()
        tensors = [weakref.ref(tensor) for tensor in engine.toposort([y], everything=True)]
        graph = tg.graph(y, **options)
        del y
        assert not [reference() for reference in tensors if reference() is not None]
        assert graph.dot
    finally:
        gc.enable()


def test_values_and_gradients_can_be_left_out():
    graph = tg.graph(swept(two_heads()), values=False, grads=False)
    assert all(node.value is None and node.gradient is None for node in graph.picture.nodes)


def test_large_tensors_have_no_table():
    x = tg.Tensor(np.ones((300, 300)), name="x")
    assert boxes(tg.graph(x, values=True))["x"].value is None


def test_a_stack_of_matrices_is_shown_side_by_side():
    x = tg.Tensor(np.arange(2 * 3 * 5.0).reshape(2, 3, 5), name="x")
    node = boxes(tg.graph(x))["x"]
    assert node.value.data.shape == (2, 3, 5)
    assert node.shape == "2×3×5"


def test_matrices_rows_and_columns_are_shown_in_their_order():
    x = tg.Tensor(np.arange(5 * 2 * 3.0).reshape(5, 2, 3), name="x")  # more panels than fit beside each other
    cells = re.findall(r'BGCOLOR="#\w+"><FONT[^>]*>([^<]+)</FONT>', tg.graph(x).dot)
    assert list(map(float, cells)) == list(range(30))


def test_the_meaning_of_the_strongest_colour_is_written_once():
    for shape, text in (((7, 6), "±42"), ((13, 3), "value ±39")):  # of a tall table, under it
        x = tg.Tensor(np.arange(1.0, 1 + np.prod(shape)).reshape(shape), requires_grad=True, name="x")
        drawn = tg.graph(swept((x * 2).named("y"))).dot
        assert re.findall(rf">((?:value )?±{x.numpy().max():.0f})<", drawn) == [text]
    weights = ops.softmax(tg.Tensor(np.ones((7, 7)), requires_grad=True, name="scores"))
    with modes.scope(nn.Scope("head", is_attention=True)):
        assert "0…1" not in tg.graph(ops.softmax(weights)).dot  # it is the same everywhere, and in the legend


def test_nan_and_infinity_are_marked_and_counted():
    x = tg.Tensor([[np.nan, 1.0, np.inf, -np.inf]], name="x")
    graph = tg.graph(x)
    assert boxes(graph)["x"].warning == "1 × nan, 1 × ∞, 1 × −∞"
    for text in ("nan", "∞", "−∞"):
        assert f">{text}</FONT>" in graph.dot
    wide = tg.graph(tg.Tensor([[np.nan] * 7], name="x")).dot
    assert wide.count(heat.NOT_A_NUMBER + '"><FONT') == 7


def test_elements_of_a_gradient_that_are_not_finite_are_counted_beside_its_range():
    for g, text in (([[2.0, np.inf, np.nan]], "2 not finite"), ([[np.nan] * 3], "gradient not finite")):
        x = tg.Tensor(np.ones((1, 3)), requires_grad=True, name="x")
        with np.errstate(invalid="ignore"):
            (y := x * 1.0).backward(np.array(g))
        assert text in tg.graph(y).dot


def test_cells_of_minus_infinity_are_empty_and_other_infinities_dark():
    assert heat.colour_of(-np.inf, 1.0, "value") == ("#ffffff", "#6e7781")
    for x in (np.inf, np.nan):
        assert heat.colour_of(x, 1.0, "value")[0] == heat.NOT_A_NUMBER


def test_minus_infinity_is_not_reported_where_a_mask_put_it():
    y = ops.mask(tg.Tensor(np.ones((3, 3)), requires_grad=True), nn.causal(3)).named("masked")
    assert boxes(tg.graph(y))["masked"].warning == ""


def test_zero_is_light_grey_and_the_extremes_have_the_colours_of_the_palette():
    assert heat.colour_of(0.0, 2.0, "value")[0] == "#eef0f2"
    assert heat.colour_of(-2.0, 2.0, "value") == ("#2166ac", "#ffffff")
    assert heat.colour_of(2.0, 2.0, "value")[0] == "#d6601e"
    assert heat.colour_of(1.0, 0.1, "attention")[0] == "#54278f"  # a fixed scale, whatever the largest weight
    assert heat.colour_of(0.25, 0.25, "attention") == heat.colour_of(0.25, 1.0, "attention")
    assert heat.colour_of(0.0, 0.0, "gradient")[0] == "#eef0f2"
    assert [heat.colour_of(x, 3.0, "gradient")[0] for x in (-3.0, 3.0)] == ["#1b7837", "#92308f"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (-1.234, "−1.23"),
        (0.125, "0.12"),
        (0.042, "0.042"),
        (0.0042, "0.0042"),
        (-0.004, "−0.0040"),
        (0.00042, "4.2e−4"),
        (99.96, "100"),
        (123.4, "123"),
        (-999.4, "−999"),
        (1234.5, "1234"),
        (123456.0, "1.2e5"),
        (3, "3"),
        (-7, "−7"),
        (True, "1"),
    ],
)
def test_numbers_keep_two_or_three_significant_digits(number, text):
    assert heat.write_value(number) == text


@given(st.floats(1e-300, 1e300))
def test_a_written_number_is_within_five_percent(number):
    assert float(heat.write_value(number).replace("−", "-")) == pytest.approx(number, rel=0.05)


def test_a_number_whose_quotient_by_the_factor_is_no_float_keeps_its_digits():
    assert [heat.write_value(x, 300) for x in (1e300, 1e-300, -4.94e-322)] == ["1.00", "1.0e−600", "−4.9e−622"]


def test_small_and_large_matrices_have_a_common_factor():
    for scale, factor, corner in ((4.2e-4, "×10⁻⁶", "420"), (1234.5, "×10³", "1.23"), (0.42, "", "0.42")):
        graph = tg.graph(tg.Tensor([[scale, -scale / 7], [0.0, scale / 100]], name="x", dtype=np.float64))
        assert f">{corner}</FONT>" in graph.dot
        assert ">0</FONT>" in graph.dot
        assert re.findall(r"×10[^<]*", graph.dot) == [factor] * bool(factor)
    for extreme in (5e-324, 1.7e308):
        assert tg.graph(tg.Tensor(np.array([[extreme, 0.0]]))).dot


# --------------------------------------------------------------------------------------------------------------------
# Which tensors


def test_several_outputs_share_one_graph():
    x = tg.Tensor([1.0, 2.0], requires_grad=True, name="x")
    trunk = x.exp().named("trunk")
    y1, y2 = (trunk * x).named("y1"), (trunk + x).named("y2")
    for y in ([y1, y2], (y1, y2), {"first": y1, "second": [y2]}):
        assert sorted(titles(tg.graph(y))) == ["trunk", "x", "y1", "y2"]


def test_a_dict_names_outputs_that_have_no_name():
    x = tg.Tensor([1.0], requires_grad=True, name="x")
    assert titles(tg.graph({"doubled": x * 2, "more": (x + x).named("kept")})) == ["x", "doubled", "kept"]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_is_a_graph_of_one_box(requires_grad):
    graph = tg.graph(tg.Tensor([1.0], requires_grad=requires_grad, name="leaf"))
    assert titles(graph) == ["leaf"]
    assert graph.picture.edges == []


def test_an_output_that_needs_no_gradient_is_drawn():
    with tg.record():
        y = (tg.Tensor([1.0], name="a") + tg.Tensor([2.0], name="b")).named("c")
    assert arrows(tg.graph(y)) == [("a", "c"), ("b", "c")]


def test_names_come_from_a_mapping_and_other_leaves_are_named_after_their_role():
    x, w, b = tg.Tensor(np.ones((3, 5))), *(tg.Tensor(np.ones(s), requires_grad=True) for s in ((5, 2), (2,)))
    graph = tg.graph(ops.linear(x, w, b), names={"x": x, None: b, "other": tg.Tensor(0.0), "number": 3})
    assert titles(graph) == ["x", "weight", "bias", "output"]


def test_equal_names_are_two_boxes():
    a, b = (tg.Tensor([1.0], requires_grad=True, name="same") for _ in range(2))
    graph = tg.graph((a * b).named("y"))
    assert titles(graph) == ["same", "same", "y"]
    assert len({node.id for node in graph.picture.nodes}) == 3


def test_a_tensor_used_twice_has_two_arrows():
    x = tg.Tensor([2.0], requires_grad=True, name="x")
    assert arrows(tg.graph((x * x).named("y"))) == [("x", "y"), ("x", "y")]


@pytest.mark.parametrize("wrong", [3, "y", np.ones(3), [1, 2], None])
def test_arguments_other_than_tensors_are_refused(wrong):
    with pytest.raises(TypeError, match="Tensor, or a list, tuple or dict"):
        tg.graph(wrong)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="at least one Tensor"):
        tg.graph([])


# --------------------------------------------------------------------------------------------------------------------
# Folding


def test_folding_keeps_every_named_tensor_and_every_path():
    x = tg.Tensor(np.ones((3, 5)), requires_grad=True, name="x")
    middle = (x.T * 2).named("middle")
    y = (middle.reshape(15) + 1).exp().named("y")
    assert arrows(tg.graph(y)) == [("x", "middle"), ("middle", "y")]
    assert " ".join(boxes(tg.graph(y))["y"].lines) == "output: exp(middle + 1)"


def test_without_folding_each_operation_has_its_box():
    y = two_heads()
    nodes = sum(tensor.node is not None for tensor in engine.toposort([y], everything=True))
    graph = tg.graph(y, fold=False)
    assert sum(node.kind not in ("input", "parameter") for node in graph.picture.nodes) == nodes


def test_separate_operations_are_ovals_between_operands_and_results():
    x = tg.Tensor([[1.0, 2.0]], name="x")
    w = tg.Tensor([[3.0], [4.0]], requires_grad=True, name="w")
    graph = tg.graph((x @ w).tanh().named("y"), ops="separate")
    assert [node.title for node in graph.picture.nodes if node.kind == "operation"] == ["matmul", "tanh"]
    assert arrows(graph)[:2] == [("x", "matmul"), ("w", "matmul")]
    assert ("tanh", "y") in arrows(graph)
    assert "shape=oval" in graph.dot


def test_a_fused_primitive_opens_into_its_steps_with_their_gradients():
    rng = np.random.default_rng(3)
    q, k, v = (tg.Tensor(rng.normal(size=shape), requires_grad=True) for shape in ((3, 7), (5, 7), (5, 11)))
    allow = nn.causal(3, 5)
    fused = swept(ops.attention(q, k, v, allow).named("y"))
    steps_y, steps = nn.attention(q, k, v, allow=allow, trace=True)
    swept(steps_y)

    closed, opened = tg.graph(fused), tg.graph(fused, expand="attention")
    assert len(opened.picture.nodes) > len(closed.picture.nodes)
    weights = boxes(opened)["weights"]
    np.testing.assert_allclose(weights.value.data[0], steps.weights.numpy(), rtol=1e-12)
    np.testing.assert_allclose(weights.gradient.data[0], steps.weights.grad, rtol=1e-12)
    assert boxes(opened)["y"].kind == "output"


@pytest.mark.parametrize("is_packed", [True, False])
def test_drawing_shows_the_steps_of_a_composite_primitive_and_leaves_the_graph_as_it_was(is_packed):
    x = tg.Tensor(np.random.default_rng(3).standard_normal((3, 12)), requires_grad=True, name="x")
    if is_packed:
        y = ops.self_attention(x, nn.causal(3), n_head=2).named("y")
    else:
        y = ops.multi_head_attention(x, x * 2, x, nn.causal(3), n_head=2).named("y")
    swept(y)
    node, gradient = y.node, x.grad
    for options in ({}, {"backward": True}, {"ops": "separate"}):
        made_by = tg.graph(y, **options).dot
        assert y.node.op.name not in made_by
        assert "attention" in made_by
    assert boxes(tg.graph(y, expand="attention"))["weights"].gradient is not None
    assert y.node is node
    swept(y)
    np.testing.assert_array_equal(x.grad, 2 * gradient)


def test_a_chain_of_thousands_is_drawn_box_by_box():
    y = x = tg.Tensor([1.0], requires_grad=True, name="x")
    for _ in range(5_000):
        y = y * x
    graph = tg.graph(y, fold=False, max_nodes=None)
    assert len(graph.picture.nodes) == 5_001
    assert len(graph.picture.edges) == 10_000


def test_a_shared_value_is_visited_once():
    y = tg.Tensor([1.0], requires_grad=True)
    for _ in range(60):
        y = y + y
    graph = tg.graph(y, depth=None)
    assert len(graph.picture.nodes) == 61
    assert len(graph.picture.edges) == 120


# --------------------------------------------------------------------------------------------------------------------
# Modules


def test_modules_are_frames_with_the_names_of_their_attributes():
    model = gpt(n_layer=2)
    graph = tg.graph(model(IDS), depth=None, expand=["h.0", "h.1"])
    assert [c.title for c in graph.picture.clusters] == ["GPT", "h.0", "attn", "mlp", "h.1", "attn", "mlp"]
    assert frame_of(graph, "output") == ["GPT"]
    assert {"W_QKV", "b_QKV", "c_fc.bias", "ln_1.weight", "wte.weight"} < set(titles(graph))


def test_a_leaf_belongs_where_it_is_used_and_an_input_outside():
    graph = tg.graph(two_heads())
    assert frame_of(graph, "W_Q1") == ["head 1"]
    assert frame_of(graph, "W_V2") == ["head 2"]
    assert frame_of(graph, "X") == frame_of(graph, "W_O") == []


def test_depth_closes_modules_and_says_class_shape_and_parameters():
    model = gpt()
    shown = boxes(tg.graph(model(IDS), depth=1))
    assert {"ids", "wte", "wpe", "+", "h.0…3  ×4", "ln_f", "lm_head"} == set(shown)
    block = shown["h.0…3  ×4"]
    assert (block.lines, block.shape) == (["Block"], "1×5×6")
    assert block.parameters == f"{model.h[0].count():,} parameters each"
    assert [len(tg.graph(model(IDS), depth=depth).picture.nodes) for depth in (0, 1)] == [2, 7]


def test_a_closed_attention_is_not_drawn_as_attention_weights():
    kinds = {node.title: node.kind for node in tg.graph(gpt(n_layer=1)(IDS), depth=2).picture.nodes}
    assert kinds == dict.fromkeys(["wte", "wpe", "ln_1", "attn", "ln_2", "mlp", "ln_f"], "op") | {
        "ids": "input",
        "+": "plus",
        "lm_head": "output",
    }


def test_collapse_and_expand_take_paths_patterns_classes_and_predicates():
    logits = gpt(n_layer=2)(IDS)
    assert "h.1" in titles(tg.graph(logits, collapse="h.1"))
    assert "h.0" not in titles(tg.graph(logits, collapse="h.1"))
    assert titles(tg.graph(logits, collapse="h.*.mlp", expand=["h.0", "h.1"])).count("mlp") == 2
    assert titles(tg.graph(logits, collapse="CausalSelfAttention", expand="h.0")).count("attn") == 2
    assert "ln_2.weight" not in titles(tg.graph(logits, collapse=lambda path: path.endswith("ln_2")))
    opened = tg.graph(logits, depth=1, expand="h.1.attn")
    assert "h.0" in titles(opened)
    assert frame_of(opened, "c_attn") == ["attn", "h.1", "GPT"]


def test_equal_blocks_fold_to_one_and_an_expanded_one_stands_alone():
    logits = gpt(n_layer=7)(IDS)
    assert "h.0…6  ×7" in frame_titles(tg.graph(logits))
    opened = frame_titles(tg.graph(logits, depth=1, expand="h.3"))
    assert "h.3" in opened
    assert [title for title in titles(tg.graph(logits, depth=1, expand="h.3")) if "×" in title] == [
        "h.0…2  ×3",
        "h.4…6  ×3",
    ]
    assert sum(title.startswith("h.") for title in frame_titles(tg.graph(logits, fold=False))) == 7


def frame_titles(graph):
    return [cluster.title for cluster in graph.picture.clusters]


def test_blocks_that_differ_do_not_fold():
    model = gpt(n_layer=3)
    model.h[1].mlp.c_fc.bias = None
    assert [t for t in titles(tg.graph(model(IDS), depth=1)) if t.startswith("h.")] == ["h.0", "h.1", "h.2"]


def test_heads_fold_too_and_open_on_request():
    y = two_heads(heads=8)
    folded = tg.graph(y)
    assert frame_titles(folded) == ["head 1…8  ×8"]
    assert [edge.label for edge in folded.picture.edges if edge.label] == ["×8"]
    assert len(frame_titles(tg.graph(y, expand="head *"))) == 8


def test_a_large_gpt_fits_on_one_screen():
    assert len(tg.graph(gpt(n_layer=12)(IDS), depth=2).picture.nodes) < 16


def test_residual_arrows_are_drawn_as_such():
    graph = tg.graph(gpt(n_layer=1)(IDS), depth=2)
    residual = [edge for edge in graph.picture.edges if edge.kind == "residual"]
    assert [edge.label for edge in residual] == ["residual", "residual"]
    title = {node.id: node.title for node in graph.picture.nodes}
    assert [(title[edge.source], title[edge.target]) for edge in residual] == [("+", "+"), ("+", "+")]


def test_an_arrow_is_residual_only_past_a_product():
    x, w, v = (tg.Tensor(np.ones((3, 3)), requires_grad=True, name=name) for name in "xwv")
    h = (x @ w).named("h")
    for inner, is_residual in ((ops.exp(h), False), (ops.exp(h @ v), True)):
        drawn = tg.graph((h + inner.named("f")).named("y"))
        assert ("residual" in {edge.kind for edge in drawn.picture.edges}) is is_residual


def test_a_sum_of_two_branches_is_no_residual():
    x = tg.Tensor(np.ones((3, 5)), requires_grad=True, name="x")
    w = tg.Tensor(np.ones((5, 5)), requires_grad=True, name="w")
    graph = tg.graph((x @ w) + (x * x))
    assert all(edge.kind != "residual" for edge in graph.picture.edges)


def test_parameters_keep_their_names_when_their_module_is_freed():
    shown = titles(tg.graph(gpt(n_layer=1)(IDS)))
    assert {"W_QKV", "b_QKV", "c_fc.bias", "ln_1.weight", "ln_f.bias", "wpe.weight"} < set(shown)


def test_tied_weights_are_one_box():
    model = gpt()
    graph = tg.graph(model(IDS))
    tied = boxes_titled(graph, "wte.weight")
    assert len(tied) == 1
    assert sum(edge.source == tied[0].id for edge in graph.picture.edges) == 2
    closed = tg.graph(model(IDS), depth=1)
    assert boxes(closed)["lm_head"].parameters == "tied to wte"
    assert [edge.label for edge in closed.picture.edges if edge.label] == ["tied"]


def boxes_titled(graph, title):
    return [node for node in graph.picture.nodes if node.title == title]


def test_counts_ties_and_heads_survive_the_model():
    config = nn.GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=32)
    logits = nn.GPT(config)(IDS)
    gc.collect()
    graph = tg.graph(logits, depth=1)
    assert graph.picture.clusters[0].lines == ["53,472 parameters"]
    assert boxes(graph)["lm_head"].parameters == "tied to wte"
    (attention,) = boxes_titled(tg.graph(logits, depth=2), "attn")
    assert attention.lines == ["CausalSelfAttention, 4 heads"]


@pytest.mark.parametrize(
    ("n_head", "frames"), [(4, ["head 1", "head 2", "head 3", "head 4"]), (6, ["head 1…3  ×3", "head 4…6  ×3"])]
)
def test_heads_that_share_keys_fold_per_group_with_the_arrows_as_computed(n_head, frames):
    mha = nn.MultiHeadAttention(12, n_head, n_kv_head=2, rng=0)
    graph = tg.graph(mha.per_head(np.ones((3, 12))))
    assert [title for title in frame_titles(graph) if "head" in title] == frames
    last = {4: 3, 6: 4}[n_head]
    assert {("K_1", "scores_1"), ("V_1", "H_1"), ("K_2", f"scores_{last}"), ("V_2", f"H_{last}")} <= set(arrows(graph))
    assert not {("K_1", f"scores_{last}"), ("V_2", "H_1")} & set(arrows(graph))


def test_a_translator_is_drawn_with_both_of_its_sides():
    model = nn.Transformer(11, 13, d_model=6, n_head=2, n_layer=3, d_ff=10, max_len=7)
    graph = tg.graph(model.loss(np.array([[3, 4, 5, 6]]), np.array([[3, 4, 5]])), depth=1)
    assert {"encoder.0…2  ×3", "decoder.0…2  ×3", "source_embedding", "target_embedding"} < set(titles(graph))
    assert all(titles(graph))
    assert len(boxes_titled(graph, "ids")) == 2


def test_a_pattern_that_matches_nothing_is_refused_with_the_modules_that_exist():
    with pytest.raises(ValueError, match=r"'h\.9' matches nothing.*h\.0.*attention"):
        tg.graph(gpt()(IDS), expand="h.9")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ops": "apart"}, ValueError),
        ({"direction": "down"}, ValueError),
        ({"values": "some"}, ValueError),
        ({"engine": "neato"}, ValueError),
        ({"depth": -1}, ValueError),
        ({"max_nodes": 0}, ValueError),
        ({"collapse": [3]}, TypeError),
    ],
)
def test_an_option_out_of_range_is_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        tg.graph(tg.Tensor([1.0]), **options)


# --------------------------------------------------------------------------------------------------------------------
# Size


def test_too_many_boxes_are_refused_with_the_depth_that_fits():
    logits = gpt(n_layer=5)(IDS)
    with pytest.raises(GraphTooLargeError, match=r"depth=\d fits") as caught:
        tg.graph(logits, fold=False, max_nodes=30)
    fitting = int(re.search(r"depth=(\d)", str(caught.value))[1])
    assert len(tg.graph(logits, fold=False, max_nodes=30, depth=fitting).picture.nodes) <= 30
    with pytest.raises(GraphTooLargeError):
        tg.graph(logits, fold=False, max_nodes=30, depth=fitting + 1)


def test_a_long_chain_is_refused_before_it_is_built():
    y = x = tg.Tensor([1.0], requires_grad=True)
    for _ in range(20_000):
        y = y * x
    with pytest.raises(GraphTooLargeError, match="no module can be closed"):
        tg.graph(y, depth=None)


def test_a_long_run_inside_of_a_module_is_refused_with_a_depth():
    class Long(nn.Module):
        def forward(self, x):
            y = x
            for _ in range(20_000):
                y = y * x
            return y

    module = Long()
    y = module(tg.Tensor([1.0], requires_grad=True))
    with pytest.raises(GraphTooLargeError, match="depth=0 fits"):
        tg.graph(y, depth=None)
    assert len(tg.graph(y, depth=0).picture.nodes) == 2


# --------------------------------------------------------------------------------------------------------------------
# Without options


def test_a_scalar_is_one_line_with_signs_and_four_digits():
    a = tg.Tensor(2.0, requires_grad=True, name="a")
    b = tg.Tensor(-69.415, requires_grad=True, name="b")
    L = (a * b).named("L")
    L.backward()
    graph = tg.graph(L)
    shown = {node.title: (node.value, node.gradient) for node in graph.picture.nodes}
    assert shown == {"a": ("2.000", "grad −69.42"), "b": ("−69.42", "grad 2.000"), "L": ("−138.8", "grad 1.000")}
    assert graph.picture.nodes[0].shape == "scalar"
    assert "−max" not in graph.dot  # no legend: there is no colour


def test_the_loss_is_shown_in_pictures_of_any_size():
    model = gpt(n_layer=2)
    loss = model.loss(IDS[:, :-1], IDS[:, 1:]).named("loss")
    for depth in ("auto", 0, 1, None):
        assert boxes_of(tg.graph(loss, depth=depth), "loss")[0].value == f"{loss.item():#.4g}"
    assert boxes_of(tg.graph(loss, values=False), "loss")[0].value is None


def boxes_of(graph, title):
    return [node for node in graph.picture.nodes if node.title == title]


def test_small_gradients_are_numbers_and_values_true_writes_wider_ones():
    shown = boxes(tg.graph(swept(two_heads())))
    assert shown["scores_1"].gradient.numbers
    assert not shown["Q_1"].gradient.numbers
    shown = boxes(tg.graph(swept(two_heads()), values=True))
    assert shown["Q_1"].value.numbers
    assert shown["Q_1"].gradient.numbers
    assert not shown["Concat"].value.numbers  # 22 columns


def test_a_negative_cell_without_a_number_has_a_sign():
    x = tg.Tensor(np.linspace(-1, 1, 14).reshape(2, 7), requires_grad=True, name="x")
    assert heat.heat_table(boxes(tg.graph(x * 2))["x"].value).count("−") == 7


@pytest.mark.parametrize("palette", ["value", "attention", "gradient"])
def test_text_on_a_colour_has_a_contrast_of_4_5(palette):
    for colour, ink in heat.COLOURS[palette].values():
        assert heat.contrast(colour, ink) >= 4.5
    for look in dot.LOOKS.values():
        assert heat.contrast(look.border, look.fill) >= 4.5
        assert heat.contrast(dot.GREY, look.fill) >= 4.5
        assert heat.contrast(dot.GRADIENT_INK, look.fill) >= 4.5


def test_a_default_picture_has_about_40_boxes():
    for model in (gpt(n_layer=2), gpt(n_layer=12)):
        assert len(tg.graph(model.loss(IDS[:, :-1], IDS[:, 1:])).picture.nodes) <= 40
    translator = nn.Transformer(11, 13, d_model=6, n_head=2, n_layer=2, d_ff=7, max_len=9, seed=0)
    shown = tg.graph(translator.loss(IDS, IDS))
    assert len(shown.picture.nodes) <= 40
    assert not any(title.startswith("step") for title in titles(shown))  # three residual additions are no chain
    assert [edge.kind for edge in shown.picture.edges].count("residual") == 5
    assert len(tg.graph(two_heads()).picture.nodes) == 22  # small ones are drawn completely


def test_splits_into_heads_are_no_steps_of_a_chain():
    shown = titles(tg.graph(gpt(score="sinks")(IDS)))
    assert not any(title.startswith("step") for title in shown)


def test_steps_of_a_chain_outside_of_modules_fold():
    rng = np.random.default_rng(0)
    h = tg.Tensor(rng.normal(size=(3, 5)), name="x")
    for i in range(43):
        h = (h @ tg.Tensor(rng.normal(size=(5, 5)), requires_grad=True, name=f"W_{i}") + 1).tanh()
    graph = tg.graph(h)
    assert [cluster.title for cluster in graph.picture.clusters] == ["step 1…43  ×43"]
    assert len(graph.picture.nodes) <= 4
    assert len(tg.graph(h, depth=None).picture.nodes) == 1 + 2 * 43


def test_two_equal_modules_fold_but_not_the_projections_of_attention():
    class Attention(nn.Module):
        def __init__(self):
            self.q, self.k, self.v = (nn.Linear(6, 6, rng=i) for i in range(3))

        def forward(self, x):
            return ops.softmax(self.q(x) @ self.k(x).T) @ self.v(x)

    shown = titles(tg.graph(Attention()(np.ones((3, 6))), depth=1))
    assert {"q", "k", "v"} <= set(shown)
    model = gpt(n_layer=2)
    assert "h.0…1  ×2" in titles(tg.graph(model(IDS), depth=1))


def test_a_closed_module_shows_the_range_and_the_gradient_of_its_result():
    model = gpt(n_layer=2)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    (block,) = boxes_of(tg.graph(loss, depth=1), "h.0…1  ×2")
    assert re.fullmatch(r"−\d[\d.]* … \d[\d.]*", block.value)
    assert block.gradient.startswith("gradient ±0.")


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("options", [{}, {"fold": False}, {"direction": "LR"}, {"direction": "LR", "fold": False}])
def test_heads_and_their_matrices_keep_their_order(heads, options):
    mha = nn.MultiHeadAttention(d_model=5, n_head=heads, d_k=3, d_v=2, rng=0)
    x = tg.Tensor(np.ones((3, 5)), name="X")
    graph = tg.graph(mha.per_head(x), depth=None, expand=[f"head {i + 1}" for i in range(heads)], **options)
    groups = ElementTree.fromstring(graph.svg()).iter("{http://www.w3.org/2000/svg}g")
    place = {}
    for group in groups:
        words = list(group.iter("{http://www.w3.org/2000/svg}text"))
        if group.get("class") == "node":
            place[words[0].text] = float(words[0].get("y" if "direction" in options else "x"))
    expected = [f"{name}_{i + 1}" for i in range(heads) for name in "QKV"]
    assert sorted(expected, key=place.__getitem__) == expected


def test_a_picture_is_a_mermaid_flowchart():
    y = two_heads()
    text = tg.graph(y, names={'end "]<b>': y}).mermaid
    assert text.startswith("flowchart TB\n")
    assert text.count("subgraph ") == text.count("\n  end") == 2
    assert "<b>end #34;]#60;b#62;</b> 3×5" in text
    nodes = set(re.findall(r"^ *(t\d+)[\[(]", text, re.MULTILINE))
    arrows = re.findall(r"^  (\w+) -->(?:\|.*?\|)? (\w+)$", text, re.MULTILINE)
    assert len(nodes) == 22
    assert len(arrows) == 26
    assert {end for arrow in arrows for end in arrow} <= nodes


def test_mermaid_text_has_frames_of_any_depth():
    frames = [Cluster(f"c{i}", f"f{i}", parent=f"c{i - 1}" if i else None) for i in range(3000)]
    text = to_mermaid(Picture([Node("t0", "op", "y", cluster="c2999")], clusters=frames))
    assert text.count("subgraph") == 3000
    assert text.count("\n" + "  " * 3000 + "end\n") == 1


def test_the_operands_of_attention_are_named():
    graph = tg.graph(gpt(n_layer=1)(IDS))
    assert [edge.label for edge in graph.picture.edges if edge.label.startswith("Q")] == ["Q, K, V"]
    closed = tg.graph(gpt(n_layer=1)(IDS), depth=2)  # the arrow into a closed attention stands for all three
    assert {edge.label for edge in closed.picture.edges} <= {"", "residual", "tied"}


def test_purple_means_attention_weights():
    graph = tg.graph(gpt(n_layer=1)(IDS), expand="attention")
    assert titles(graph)[[node.kind for node in graph.picture.nodes].index("attention")] == "weights"
    for options in ({"depth": 1}, {"depth": 2}, {"depth": None}):
        assert "attention" not in {node.kind for node in tg.graph(gpt(n_layer=1)(IDS), **options).picture.nodes}


def test_a_box_has_the_name_of_the_operation_that_made_it():
    c, d = (tg.Tensor(np.ones((2, 3)), requires_grad=True, name=name) for name in "cd")
    squares = (c - d) ** 2
    assert titles(tg.graph(squares @ squares.T)) == ["c", "d", "pow", "output"]


def test_names_of_a_notebook_cell_replace_those_with_an_underscore():
    x = tg.Tensor([1.0], requires_grad=True)
    y = x * 2
    assert titles(tg.graph(y, names={"x": x, "result": y, "_3": y, "_": y})) == ["x", "result"]


# --------------------------------------------------------------------------------------------------------------------
# Backward


def test_the_backward_is_drawn_beside_the_forward_with_the_gradients_of_the_engine():
    y = swept(two_heads())
    graph = tg.graph(y, backward=True)
    shown = boxes(graph)
    for tensor in engine.toposort([y]):
        if tensor.name:
            drawn = shown[f"∂L/∂{tensor.name}"]
            np.testing.assert_allclose(drawn.value.data[0], tensor.grad, rtol=1e-12, atol=1e-15)
    assert frame_of(graph, "∂L/∂Q_1") == ["head 1", "backward"]
    assert frame_of(graph, "Q_1") == ["head 1", "forward"]
    ids = {node.title: node.id for node in graph.picture.nodes}
    assert (ids["S_2"], ids["∂L/∂S_2"]) in graph.picture.pairs


def test_each_step_of_a_derivative_is_in_the_frame_of_the_module_that_it_differentiates():
    graph = tg.graph(swept(two_heads()), backward=True, fold=False)
    outermost = next(cluster.id for cluster in graph.picture.clusters if cluster.title == "backward")
    outside = {node.title for node in graph.picture.nodes if node.cluster == outermost}
    assert outside == {"∂L/∂X", "∂L/∂Concat", "∂L/∂W_O", "∂L/∂Y", "transpose_1", "transpose_2"}


@pytest.mark.parametrize(
    ("title", "formula"),
    [
        ("∂L/∂V_1", "S_1ᵀ @ ∂L/∂H_1"),
        ("∂L/∂S_1", "∂L/∂H_1 @ V_1ᵀ"),
        ("∂L/∂scores_1", "S_1 * (∂L/∂S_1 − row sum(∂L/∂S_1 * S_1)) where allowed"),
        ("∂L/∂Q_1", "∂L/∂scores_1 / √7 @ K_1"),
        ("∂L/∂K_1", "∂L/∂scores_1ᵀ / √7 @ Q_1"),
        ("∂L/∂W_Q1", "Xᵀ @ ∂L/∂Q_1"),
        ("∂L/∂H_2", "∂L/∂Concat[:, 11:22]"),
        ("∂L/∂Y", "as given"),
    ],
)
def test_a_gradient_has_the_formula_of_the_derivation(title, formula):
    assert " ".join(boxes(tg.graph(swept(two_heads()), backward=True))[title].lines) == formula


def test_drawing_a_backward_touches_no_gradient():
    x = tg.Tensor([1.0, 2.0], requires_grad=True, name="x")
    y = (x * x).sum().named("y")
    graph = tg.graph(y, backward=True)
    assert x.grad is None
    assert y.grad is None
    assert modes.STATE.get() == modes.State()
    assert boxes(graph)["∂L/∂y"].lines == ["begins as 1"]


def test_a_backward_of_several_elements_needs_their_gradient():
    y = two_heads()
    with pytest.raises(ValueError, match="call backward"):
        tg.graph(y, backward=True)
    with pytest.raises(ValueError, match="requires grad"):
        tg.graph(tg.Tensor([1.0]), backward=True)
    with pytest.raises(ValueError, match="one output"):
        tg.graph([swept(y), y * 2], backward=True)


def test_gradients_flow_up_beside_a_forward_that_flows_down():
    graph = tg.graph(swept(two_heads()), backward=True)
    ids = {node.title: node.id for node in graph.picture.nodes}
    assert f"{ids['∂L/∂S_1']} -> {ids['∂L/∂H_1']}" in graph.dot  # reversed, with the arrowhead at its tail
    assert "dir=back" in graph.dot
    assert f"{{ rank=same {ids['H_1']} {ids['∂L/∂H_1']} }}" in graph.dot


# --------------------------------------------------------------------------------------------------------------------
# Two graphs


def test_equal_graphs_have_no_difference():
    diff = tg.graph_diff(two_heads(seed=0), two_heads(seed=1))
    assert all(x.change == "same" for x in (*diff.picture.nodes, *diff.picture.edges))
    assert len(diff.picture.nodes) == 2 * len(tg.graph(two_heads()).picture.nodes)


def test_boxes_with_one_title_are_compared_in_their_order():
    x = tg.Tensor(np.ones(3), requires_grad=True, name="x")
    diff = tg.graph_diff(x.tanh().tanh().tanh(), x.tanh().tanh(), ops="separate")
    changes = [node.change for node in diff.picture.nodes if node.title.endswith("tanh")]
    assert sorted(changes) == ["left", *["same"] * 4]


def test_arrows_on_one_side_of_a_difference_have_its_colour_and_all_others_that_of_their_kind():
    x, y = (tg.Tensor(np.ones(3), requires_grad=True, name=name) for name in "xy")
    arrows = [line for line in tg.graph_diff(x.exp(), (x * y).exp()).dot.splitlines() if "->" in line]
    assert sum('color="#1a7f37"' in line for line in arrows) == 1
    assert any('color="#1a7f37"' not in line and "#cf222e" not in line for line in arrows)
    assert 'color="#1a7f37"' not in tg.graph((x * y).exp()).dot


def test_a_closed_frame_is_an_output_if_the_output_is_in_it_and_only_then():
    picture = tg.graph(gpt()(IDS), depth=3).picture
    names = {cluster.title: cluster.id for cluster in picture.clusters}
    for title, kind in [("GPT", "output"), ("h.0…3  ×4", "op")]:
        closed = close_frames(picture, {names[title]})
        assert next(node.kind for node in closed.nodes if node.id == names[title]) == kind


def test_a_factor_is_written_as_a_sign_only_if_it_is_minus_one():
    x = tg.Tensor(np.ones((2, 3)), requires_grad=True, name="x")
    for by, formula in [(-1, "−x"), (-2, "−2 · x"), (1, "x"), (2, "2 · x")]:
        assert tg.graph(tg.ops.scale(x, by=by)).picture.nodes[-1].lines == [f"output: {formula}"]


def test_each_side_of_a_difference_keeps_its_frames_and_its_pairs():
    one = tg.graph(swept(two_heads()), backward=True)
    both = tg.graph_diff(one, one)
    for i, side in enumerate(("left", "right")):
        half = types.SimpleNamespace(picture=copy.copy(both.picture))
        half.picture.nodes = both.picture.nodes[i * len(one.picture.nodes) :][: len(one.picture.nodes)]
        for title in ("Q_1", "∂L/∂Q_2", "Y"):
            assert frame_of(half, title) == [*frame_of(one, title), side]
        assert [(f"{side}_{a}", f"{side}_{b}") in both.picture.pairs for a, b in one.picture.pairs] == [True] * len(
            one.picture.pairs
        )
    assert len(both.picture.pairs) == 2 * len(one.picture.pairs) > 0


def test_pre_norm_against_post_norm_differs_in_its_arrows():
    models = [gpt(norm_first=norm_first) for norm_first in (True, False)]
    diff = tg.graph_diff(*(model(IDS) for model in models), depth=2)
    changed = {(node.title, node.change) for node in diff.picture.nodes if node.change != "same"}
    assert changed == {("ln_f", "left")}
    title = {node.id: node.title for node in diff.picture.nodes}
    only = [
        {(title[e.source], title[e.target]) for e in diff.picture.edges if e.change == s} for s in ("left", "right")
    ]
    assert ("ln_1", "attn") in only[0]
    assert ("ln_2", "mlp") in only[0]
    assert ("+", "ln_1") in only[1]
    assert "only on the left: 1 box" in diff.picture.caption[0]
    assert "− ln_f" in diff.dot


def test_graphs_are_compared_as_they_are():
    a, b = tg.graph(two_heads(causal=False)), tg.graph(two_heads())
    assert tg.graph_diff(a, b).dot == tg.graph_diff(two_heads(causal=False), two_heads()).dot


# --------------------------------------------------------------------------------------------------------------------
# DOT text


def test_the_text_is_the_same_in_every_process():
    here = Path(__file__).parent
    script = (
        "import test_graph as t, tinygrad_mha as tg, sys; sys.stdout.reconfigure(encoding='utf-8');"
        "y = t.swept(t.two_heads()); print(tg.graph(y).dot + tg.graph(y, backward=True).dot"
        " + tg.graph(t.gpt()(t.IDS), depth=2, expand='attention').dot)"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=here,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 100_000


def test_the_same_run_has_the_same_text():
    assert tg.graph(swept(two_heads())).dot == tg.graph(swept(two_heads())).dot


ODD_NAMES = [
    "\\",
    "a\\",
    'say "hi"',
    'a\\"b',
    "C:\\new\\lib",
    "{x|y}",
    "<f0>",
    "a:b",
    "日本語 😀",
    "查询",
    "a<b",
    "R&D",
]
ODD_NAMES += ["</TABLE>", "&#27;&lt;", "\\N", "\\G", "a]]>b", "<!-- x -->", "%3", "t1", "node", "'", "--", "->"]


@given(st.one_of(st.sampled_from(ODD_NAMES), st.text(min_size=1)))
def test_any_text_survives_the_label_of_a_box(text):
    label = ElementTree.fromstring(f"<TD>{dot.escape(text).replace('<BR/>', '&#10;')}</TD>").text
    lines = dot.fit(text).replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
    assert label.replace("\\\\", "\\") == lines


@given(st.text())
def test_any_text_survives_a_quoted_string(text):
    said = dot.quote(text)
    assert re.fullmatch(r'"([^"\\\n]|\\.)*"', said)
    unquoted = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), said[1:-1])
    assert unescape(unquoted) == unescape(
        unescape(dot.fit(text).replace("&", "&amp;")).replace("&", "&amp;").replace("\r\n", "\n").replace("\r", "\n")
    )


def test_no_label_has_an_empty_font():
    text = tg.graph(gpt()(IDS), depth=1).dot + tg.graph(tg.Tensor([1.0]), ops="separate").dot
    assert not re.search(r"<(FONT|B)[^>]*></\1>", text)


def test_left_to_right_is_another_direction_of_the_same_graph():
    down, right = (tg.graph(two_heads(), direction=direction).dot for direction in ("TB", "LR"))
    assert "rankdir=LR" in right
    assert ":e -> " in right
    assert down.count("->") == right.count("->")


def test_the_matrices_of_a_head_keep_their_order():
    text = tg.graph(two_heads()).dot
    ids = {node.title: node.id for node in tg.graph(two_heads()).picture.nodes}
    for row in (("Q_1", "K_1", "V_1", "Q_2", "K_2", "V_2"), ("W_Q1", "W_K1", "W_V1", "W_Q2", "W_K2", "W_V2")):
        assert f"{{ rank=same {' -> '.join(ids[name] for name in row)} [style=invis] }}" in text


def test_rotated_queries_and_biases_stand_in_the_row_of_the_order_of_their_weights():
    mha = nn.MultiHeadAttention(8, n_head=2, position="rotary", bias=True, rng=0)
    graph = tg.graph(mha(tg.Tensor(np.ones((3, 8)), name="X"), causal=True))
    ids = {node.title: node.id for node in graph.picture.nodes}
    for row in (("Q", "K", "V"), ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V")):
        assert f"{{ rank=same {' -> '.join(ids[name] for name in row)} [style=invis] }}" in graph.dot


def test_queries_keys_and_values_of_plain_functions_have_boxes_though_they_are_split_and_transposed():
    rng = np.random.default_rng(0)
    x, *weights = (tg.Tensor(rng.standard_normal(shape), requires_grad=True) for shape in ((3, 6), *3 * [(6, 6)]))
    q, k, v = (nn.split_heads(x @ w, 2) for w in weights)
    graph = tg.graph(nn.join_heads(ops.softmax(q @ k.mT / 3**0.5) @ v).named("Y"))
    formulas = {node.title: " ".join(node.lines) for node in graph.picture.nodes}
    assert [title for title in formulas if title.startswith("matmul")] == ["matmul_1", "matmul_2", "matmul_3"]
    assert formulas["softmax"] == "in 2 parts, scaled: softmax(matmul_1 @ matmul_2ᵀ / √3)"
    assert formulas["Y"] == "output: in 2 parts: softmax @ matmul_3"


def test_what_a_fused_attention_takes_is_called_q_k_and_v():
    model = nn.Transformer(11, 13, d_model=6, n_head=2, n_layer=1, d_ff=7, max_len=5, seed=0)
    picture = tg.graph(model([[3, 4]], [[1, 5, 7]]), depth=3).picture
    assert [node.title for node in picture.nodes].count("Q") == 3
    lines = [" ".join(node.lines) for node in picture.nodes if node.title == "attention"]
    assert lines[1] == "attention in 2 heads, causal mask: softmax(Q @ Kᵀ / √3) @ V"


def test_only_used_palettes_are_in_the_legend():
    assert "gradient  −max" not in tg.graph(two_heads()).dot
    assert "gradient  −max" in tg.graph(swept(two_heads())).dot
    assert "−max" not in tg.graph(gpt()(IDS), depth=1).dot


def test_boxes_come_in_the_order_of_the_run():
    graph = tg.graph(two_heads(), fold=False)
    order = {node.id: i for i, node in enumerate(graph.picture.nodes)}
    assert all(order[edge.source] < order[edge.target] for edge in graph.picture.edges)
    assert all(int(a.id[1:]) < int(b.id[1:]) for a, b in pairwise(graph.picture.nodes))


def test_the_representation_counts_boxes_and_arrows():
    assert repr(tg.graph(two_heads())) == '<graph of Y: 22 boxes, 26 arrows; .save("graph.svg"), .svg() or .dot>'
    json.dumps(tg.graph(two_heads()).title)
