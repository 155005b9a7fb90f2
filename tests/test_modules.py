"""Modules find their parameters, and save and load them atomically; layers compute their formulas."""

import collections
import copy
import gc
import json
import os
import pickle
import threading
import types
import weakref

import numpy as np
import pytest
import safetensors.numpy

from tinygrad_mha import Tensor, gradcheck, nn, no_grad, ops
from tinygrad_mha.files import CheckpointError, load_arrays, replacing, save_arrays
from tinygrad_mha.nn.layers import sample_dropout_mask
from tinygrad_mha.nn.module import Module, Scope


def parameter(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)


class Nest(Module):
    """One of everything that is looked into."""

    def __init__(self):
        self.first = parameter(2, 3)
        self.layers = [nn.Linear(3, 5, rng=1), {"deep": (nn.Linear(5, 7, bias=False, rng=2),)}]
        self.tied = self.first
        self.table = Tensor(np.arange(11.0))  # a constant: state, not trained
        self.number, self.text, self.nothing = 3, "text", None
        self.rng = np.random.default_rng(5)
        self.drop = nn.Dropout(0.5, rng=self.rng)

    def forward(self, x):
        return self.layers[1]["deep"][0](self.layers[0](x))


NAMES = ["first", "layers.0.weight", "layers.0.bias", "layers.1.deep.0.weight"]


# --------------------------------------------------------------------------------------------------------------------
# Walking


def test_parameters_are_found_in_attributes_lists_tuples_and_dicts_in_order_of_definition():
    assert [name for name, _ in Nest().named_parameters()] == NAMES


def test_a_tied_parameter_is_listed_and_counted_once_under_its_first_name():
    nest = Nest()
    assert len(nest.parameters()) == 4
    assert nest.count() == 2 * 3 + 3 * 5 + 5 + 5 * 7


def test_a_constant_tensor_is_state_but_no_parameter():
    nest = Nest()
    assert list(nest.state_dict()) == [*NAMES, "table"]
    nest.first.requires_grad = False
    assert "first" not in dict(nest.named_parameters())
    assert "first" in nest.state_dict()


def test_a_computed_tensor_kept_as_an_attribute_is_neither_parameter_nor_state():
    nest = Nest()
    nest.last = nest(parameter(3))
    assert "last" not in nest.state_dict()
    assert "last" not in dict(nest.named_parameters())


def test_named_modules_gives_parents_first_and_the_root_without_a_name():
    names = [name for name, _ in Nest().named_modules()]
    assert names == ["", "layers.0", "layers.1.deep.0", "drop"]


def test_generators_are_found_once_and_by_name():
    nest = Nest()
    assert nest.generators() == {"rng": nest.rng}


def test_a_reference_from_a_child_to_its_parent_is_harmless():
    nest = Nest()
    nest.layers[0].parent = nest
    nest.layers.append(nest.layers)
    assert [name for name, _ in nest.named_parameters()] == NAMES


def test_two_tensors_under_one_name_are_refused():
    module = Module()
    module.d = {"a.b": parameter(2), "a": {"b": parameter(3)}}
    with pytest.raises(ValueError, match=r"two different things are called 'd\.a\.b'"):
        module.state_dict()


def deep_nest(depth):
    root = module = Module()
    for _ in range(depth):
        module.inner = Module()
        module = module.inner
    module.weight = parameter(2)
    return root


def test_a_very_deep_nest_is_walked_copied_and_switched_without_recursion():
    root = deep_nest(5000)
    assert root.count() == 2
    twin = copy.deepcopy(root)
    assert twin.eval().count() == 2
    assert twin.parameters()[0] is not root.parameters()[0]
    assert not twin.named_modules()[-1][1].training
    assert root.named_modules()[-1][1].training


# --------------------------------------------------------------------------------------------------------------------
# Mode, gradients, dtype, copies


def test_train_and_eval_reach_every_module_inside():
    nest = Nest()
    assert nest.eval() is nest
    assert not any(module.training for _, module in nest.named_modules())
    nest.train()
    assert all(module.training for _, module in nest.named_modules())


def test_evaluating_can_be_entered_again_and_restores_the_mode_of_each_entry():
    nest = nn.FeedForward(2, 3)
    eval_mode = nest.evaluating()
    for training in (True, False, True):
        nest.train(training)
        with eval_mode as inside, eval_mode:
            assert inside is nest
            assert not any(module.training for _, module in nest.named_modules())
        assert all(module.training is training for _, module in nest.named_modules())


def test_evaluating_restores_the_mode_of_each_module_also_after_an_error():
    nest = Nest()
    modes = [i % 3 != 1 for i, _ in enumerate(nest.named_modules())]
    for mode, (_, module) in zip(modes, nest.named_modules(), strict=True):
        module.training = mode
    with nest.evaluating() as inside:
        assert inside is nest
        assert not any(module.training for _, module in nest.named_modules())
    assert [module.training for _, module in nest.named_modules()] == modes
    with pytest.raises(KeyError), nest.evaluating():
        raise KeyError
    assert [module.training for _, module in nest.named_modules()] == modes


def test_the_scope_of_a_node_says_what_its_module_is():
    x = np.ones((3, 6), np.float32)
    mha = nn.MultiHeadAttention(6, 2, rng=0)
    scope = mha(x).node.scope[0]
    del mha
    assert scope.is_attention
    assert scope.detail == "2 heads"
    scope = nn.Linear(6, 2, rng=0)(x).node.scope[0]
    assert (scope.is_attention, scope.detail) == (False, "")


def test_zero_grad_resets_every_gradient():
    nest = Nest()
    (nest(parameter(13, 3)) ** 2).sum().backward()
    assert nest.layers[0].bias.grad is not None
    nest.zero_grad()
    assert all(p.grad is None for p in nest.parameters())


def test_astype_keeps_the_objects_and_their_ties_and_leaves_other_kinds_alone():
    nest = Nest()
    nest.ids = Tensor(np.arange(3))
    before = nest.parameters()
    assert nest.astype(np.float64) is nest
    assert all(a is b for a, b in zip(before, nest.parameters(), strict=True))
    assert {p.dtype for p in nest.parameters()} == {np.dtype(np.float64)}
    assert nest.ids.dtype == np.int64
    assert nest.tied is nest.first


def test_astype_is_seen_by_a_graph_that_used_the_old_values():
    linear = nn.Linear(2, 3, rng=0)
    y = linear(np.ones((1, 2), np.float32)).sum()
    linear.astype(np.float64)
    with pytest.raises(RuntimeError, match="written to"):
        y.backward()


def test_astype_refuses_integers():
    with pytest.raises(TypeError, match="floating"):
        nn.Linear(2, 3).astype(np.int64)


def test_deepcopy_is_independent_and_keeps_what_is_tied_and_shared():
    nest = Nest()
    twin = copy.deepcopy(nest)
    assert twin.tied is twin.first
    assert twin.first is not nest.first
    assert twin.drop.rng is twin.rng
    assert twin.rng is not nest.rng
    twin.first.assign_(np.zeros((2, 3)))
    assert nest.first.data.any()


def test_a_module_pickles():
    nest = Nest()
    twin = pickle.loads(pickle.dumps(nest))
    assert twin.tied is twin.first
    np.testing.assert_array_equal(twin.first.data, nest.first.data)


def test_a_module_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        nest = Nest()
        y = nest(parameter(3))
        seen = weakref.ref(nest)
        del nest
        assert seen() is None
        assert y.node.scope[0].module() is None
    finally:
        gc.enable()


def test_repr_is_a_table_of_names_shapes_and_counts():
    lines = repr(Nest()).splitlines()
    assert lines[0] == "Nest: 61 parameters"
    assert lines[1].split() == ["first", "(2,", "3)", "6"]
    assert lines[5] == "  tied                    (2, 3)  tied to first"
    assert lines[6].endswith("(11 constant)")


# --------------------------------------------------------------------------------------------------------------------
# Scopes


def scope_names(tensor):
    return [(entry.name, entry.class_name) for entry in tensor.node.scope]


def test_nodes_carry_the_path_of_modules_as_they_are_held():
    nest = Nest()
    y = nest(parameter(3))
    assert scope_names(y) == [("", "Nest"), ("layers.1.deep.0", "Linear")]
    assert scope_names(y.node.inputs[0]) == [("", "Nest"), ("layers.0", "Linear")]
    assert y.node.scope[1].module() is nest.layers[1]["deep"][0]
    assert isinstance(y.node.scope[0], Scope)


def test_a_module_appended_to_a_list_has_a_name_too():
    class Stack(Module):
        def __init__(self):
            self.layers = []
            for _ in range(2):
                self.layers.append(nn.Linear(3, 3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert scope_names(Stack()(parameter(3)))[1] == ("layers.1", "Linear")


def test_the_scope_is_left_when_forward_raises():
    class Broken(Module):
        def forward(self):
            raise KeyError("broken")

    with pytest.raises(KeyError):
        Broken()()
    assert (parameter(2) * 2).node.scope == ()


def test_a_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Module does not define forward"):
        Module()()


# --------------------------------------------------------------------------------------------------------------------
# State


def test_state_dict_gives_copies():
    nest = Nest()
    nest.state_dict()["first"][:] = 7
    assert not (nest.first == 7).any()


def test_load_state_dict_copies_into_the_same_tensors_in_their_own_dtype():
    nest, other = Nest(), Nest()
    state = {name: array * 3 for name, array in other.state_dict().items()}
    before = nest.parameters()
    assert nest.load_state_dict(state) == ([], [])
    assert all(a is b for a, b in zip(before, nest.parameters(), strict=True))
    np.testing.assert_array_equal(nest.layers[0].weight.data, other.layers[0].weight.data * 3)
    nest.load_state_dict({name: array.astype(np.float64) for name, array in state.items()})
    assert nest.layers[0].weight.dtype == np.float32


def test_one_error_names_everything_that_does_not_fit_and_nothing_is_changed():
    nest = Nest()
    before = nest.state_dict()
    state = {name: array * 3 for name, array in before.items()}
    del state["first"]
    state["layers.0.weight"] = np.zeros((5, 3), np.float32)
    state["layers.0.bias"] = np.zeros(5, np.complex64)
    state["extra"] = np.zeros(1)
    with pytest.raises(ValueError, match="does not fit Nest") as caught:
        nest.load_state_dict(state)
    message = str(caught.value)
    assert "missing first" in message
    assert "unexpected extra" in message
    assert "layers.0.weight has shape (5, 3), expected (3, 5) (transposed?" in message
    assert "layers.0.bias has dtype complex64" in message
    for name, array in nest.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_a_prefix_of_all_names_of_a_state_is_named(prefix):
    linear = nn.Linear(2, 3, rng=0)
    with pytest.raises(ValueError, match=f"all names begin with '{prefix}'"):
        linear.load_state_dict({prefix + name: array for name, array in linear.state_dict().items()})


def test_an_array_in_place_of_a_parameter_of_a_list_is_refused():
    class Layers(nn.Module):
        def __init__(self):
            self.weights = [Tensor(np.ones(3), requires_grad=True) for _ in range(2)]

    layers = Layers()
    layers.weights[1] = np.zeros(3)
    with pytest.raises(TypeError, match=r"weights\.1 is an array in a list of parameters: .* assign_\(array\)"):
        layers.state_dict()


def test_not_strict_returns_the_names_that_were_missing_and_unexpected_but_still_refuses_wrong_shapes():
    nest = Nest()
    state = nest.state_dict()
    del state["first"]
    state["extra"] = np.zeros(1)
    assert nest.load_state_dict(state, strict=False) == (["first"], ["extra"])
    with pytest.raises(ValueError, match="has shape"):
        nest.load_state_dict({"table": np.zeros(3)}, strict=False)


def test_a_tied_tensor_may_come_under_any_of_its_names_but_not_twice_and_differently():
    nest = Nest()
    state = nest.state_dict()
    wanted = state["first"] + 1
    state["first"] = state["tied"] = wanted
    nest.load_state_dict(state)
    state["tied"] = state.pop("first")
    nest.load_state_dict(state)
    np.testing.assert_array_equal(nest.first.data, wanted)
    assert nest.tied is nest.first
    state["first"] = wanted + 1
    with pytest.raises(ValueError, match="tied is tied to first, but differs"):
        nest.load_state_dict(state)


# --------------------------------------------------------------------------------------------------------------------
# Files


def test_a_module_saves_and_loads_bit_for_bit(tmp_path):
    nest, other = Nest(), Nest()
    for p in nest.parameters():
        p.assign_(np.random.default_rng(9).standard_normal(p.shape))
    nest.save(tmp_path / "nest.safetensors")
    other.load(tmp_path / "nest.safetensors")
    for name, array in other.state_dict().items():
        np.testing.assert_array_equal(array, nest.state_dict()[name])
    assert os.listdir(tmp_path) == ["nest.safetensors"]


def test_loading_the_file_of_another_module_names_the_file_and_all_that_differs(tmp_path):
    path = tmp_path / "linear.safetensors"
    nn.Linear(3, 5).save(path)
    with pytest.raises(CheckpointError, match=r"linear\.safetensors: .*missing first.*unexpected weight"):
        Nest().load(path)


ARRAYS = {
    "stretched": np.broadcast_to(np.array([1, 2], np.float32), (4, 2)),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "number": np.array(3.5),
    "empty": np.zeros((0, 3), np.float32),
    "truth": np.array([True, False, True]),
    "ids": np.array([[2**40, -1]], np.int64),
    "half": np.array([1.5, -2.25], np.float16),
    "byte": np.arange(5, dtype=np.uint8),
    "big-endian": np.arange(3, dtype=">f4"),
}


def test_every_shape_and_dtype_survives_a_file_exactly(tmp_path):
    path = tmp_path / "arrays.safetensors"
    save_arrays(path, ARRAYS, {"format": "pt"})
    read = load_arrays(path)
    for name, array in ARRAYS.items():
        assert read[name].shape == array.shape, name
        assert read[name].dtype == array.dtype.newbyteorder("="), name
        np.testing.assert_array_equal(read[name], array)
        assert read[name].flags.writeable, name
    np.testing.assert_array_equal(safetensors.numpy.load_file(path)["stretched"], [[1, 2]] * 4)


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_bfloat16_is_read_as_float32(tmp_path):
    values = np.array([1.0, -2.5, 3.140625, np.inf], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    (tmp_path / "b").write_bytes(safetensors_bytes({"x": entry("BF16", [2, 2], 0, 8)}, upper.tobytes()))
    read = load_arrays(tmp_path / "b")["x"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.reshape(2, 2))


HEADER = json.dumps({"x": entry("U8", [0], 0, 0)}).encode()
DAMAGE = {
    "empty": (b"", "it has 0 bytes"),
    "seven bytes": (b"1234567", "it has 7 bytes"),
    "absurd header length": ((2**63).to_bytes(8, "little") + b"{}", "cut short, or another format"),
    "header longer than the file": ((99).to_bytes(8, "little") + b"{}", "should have 99 bytes, but only 2"),
    "bad JSON": (safetensors_bytes(b"{'x': 1}"), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "JSON too deep": (safetensors_bytes(b"[" * 200_000), "nested too deeply"),
    "a list": (safetensors_bytes([1]), "must contain a JSON object"),
    "duplicate keys": (
        safetensors_bytes(b'{"x": {}, "x": {}}'),
        "'x' occurs twice",
    ),
    "an entry without a shape": (safetensors_bytes({"x": {"dtype": "F32"}}), "'x' lacks dtype, shape or data_offsets"),
    "an unknown dtype": (safetensors_bytes({"x": entry("F8_E4M3", [1], 0, 1)}, b"1"), "has dtype 'F8_E4M3'"),
    "a negative shape": (safetensors_bytes({"x": entry("F32", [-1], 0, 4)}, b"1234"), "'x' has the shape [-1]"),
    "negative offsets": (safetensors_bytes({"x": entry("F32", [1], -4, 0)}, b"1234"), "'x' has the offsets"),
    "three offsets": (
        safetensors_bytes({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"1234"),
        "'x' has the offsets",
    ),
    "a size that does not fit": (
        safetensors_bytes({"x": entry("F32", [3], 0, 8)}, bytes(8)),
        "F32 of shape (3,) takes 12 bytes",
    ),
    "offsets past the end": (safetensors_bytes({"x": entry("F32", [2], 0, 8)}, bytes(4)), "(cut short)"),
    "the last byte missing": (safetensors_bytes({"x": entry("F32", [1], 0, 4)}, bytes(3)), "(cut short)"),
    "trailing bytes": (safetensors_bytes({"x": entry("F32", [1], 0, 4)}, bytes(5)), "(trailing bytes)"),
    "a hole": (
        safetensors_bytes({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, bytes(12)),
        "(a hole)",
    ),
    "an overlap": (
        safetensors_bytes({"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)}, bytes(12)),
        "(an overlap)",
    ),
    "a header that takes the bytes of its own length": (
        (len(HEADER) + 8).to_bytes(8, "little") + HEADER,
        f"should have {len(HEADER) + 8} bytes, but only {len(HEADER)} follow",
    ),
    "a zip archive": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "a pickle": (pickle.dumps({"x": 1}), "another format"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_raises_one_kind_of_error_with_the_file_and_the_reason_and_changes_nothing(kind, tmp_path):
    content, reason = DAMAGE[kind]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    module = nn.Linear(2, 3, rng=0)
    before = module.state_dict()
    with pytest.raises(CheckpointError) as caught:
        module.load(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    np.testing.assert_array_equal(module.weight.data, before["weight"])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    nn.Linear(2, 3).save(path)
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(CheckpointError):
            load_arrays(path)


def test_a_failed_save_leaves_the_old_file_and_no_stray_one(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    module = nn.Linear(2, 3)
    module.save(path)
    before = path.read_bytes()

    def full_disk(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            module.save(path)

    def halfway():
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError("halfway")

    with pytest.raises(OSError, match="halfway"):
        halfway()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["weights.safetensors"]


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="'z' has dtype complex128"):
        save_arrays(tmp_path / "x", {"z": np.zeros(2, complex)})
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------------------------------
# Layers


def test_linear_is_x_times_weight_stored_in_out_plus_bias():
    linear = nn.Linear(3, 5, rng=0).astype(np.float64)
    linear.bias.assign_(np.arange(5.0))
    x = np.random.default_rng(1).standard_normal((2, 7, 3))
    np.testing.assert_allclose(linear(x).data, x @ linear.weight.data + np.arange(5.0), rtol=1e-14)
    assert nn.Linear(3, 5, bias=False).bias is None


def test_linear_weights_start_with_the_spread_that_keeps_the_spread_of_x():
    weight = nn.Linear(400, 300, rng=0).weight.data
    assert weight.std() == pytest.approx(400**-0.5, rel=0.02)
    assert nn.Linear(400, 300, std=0.02, rng=0).weight.data.std() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("layer", [nn.Linear(3, 5), nn.LayerNorm(3), nn.RMSNorm(3)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("shape", [(2, 1), (3, 2), ()])
def test_a_wrong_width_is_refused_also_where_numpy_would_broadcast(layer, shape):
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} expected a last axis of length 3"):
        layer(np.ones(shape, np.float32))


def test_embedding_takes_rows_and_adds_up_the_gradients_of_repeated_ids():
    embedding = nn.Embedding(5, 3, rng=0)
    y = embedding([[1, 4, 1]])
    np.testing.assert_array_equal(y.data, embedding.weight.data[[[1, 4, 1]]])
    y.backward(np.array([[[1, 1, 1], [2, 2, 2], [10, 10, 10]]]))
    np.testing.assert_array_equal(embedding.weight.grad, np.array([[0], [11], [0], [0], [2]]) * np.ones((5, 3)))


def test_embedding_names_a_bad_id_and_refuses_ids_that_are_not_integers():
    embedding = nn.Embedding(5, 3)
    with pytest.raises(IndexError, match=r"ids\[0, 1\] is 5, expected 0 to 4"):
        embedding([[0, 5]])
    with pytest.raises(IndexError, match="-1"):
        embedding([-1])
    with pytest.raises(TypeError, match="ids must be integers, got float64"):
        embedding([1.0])
    with pytest.raises(TypeError, match="got bool"):
        embedding([True])


def test_embedding_of_no_ids_has_no_rows():
    embedding = nn.Embedding(5, 3)
    y = embedding(np.zeros((1, 0), int))
    assert y.shape == (1, 0, 3)
    y.backward(np.zeros((1, 0, 3)))
    assert not embedding.weight.grad.any()


def test_layer_norm_and_rms_norm_agree_with_their_formulas():
    x = np.random.default_rng(0).standard_normal((7, 5))
    layer, rms = nn.LayerNorm(5, eps=0.1).astype(np.float64), nn.RMSNorm(5, eps=0.1).astype(np.float64)
    weight, bias = np.arange(1.0, 6), np.arange(5.0)
    layer.weight.assign_(weight)
    layer.bias.assign_(bias)
    rms.weight.assign_(weight)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * weight + bias
    np.testing.assert_allclose(layer(x).data, expected, rtol=1e-13)
    np.testing.assert_allclose(rms(x).data, x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight, rtol=1e-13)
    assert nn.LayerNorm(5, bias=False).bias is None


@pytest.mark.parametrize(
    ("activation", "values"),
    [
        ("gelu", [0.34573123, -0.15426877]),
        ("gelu_tanh", [0.34571401, -0.15428599]),
        ("relu", [0.5, 0.0]),
    ],
)
def test_feed_forward_applies_the_activation_of_its_name(activation, values):
    f = nn.FeedForward(2, 2, activation).astype(np.float64)
    f.c_fc.weight.assign_(np.eye(2))
    f.c_proj.weight.assign_(np.eye(2))
    np.testing.assert_allclose(f(np.array([0.5, -0.5])).data, values, atol=1e-8)


def test_swiglu_multiplies_by_a_gate_and_passes_the_check(rng):
    f = nn.FeedForward(3, 5, "swiglu", rng=0).astype(np.float64)
    assert [name for name, _ in f.named_parameters() if name.endswith("weight")] == [
        "c_fc.weight",
        "c_gate.weight",
        "c_proj.weight",
    ]
    x = rng.standard_normal((2, 7, 3))
    gate = x @ f.c_gate.weight.data
    hidden = gate / (1 + np.exp(-gate)) * (x @ f.c_fc.weight.data)
    np.testing.assert_allclose(f(x).data, hidden @ f.c_proj.weight.data, rtol=1e-13)
    assert gradcheck(f, x[0], order=2).ok


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of 'gelu', 'gelu_tanh', 'relu', 'swiglu', got 'swish'"):
        nn.FeedForward(2, 3, "swish")


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout_in_eval_is_the_identity_with_gradient_one(p):
    drop = nn.Dropout(p, rng=0).eval()
    x = parameter(3, 5)
    y = drop(x)
    y.backward(np.full((3, 5), 7.0))
    np.testing.assert_array_equal(y.data, x.data)
    np.testing.assert_array_equal(x.grad, np.full((3, 5), 7.0))


def test_dropout_of_everything_gives_zeros_and_zero_gradient():
    x = parameter(3, 5)
    y = nn.Dropout(1.0)(x)
    y.backward(np.ones((3, 5)))
    assert not y.data.any()
    assert not x.grad.any()


def test_dropout_keeps_the_mean_the_dtype_and_uses_one_mask_for_value_and_gradient():
    x = Tensor(np.ones((200, 300), np.float32), requires_grad=True)
    y = nn.Dropout(0.3, rng=0)(x)
    y.backward(np.ones_like(x.data))
    kept = y.data != 0
    assert kept.mean() == pytest.approx(0.7, abs=0.01)
    np.testing.assert_allclose(y.data[kept], 1 / 0.7, rtol=1e-6)
    np.testing.assert_array_equal(x.grad, y.data)
    assert y.dtype == x.grad.dtype == np.float32
    assert sample_dropout_mask(np.random.default_rng(0), 0.3, (2,), np.dtype(np.float32)).dtype == np.float32


def test_dropout_draws_from_its_own_generator_only():
    before = np.random.get_state()[1].copy()
    drop = nn.Dropout(0.5, rng=7)
    x = np.ones((3, 5), np.float32)
    first, second = drop(x).data, drop(x).data
    assert (first != second).any()
    np.testing.assert_array_equal(nn.Dropout(0.5, rng=np.random.default_rng(7))(x).data, first)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_dropout_refuses_a_p_that_is_not_a_probability(p):
    with pytest.raises(ValueError, match="p must be a probability"):
        nn.Dropout(p)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 3), nn.LayerNorm(3), nn.RMSNorm(3), nn.FeedForward(3, 5), nn.Dropout(0.5)],
    ids=lambda m: type(m).__name__,
)
def test_float32_stays_float32_through_every_layer_and_back(layer):
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    y = layer(x)
    y.backward(np.ones((2, 3)))
    assert y.dtype == x.grad.dtype == np.float32
    assert all(p.grad.dtype == np.float32 for p in layer.parameters())


def test_every_layer_is_one_node_or_two():
    x = Tensor(np.ones((2, 3), np.float32))
    for layer in (nn.Linear(3, 5), nn.LayerNorm(3), nn.RMSNorm(3)):
        assert all(not getattr(i, "node", None) for i in layer(x).node.inputs)
    assert nn.Embedding(5, 3)([1]).node.op is ops.take


def test_layers_work_without_gradients():
    with no_grad():
        y = nn.FeedForward(3, 5)(np.ones((2, 3), np.float32))
    assert y.node is None


# --------------------------------------------------------------------------------------------------------------------
# Assignments that would lose a parameter or hide a method


@pytest.mark.parametrize("value", [np.ones((5, 14)), [1.0], 2.0])
def test_an_array_in_the_place_of_a_parameter_is_refused_with_the_call_that_writes_it(value):
    mha = nn.MultiHeadAttention(5, 2, rng=0)
    with pytest.raises(TypeError, match=r"wq is a tensor of MultiHeadAttention, .*wq\.assign_\(array\)"):
        mha.wq = value
    assert isinstance(mha.wq, Tensor)
    mha.wq = Tensor(np.ones((5, 4)), requires_grad=True)
    mha.bq = None


CONTAINERS = [set, frozenset, collections.deque, collections.UserList, lambda xs: collections.UserDict(enumerate(xs))]
CONTAINERS += [lambda xs: dict(enumerate(xs)).values(), lambda xs: types.MappingProxyType(dict(enumerate(xs)))]
CONTAINERS += [
    lambda xs: types.SimpleNamespace(first=next(iter(xs))),
    lambda xs: collections.ChainMap(dict(enumerate(xs))),
]


@pytest.mark.parametrize("container", [*CONTAINERS, lambda xs: np.array([*xs, None], object)])
def test_a_tensor_or_module_in_a_container_that_is_not_searched_is_refused(container):
    class Holder(nn.Module):
        pass

    for held in (Tensor([1.0]), nn.Dropout(0.5)):
        holder = Holder()
        with pytest.raises(TypeError, match=r"parts is a .* with a .*: use a list, tuple or dict"):
            holder.parts = container([held])
        assert not hasattr(holder, "parts")
    holder.parts = container(["text"])


@pytest.mark.parametrize("name", ["count", "parameters", "train", "state_dict"])
def test_an_attribute_with_the_name_of_a_method_is_refused(name):
    with pytest.raises(AttributeError, match=f"{name} is a method of Module"):
        setattr(nn.Dropout(0.5), name, 0)


def test_eval_mode_of_one_thread_leaves_the_other_in_train_mode():
    model, seen = nn.Dropout(0.5, rng=0), []
    eval_mode = model.evaluating()
    with eval_mode:
        threading.Thread(target=lambda: seen.append(model.training)).start()
        with eval_mode:
            pass
        seen.append(model.training)
    assert [*seen, model.training] == [True, False, True]


def test_the_order_in_which_two_threads_leave_eval_mode_does_not_matter():
    model, entered, left = nn.Dropout(0.5, rng=0), threading.Event(), threading.Event()
    seen = []

    def evaluate():
        with model.evaluating():
            entered.set()
            left.wait()
            seen.append(model.training)
        seen.append(model.training)

    thread = threading.Thread(target=evaluate)
    with model.evaluating():
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert [model.training, *seen] == [True, False, True]


def test_a_mode_that_is_set_while_evaluating_holds_afterwards():
    model = nn.Dropout(0.5, rng=0)
    with model.evaluating():
        model.train()
        assert not model.training
        model.eval()
    assert not model.training
