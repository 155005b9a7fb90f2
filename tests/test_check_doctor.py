"""Each sick training step is diagnosed by name; sound ones are silent."""

import json
import threading

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import Tensor, nn, ops, optim
from tinygrad_mha.check import doctor

V = 11
IDS = np.random.default_rng(0).integers(0, V, (3, 7))


def gpt(**settings):
    sizes = {"vocab_size": V, "block_size": 7, "n_layer": 2, "n_head": 2, "n_embd": 6, **settings}
    return nn.GPT(nn.GPTConfig(**sizes), seed=0)


class Net(nn.Module):
    """Two layers; `between` is what a test puts between them."""

    def __init__(self, between=lambda x: x.tanh(), dropout=0.0):
        self.first, self.second = nn.Linear(5, 3, rng=0), nn.Linear(3, 2, rng=1)
        self.drop = nn.Dropout(dropout, rng=2)
        self.between = [between]

    def forward(self, x):
        return self.second(self.drop(self.between[0](self.first(x))))


X = np.random.default_rng(1).standard_normal((7, 5)).astype(np.float32)
TARGETS = np.array([0, 1, 1, 0, 1, 0, 0])


def step(model, optimizer=None):
    optimizer and optimizer.zero_grad()
    ops.cross_entropy(model(X), TARGETS).backward()
    optimizer and optimizer.step()


def diagnose(model, run=step, optimizer=None):
    with doctor(model, optimizer) as d:
        run(model, optimizer)
    return d


def shown(d):
    """The findings as "name: message | cause"."""
    return [f"{f.name}: {f.message} | {f.cause}" for f in d.findings]


def only(d, name, *words):
    """There is one finding, of this name, and its text contains the words."""
    assert [f.name for f in d.findings] == [name], shown(d)
    for word in words:
        assert word in shown(d)[0], shown(d)
    assert not d.ok


# --------------------------------------------------------------------------------------------------------------------
# Sound steps


def test_training_a_gpt_with_an_optimizer_and_clipping_is_sound():
    model = gpt(dropout=0.1)
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=1e-3)
    d = doctor(model, optimizer)
    for _ in range(3):
        with d:
            optimizer.zero_grad()
            model.loss(IDS[:, :-1], IDS[:, 1:]).backward(leaves_only=True)
            optim.clip_grad_norm(optimizer.parameters, 1.0)
            optimizer.step()
        assert d.ok
        assert d.findings == []
        assert str(d) == "GPT: passed"


def test_a_step_computes_the_same_numbers_with_and_without_a_doctor():
    losses = []
    for observe in (False, True):
        model = gpt(dropout=0.1)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            if observe:
                with doctor(model, optimizer):
                    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
                    loss.backward()
                    optimizer.step()
            else:
                loss = model.loss(IDS[:, :-1], IDS[:, 1:])
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "n_kv_head": 1, "n_embd": 8},
        {"position": "alibi", "score": "sinks"},
        {"position": "relative", "window": 3, "tie_weights": False},
        {"score": "softcap", "norm_first": False},
    ],
    ids=str,
)
def test_every_option_of_a_gpt_is_sound(settings):
    d = diagnose(gpt(**settings), lambda model, _: model.loss(IDS[:, :-1], IDS[:, 1:]).backward())
    assert d.ok, d


def test_frozen_layers_in_eval_mode_are_sound():
    model = gpt(dropout=0.1)
    for p in model.h[0].parameters():
        p.requires_grad = False
    model.h[0].eval()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    d = diagnose(model, lambda model, _: model.loss(IDS[:, :-1], IDS[:, 1:]).backward(), optimizer)
    assert d.ok, d


def test_a_part_of_a_trained_layer_in_eval_mode_is_reported():
    model = gpt(dropout=0.1)
    model.h[0].attn.eval()
    d = diagnose(model, lambda model, _: model.loss(IDS[:, :-1], IDS[:, 1:]).backward())
    only(d, "mode", "eval mode in a training step", "h.0.attn.heads.dropout")


def test_targets_that_equal_the_positions_are_no_copy_of_the_inputs():
    d = diagnose(gpt(), lambda model, _: model.loss(IDS[0], np.arange(7)).backward())
    assert d.ok, d


def test_accumulated_gradients_in_one_step_are_sound():
    model = gpt()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with doctor(model, optimizer) as d:
        optimizer.zero_grad()
        for ids in (IDS[:1], IDS[1:]):
            (model.loss(ids[:, :-1], ids[:, 1:]) * 0.5).backward()
        optimizer.step()
    assert d.ok, d


def test_padding_masks_and_ignored_targets_are_sound():
    """-inf is where masks put it: by allow, as a bias, and in a user's own where."""
    mha = nn.MultiHeadAttention(5, 2, d_k=3, rng=0)
    key_allow = np.array([[False, False, True, True], [True] * 4])
    bias = np.where(np.tri(4, dtype=bool), 0.0, -np.inf).astype(np.float32)
    x = X[:4] + np.zeros((2, 4, 5), np.float32)
    w = np.random.default_rng(3).standard_normal((2, 4, 5))

    def run(mha, _):
        y = mha(x, key_allow=key_allow, causal=True) + mha(x, bias=bias, key_allow=key_allow, trace=True)[0]
        scores = ops.where(np.tri(5, dtype=bool), y.mT @ y, -np.inf)
        ((y + scores.softmax()[:, :4]) * w.astype(np.float32)).sum().backward()

    assert diagnose(mha, run).ok
    model = gpt()
    targets = np.where(IDS == 3, -100, IDS)
    assert diagnose(model, lambda model, _: model.loss(IDS[:, :-1], targets[:, 1:]).backward()).ok


def test_evaluating_under_no_grad_is_sound_in_eval_mode():
    model = gpt(dropout=0.1).eval()
    with doctor(model) as d, tg.no_grad():
        model.loss(IDS[:, :-1], IDS[:, 1:])
    assert d.ok, d


def test_translators_are_sound():
    model = nn.Transformer(V, V, 8, 2, 1, 16, 9, pad=0)
    copied = [[3, 4, 5, 2], [6, 2, 0, 0]]
    started = np.insert(copied, 0, 1, axis=1)
    d = diagnose(model, lambda model, _: model.loss(copied, started).backward())
    assert d.ok, d


def test_another_model_in_train_mode_and_metrics_inside_the_step_are_sound():
    other = Net(dropout=0.5)

    def run(model, _):
        step(model)
        with tg.no_grad():
            other(X)
            ops.mean(ops.exp(model.first.weight))

    assert diagnose(Net(dropout=0.5), run).ok


# --------------------------------------------------------------------------------------------------------------------
# Sick ones: gradients


def test_a_parameter_that_is_never_used_is_named():
    model = Net()
    model.extra = nn.Linear(3, 2, rng=5)
    only(diagnose(model), "gradient", "extra.weight, extra.bias", "never used")


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda x: x.detach().tanh(), ["detach()", "'tanh'", "test_check_doctor.py"]),
        (lambda x: Tensor(x.numpy()).tanh(), [".numpy()", "'tanh'"]),
        (lambda x: ops.tanh(Tensor(np.exp(x.numpy()))), [".numpy()", "'linear' in first"]),
        (tg.no_grad(lambda x: x.tanh()), ["no_grad", "'tanh'"]),
        (lambda x: ops.add(x.numpy(), Tensor(np.zeros(3, np.float32))), [".numpy() or .data", "'add'"]),
    ],
)
def test_where_the_path_of_a_gradient_is_cut_is_named(between, words):
    only(diagnose(Net(between)), "gradient", "first.weight, first.bias", *words)


def test_a_result_that_is_dropped_is_named():
    only(
        diagnose(Net(lambda x: Tensor(np.ones((7, 3), np.float32)))),
        "gradient",
        "first.weight",
        "'linear' in first",
        "dropped",
    )


def test_a_detached_parameter_is_named():
    model = Net()
    model.second.forward = lambda x: ops.linear(x, model.second.weight.detach(), model.second.bias)
    only(diagnose(model), "gradient", "second.weight", "detach()", "'linear'")


def test_a_step_without_backward_is_named():
    only(diagnose(Net(), lambda model, _: model(X)), "gradient", "backward was not called")


def test_gradients_of_an_earlier_step_are_named():
    model = Net()
    step(model)
    only(diagnose(model), "cleared", "first.weight", "zero_grad")


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def names(d):
    return [f.name for f in d.findings]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda x: (x * 0.0).log() + x, ["-inf in 21 of 21", "'log'", "test_check_doctor.py"]),
        (lambda x: (x * 1000.0).exp(), ["inf in", "'exp'"]),
        (lambda x: x / (x - x), ["'div'"]),
        (lambda x: (-(x * x) - 1.0).sqrt(), ["nan", "'sqrt'"]),
    ],
)
def test_the_first_value_that_is_not_finite_is_named_with_its_line(between, words):
    d = diagnose(Net(between))
    assert names(d)[0] == "finite"
    for word in words:
        assert word in shown(d)[0], shown(d)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_minus_infinity_that_becomes_nan_is_named_at_the_operation_that_makes_nan_of_it():
    def between(x):
        masked = ops.where(np.zeros((7, 3), bool), x, -np.inf)
        return (masked - masked.max(axis=-1, keepdims=True)).exp()

    d = diagnose(Net(between))
    assert "'sub'" in shown(d)[0], shown(d)


def test_an_input_or_parameter_that_is_nan_before_the_step_is_named():
    def run(model, _):
        ops.cross_entropy(model(np.full((7, 5), np.nan, np.float32)), TARGETS).backward()

    d = diagnose(Net(), run)
    assert "an array of shape (7, 5) has nan in 35 of 35 elements before the step" in shown(d)[0], shown(d)
    model = Net()
    model.first.bias.data[1] = np.inf
    d = diagnose(model)
    assert "first.bias has inf in 1 of 3 elements before the step" in shown(d)[0], shown(d)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_derivative_that_is_not_finite_though_the_values_are_is_named():
    d = diagnose(Net(lambda x: (x * 0.0).sqrt()))
    assert names(d)[0] == "finite", shown(d)
    assert "gradients are not finite: first.weight" in shown(d)[0]
    assert "the derivative of 'sqrt'" in shown(d)[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parameters_that_a_step_makes_infinite_are_named():
    model = Net()
    model.second.weight.data[:] = 1e38
    optimizer = optim.SGD(model.parameters(), lr=1e30)
    d = diagnose(model, lambda model, o: ((model(X) * 1e-30).sum().backward(), o.step()), optimizer)
    assert "is not finite after the step" in shown(d)[-1], shown(d)


@pytest.mark.parametrize("where", ["constant", "input"])
def test_float64_that_sneaks_in_is_named(where):
    if where == "input":
        d = diagnose(Net(), lambda model, _: ops.cross_entropy(model(X.astype(np.float64)), TARGETS).backward())
        only(d, "dtype", "an array of shape (7, 5)", "'linear' in first")
    else:
        only(diagnose(Net(lambda x: x * np.ones(3))), "dtype", "an array of shape (3,)", "'mul'")


def test_a_wanted_conversion_is_no_change_of_dtype():
    assert diagnose(Net(), lambda model, _: ops.cross_entropy(model(X).astype(np.float64), TARGETS).backward()).ok


# --------------------------------------------------------------------------------------------------------------------
# Writes


def test_a_tracked_write_raises_and_is_explained():
    model = Net()
    d = doctor(model)

    def run():
        with d:
            loss = ops.cross_entropy(model(X), TARGETS)
            model.second.weight.assign_(np.zeros((3, 2)))
            loss.backward()

    with pytest.raises(RuntimeError, match="was written to after 'linear' used it"):
        run()
    assert "edited" in names(d)
    assert "second.weight was written to before backward" in str(d)
    assert d.problem.startswith("RuntimeError: the tensor of shape (3, 2) was written to")


def test_a_write_through_the_array_is_found_though_nothing_raises():
    def run(model, _):
        loss = ops.cross_entropy(model(X), TARGETS)
        model.second.weight.data[0] = 7.0
        loss.backward()

    only(diagnose(Net(), run), "edited", "second.weight", "t.data[0] = 1", "'linear' in second")


def test_an_optimizer_step_before_backward_is_explained():
    model = Net()
    step(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    d = doctor(model)

    def run():
        with d:
            loss = ops.cross_entropy(model(X), TARGETS)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()

    with pytest.raises(RuntimeError, match="was written to after"):
        run()
    assert "edited" in names(d)


# --------------------------------------------------------------------------------------------------------------------
# Modes, loss, optimizer


def test_dropout_in_eval_mode_during_training_is_named():
    only(diagnose(Net(dropout=0.5).eval()), "mode", "eval mode in a training step: Net, drop")


def test_a_model_without_dropout_is_in_the_wrong_mode_too():
    only(diagnose(Net().eval()), "mode", "eval mode in a training step: Net", "model.train()")
    model = gpt()
    with doctor(model) as d, tg.no_grad():
        model(IDS)
    only(d, "mode", "train mode under no_grad: GPT", "model.eval()")


def test_part_of_a_model_without_dropout_may_be_in_eval_mode():
    model = Net()
    model.first.eval()
    assert diagnose(model).ok


def test_dropout_in_train_mode_under_no_grad_is_named():
    model = Net(dropout=0.5)
    with doctor(model) as d, tg.no_grad():
        model(X)
    only(d, "mode", "train mode under no_grad: drop", "model.eval()")


def test_a_module_that_reads_its_mode_by_itself_is_named():
    class Noisy(nn.Module):
        def forward(self, x):
            return x * 2.0 if self.training else x

    model = Net()
    model.noisy = Noisy().eval()
    only(diagnose(model), "mode", "noisy")


def test_targets_that_are_the_inputs_are_named():
    def run(model, _):
        model.loss(IDS, IDS).backward()

    only(diagnose(gpt(), run), "loss", "targets are the inputs", "not shifted")
    for targets in (IDS[:, :-1], IDS[:, :-1].ravel()):

        def cut(model, _, targets=targets):
            logits = (
                model(IDS)[:, :-1].reshape(*targets.shape, V)
                if targets.ndim == 2
                else model(IDS[:, :-1]).reshape(-1, V)
            )
            ops.cross_entropy(logits, targets).backward()

        only(diagnose(gpt(), cut), "loss", "not shifted")
    counting_in_part = np.array([[3, 4, 5, 1, 2, 0]])
    only(
        diagnose(gpt(), lambda model, _: model.loss(counting_in_part, counting_in_part).backward()),
        "loss",
        "not shifted",
    )
    padded = np.where(IDS == 3, -100, IDS)
    only(diagnose(gpt(), lambda model, _: model.loss(IDS, padded).backward()), "loss", "not shifted")


def test_a_loss_that_no_parameter_changes_is_named():
    def of_other_numbers(model, _):
        model(X)
        (Tensor(X, requires_grad=True) ** 2).sum().backward()

    assert "loss: the loss does not depend on any parameter of the model | " in shown(diagnose(Net(), of_other_numbers))
    d = diagnose(Net(), lambda model, _: model(X).softmax().sum().backward())
    only(d, "loss", "the gradient of every parameter is 0")
    only(diagnose(gpt(), lambda model, _: model(IDS).softmax().sum().backward()), "loss", "the loss is constant")


def test_a_loss_without_gradient_raises_and_is_explained():
    d = doctor(Net())

    def run():
        with d, tg.no_grad():
            ops.cross_entropy(d.model(X), TARGETS).backward()

    with pytest.raises(ValueError, match="does not require grad"):
        run()
    assert "loss" in names(d)


def test_parameters_that_no_optimizer_holds_are_named():
    model = Net()
    only(diagnose(model, optimizer=optim.SGD(model.first.parameters())), "optimizer", "does not hold second.weight")


def test_an_optimizer_of_another_model_is_named():
    model, other = Net(), Net()
    d = diagnose(model, optimizer=optim.SGD(other.parameters()))
    assert names(d) == ["optimizer", "optimizer"]
    assert "not in the model" in shown(d)[1]


def test_a_learning_rate_of_zero_is_named():
    model = Net()
    only(diagnose(model, optimizer=optim.SGD(model.parameters(), lr=0.0)), "optimizer", "learning rate is 0")


# --------------------------------------------------------------------------------------------------------------------
# The block


def test_any_exception_passes_unchanged_and_the_findings_stay():
    model = Net(lambda x: x * np.ones(3))
    error = KeyError("mine")

    def run():
        with doctor(model) as d:
            failed.append(d)
            model(X)
            raise error

    failed = []
    with pytest.raises(KeyError) as raised:
        run()
    assert raised.value is error
    assert failed[0].problem == "KeyError: 'mine'"
    assert names(failed[0]) == ["dtype"]
    assert not failed[0].ok


def test_two_doctors_at_a_time_are_refused_and_the_first_goes_on():
    model = Net()
    with doctor(model) as d:
        with pytest.raises(RuntimeError, match="another doctor observes this thread"), doctor(model):
            pass
        model.between[0] = lambda x: x.detach()
        step(model)
    assert names(d) == ["gradient"]


def test_other_threads_are_not_observed():
    model, other = Net(), Net(dropout=0.5).eval()
    with doctor(model) as d:
        thread = threading.Thread(target=step, args=(other,))
        thread.start()
        thread.join()
        step(model)
    assert d.ok, d


def test_nodes_know_their_line_only_while_the_doctor_is_on():
    x = Tensor(X, requires_grad=True)
    with doctor(Net()):
        y = x * 2.0
    assert y.node.source.split("/")[-1].startswith("test_check_doctor.py:")
    assert (x * 2.0).node.source is None


def test_nothing_of_the_step_is_held_afterwards():
    model = Net()
    with doctor(model) as d:
        step(model)
    assert not [x for x in vars(d).values() if isinstance(x, list) and x]


def test_the_verdict_is_text_data_and_a_table():
    d = diagnose(Net(dropout=0.5).eval())
    assert json.loads(json.dumps(d.to_dict()))["findings"][0]["name"] == "mode"
    assert "eval mode in a training step" in d._repr_html_()
    assert str(d).startswith("Net: FAILED (mode)")


def test_only_modules_are_observed():
    with pytest.raises(TypeError, match="doctor observes a Module, got list"):
        doctor([])


def test_a_block_without_a_step_proves_nothing():
    with doctor(nn.Linear(3, 2, rng=0)) as d:
        pass
    assert not d.ok
    assert "no operation was observed" in str(d)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"an optimizer of tg\.optim, got list"):
        doctor(nn.Linear(3, 2, rng=0), [1.0])
