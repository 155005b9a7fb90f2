import dataclasses
import inspect
import itertools
import math

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.kernels import memory
from tinygrad_mha.optim import SGD, Adam, AdamW, clip_grad_norm, decay_groups, global_norm, warmup_cosine


def parameter(value, grad=None, dtype=np.float64):
    p = tg.Tensor(value, requires_grad=True, dtype=dtype)
    p.grad = None if grad is None else np.array(grad, dtype)
    return p


# ------------------------------------------------------------------------------------------------------ one step each


def test_adamw_decays_the_weight_before_the_step():
    p = parameter(1.0, 0.5)
    AdamW([p], lr=0.1, weight_decay=0.1).step()
    assert p.item() == pytest.approx(0.8900000020, abs=1e-10)


@pytest.mark.parametrize(("grad", "moved"), [(1e-3, -0.0999990), (1.0, -0.0999999990), (1e3, -0.1)])
def test_the_first_adam_step_does_not_depend_on_the_scale_of_the_gradient(grad, moved):
    p = parameter(0.0, grad)
    Adam([p], lr=0.1).step()
    assert p.item() == pytest.approx(moved, abs=1e-9)


def test_adam_counts_its_steps_through_save_and_load():
    p, q = parameter(0.3, 0.7), parameter(0.3, 0.7)
    one, two = Adam([p], lr=0.1), Adam([q], lr=0.1)
    one.step()
    two.step()
    three = Adam([q], lr=0.9)
    three.load_state_dict(two.state_dict())
    p.grad, q.grad = np.array(-0.2), np.array(-0.2)
    one.step()
    three.step()
    assert p.item() == q.item()
    assert three.state[0]["step"] == 2
    assert three.lr == 0.1


def test_adam_without_decoupling_scales_the_decay_with_the_gradient():
    p = parameter(1.0, 0.5)
    Adam([p], lr=0.1, weight_decay=0.1).step()
    assert p.item() == pytest.approx(0.9, abs=1e-8)  # g + 0.1 p is positive, and the first step is lr * sign


def test_sgd_step_of_a_scalar_parameter_that_was_broadcast():
    v = tg.Tensor(0.5, requires_grad=True)
    (np.ones(2, np.float32) * v).sum().backward()
    SGD([v], lr=0.1).step()
    assert v.shape == ()
    assert v.item() == pytest.approx(0.3, abs=1e-7)


def test_sgd_with_momentum_and_decay_by_hand():
    p = parameter(2.0, 1.0)
    sgd = SGD([p], lr=0.5, momentum=0.5, weight_decay=0.25)
    sgd.step()  # b = 1 + 0.5 = 1.5
    assert p.item() == 1.25
    sgd.step()  # b = 0.75 + 1 + 0.3125 = 2.0625
    assert p.item() == 0.21875


@pytest.mark.parametrize("make", [SGD, lambda p: SGD(p, momentum=0.9), Adam, AdamW])
def test_float32_scalars_stay_float32_arrays_through_a_step(make):
    w = tg.Tensor(np.array(1.0, np.float32), requires_grad=True)
    (w * 1 + w * 2 + w * 3).backward()
    assert isinstance(w.grad, np.ndarray)
    assert (w.grad.shape, w.grad.dtype, w.grad.item()) == ((), np.float32, 6.0)
    optimizer = make([w])
    optimizer.step()
    assert (w.shape, w.dtype) == ((), np.float32)
    assert all(a.dtype == np.float32 for a in optimizer.state[0].values() if isinstance(a, np.ndarray))


def test_numpy_scalar_options_do_not_promote_float32():
    p = parameter([1.0, 2.0, 3.0], [0.1, 0.2, 0.3], np.float32)
    adam = AdamW([p], lr=np.float64(0.1), betas=(np.float64(0.9), np.float64(0.99)), weight_decay=np.float64(0.1))
    adam.step()
    assert p.dtype == adam.state[0]["m"].dtype == adam.state[0]["v"].dtype == np.float32


@pytest.mark.parametrize("make", [lambda p: SGD(p, momentum=0.9, weight_decay=0.1), Adam, AdamW])
def test_a_parameter_without_gradient_gets_neither_decay_nor_state(make):
    with_grad, without = parameter([1.0, 2.0], [0.5, 0.5]), parameter([3.0, 4.0, 5.0])
    optimizer = make([without, with_grad])
    optimizer.step()
    assert without.numpy().tolist() == [3.0, 4.0, 5.0]
    assert optimizer.state[0] == {}
    assert optimizer.state[1]
    assert with_grad.numpy()[0] != 1.0


def test_a_step_does_not_change_the_gradients():
    p = parameter([1.0, 2.0], [0.5, -0.25])
    for optimizer in (SGD([p], momentum=0.9, weight_decay=0.1), Adam([p], weight_decay=0.1), AdamW([p])):
        optimizer.step()
        assert p.grad.tolist() == [0.5, -0.25]


def test_steps_write_in_place_and_make_graphs_stale():
    p = parameter([1.0, 2.0])
    memory = p.data
    y = (p * p).sum()
    y.backward()
    AdamW([p]).step()
    assert np.shares_memory(memory, p.data)
    with pytest.raises(RuntimeError, match="written to"):
        y.backward()


def test_zero_grad_deletes_all_gradients():
    p, q = parameter([1.0], [1.0]), parameter([1.0, 2.0], [1.0, 1.0])
    SGD([{"params": [p]}, {"params": q}]).zero_grad()
    assert p.grad is None
    assert q.grad is None


# -------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=0.1)])
def test_a_parameter_given_twice_is_updated_once(make):
    p, q = parameter([1.0, 2.0], [0.5, -0.5]), parameter([1.0, 2.0], [0.5, -0.5])
    once, twice = make([p]), make([q, q])
    for _ in range(3):
        once.step()
        twice.step()
    assert np.array_equal(p.numpy(), q.numpy())
    assert len(twice.parameters) == 1


def test_a_tied_weight_moves_by_the_sum_of_both_gradients():
    rng = np.random.default_rng(0)
    start, x = rng.standard_normal((5, 5)), rng.standard_normal((3, 5))
    tied = parameter(start)
    first, second = parameter(start), parameter(start)
    (tg.Tensor(x) @ tied).tanh().__matmul__(tied).tanh().sum().backward()
    (tg.Tensor(x) @ first).tanh().__matmul__(second).tanh().sum().backward()
    assert np.allclose(tied.grad, first.grad + second.grad, atol=1e-12)
    assert clip_grad_norm([tied, tied], math.inf) == pytest.approx(np.linalg.norm(tied.grad))
    first.grad = first.grad + second.grad
    Adam([tied, tied]).step()
    Adam([first]).step()
    assert np.allclose(tied.numpy(), first.numpy(), atol=1e-12)


def test_the_tied_head_of_a_gpt_is_one_parameter_that_stays_tied():
    config = tg.nn.GPTConfig(vocab_size=11, block_size=7, n_layer=1, n_head=2, n_embd=6)
    tied = tg.nn.GPT(config, seed=0).astype(np.float64)
    untied = tg.nn.GPT(dataclasses.replace(config, tie_weights=False), seed=0).astype(np.float64)
    untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.wte.weight.numpy()})
    idx, targets = np.random.default_rng(1).integers(11, size=(2, 3, 7))
    for model in (tied, untied):
        model.loss(idx, targets).backward()
    both = untied.wte.weight.grad + untied.lm_head.weight.grad
    assert np.allclose(tied.wte.weight.grad, both, rtol=0, atol=1e-12)

    groups = decay_groups(tied, 0.1)
    assert sum(p is tied.wte.weight for group in groups for p in group["params"]) == 1
    assert tied.count() == untied.count() - 11 * 6
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in tied.parameters()))
    assert clip_grad_norm([*tied.parameters(), tied.lm_head.weight], math.inf) == pytest.approx(norm, rel=1e-12)

    untied.wte.weight.grad = both
    AdamW(groups, lr=0.1).step()
    AdamW(decay_groups(untied, 0.1), lr=0.1).step()
    assert np.allclose(tied.wte.weight.numpy(), untied.wte.weight.numpy(), rtol=0, atol=1e-12)
    assert tied.lm_head.weight is tied.wte.weight


def test_groups_have_their_own_options():
    p, q = parameter([1.0], [0.0]), parameter([1.0], [0.0])
    AdamW([{"params": [p], "weight_decay": 0.5}, {"params": iter([q]), "lr": 1.0}], lr=0.1, weight_decay=0.0).step()
    assert p.item() == pytest.approx(0.95)
    assert q.item() == 1.0


def test_setting_the_learning_rate_sets_that_of_every_group():
    p, q = parameter([1.0], [1.0]), parameter([1.0], [1.0])
    sgd = SGD([{"params": [p]}, {"params": [q], "lr": 3.0}], lr=1.0)
    sgd.lr = 0.5
    sgd.step()
    assert (p.item(), q.item()) == (0.5, 0.5)
    with pytest.raises(ValueError, match="lr must be a finite number"):
        sgd.lr = math.nan


def test_decay_groups_decay_matrices_and_embeddings_only():
    class Two:
        def named_parameters(self):
            return [("wte", parameter(np.ones((7, 3)))), ("ln.weight", parameter(np.ones(3))), ("s", parameter(1.0))]

    decayed, rest = decay_groups(Two(), 0.1)
    assert ([p.ndim for p in decayed["params"]], decayed["weight_decay"]) == ([2], 0.1)
    assert ([p.ndim for p in rest["params"]], rest["weight_decay"]) == ([1, 0], 0.0)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ([], ValueError, "needs parameters, got none"),
        ([np.ones(3)], TypeError, "must be a Tensor, got ndarray"),
        (tg.Tensor([1.0]), TypeError, "iterable of tensors"),
        ([tg.Tensor([1, 2], dtype=np.int64)], TypeError, "int64; only floating"),
        ([tg.Tensor([1.0], requires_grad=True) * 2], ValueError, "computed by 'scale'"),
        ([{"params": [tg.Tensor([1.0])], "decay": 1}], TypeError, "'weight_decay'.*got.*'decay'"),
        ([{"lr": 1.0}], TypeError, '"params"'),
    ],
)
def test_invalid_parameters_are_refused(params, error, words):
    with pytest.raises(error, match=words):
        AdamW(params)


def test_a_tensor_in_two_groups_is_refused_by_name():
    w = parameter([1.0]).named("wte")
    with pytest.raises(ValueError, match=r"'wte'.*two groups"):
        AdamW([{"params": [w]}, {"params": [w], "weight_decay": 0.0}])


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"lr": math.nan}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"eps": -1e-8}, {"lr": "1"}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamW([parameter([1.0])], **options)


@pytest.mark.parametrize("grad", [np.ones(2), np.ones(3, np.float32), [1.0, 1.0, 1.0]])
def test_a_gradient_of_another_shape_or_dtype_is_refused(grad):
    p = parameter(np.ones(3))
    p.grad = grad
    with pytest.raises(ValueError, match="gradient of a parameter of shape"):
        AdamW([p]).step()


# -------------------------------------------------------------------------------------------------------------- state


def three_parameters():
    rng = np.random.default_rng(5)
    return [parameter(rng.standard_normal(shape), dtype=np.float32) for shape in [(7, 5), (3,), ()]]


def random_gradients(params, rng):
    for p in params:
        p.grad = rng.standard_normal(p.shape).astype(p.dtype)


MAKERS = {
    "sgd": lambda params: SGD(params, lr=0.05),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: Adam(params, lr=0.05, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_restored_optimizer_continues_bit_for_bit(make):
    params, rng = three_parameters(), np.random.default_rng(1)
    optimizer = make(params)
    for _ in range(3):
        random_gradients(params, rng)
        optimizer.step()
    saved = optimizer.state_dict()
    copies = [parameter(p.numpy(), dtype=np.float32) for p in params]
    restored = make(copies)
    restored.load_state_dict(saved)
    random_gradients(params, np.random.default_rng(2))
    random_gradients(copies, np.random.default_rng(2))
    optimizer.step()
    restored.step()
    assert all(np.array_equal(p.numpy(), q.numpy()) for p, q in zip(params, copies, strict=True))


def test_a_state_dict_is_a_copy():
    p = parameter([1.0, 2.0], [1.0, 1.0])
    adam = Adam([p])
    adam.step()
    saved = adam.state_dict()
    before = saved["state"][0]["m"].copy()
    adam.step()
    assert np.array_equal(saved["state"][0]["m"], before)
    adam.load_state_dict(saved)
    adam.step()
    assert np.array_equal(saved["state"][0]["m"], before)


def spoil_count(saved):
    saved["groups"][0]["params"].append(9)


def spoil_options(saved):
    saved["groups"][0]["momentum"] = 0.9


def spoil_range(saved):
    saved["groups"][0]["betas"] = [0.9, 1.5]


def spoil_shape(saved):
    saved["state"][0]["m"] = np.zeros((5, 7), np.float32)


def spoil_dtype(saved):
    saved["state"][0]["v"] = np.zeros((7, 5))


def spoil_names(saved):
    del saved["state"][0]["v"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_count, r"\[4\] parameters, this optimizer has \[3\]"),
        (spoil_options, "options.*momentum"),
        (spoil_range, "betas"),
        (spoil_shape, r"'m'.*\(5, 7\) float32, expected \(7, 5\) float32"),
        (spoil_dtype, r"'v'.*float64, expected.*float32"),
        (spoil_names, r"\['m', 'step'\], expected \['m', 'step', 'v'\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, words):
    params = three_parameters()
    adam = AdamW(params, lr=0.05)
    random_gradients(params, np.random.default_rng(1))
    adam.step()
    saved = adam.state_dict()
    saved["groups"][0]["lr"] = 0.5
    spoil(saved)
    before = adam.state_dict()
    with pytest.raises(ValueError, match=words):
        adam.load_state_dict(saved)
    after = adam.state_dict()
    assert adam.lr == 0.05
    assert all(np.array_equal(before["state"][i][k], after["state"][i][k]) for i in range(3) for k in "mv")


# ----------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_clipping_keeps_the_direction_and_returns_the_norm(dtype):
    p = parameter([1.0, 1.0], [3.0, 4.0], dtype)
    assert clip_grad_norm([p], 1.0) == pytest.approx(5.0)
    assert p.grad == pytest.approx([0.6, 0.8], rel=1e-6)
    assert p.grad.dtype == dtype


def test_clipping_measures_all_gradients_together():
    params = [parameter(1.0, 1.0, np.float32) for _ in range(100)]
    assert clip_grad_norm((p for p in params), 5.0) == pytest.approx(10.0)
    assert params[7].grad.item() == pytest.approx(0.5, rel=1e-6)
    assert params[7].grad.shape == ()


def test_a_norm_below_the_limit_changes_nothing():
    p = parameter([0.0, 0.0], [3.0, 4.0])
    assert clip_grad_norm([p], 5.1) == 5.0
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("size", "dtype"), [(1e20, np.float32), (1e-25, np.float32), (1e200, np.float64), (1e-200, np.float64)]
)
def test_norms_are_right_if_their_squares_overflow_or_underflow(size, dtype):
    params = [parameter(0.0, size, dtype) for _ in range(100)]
    assert clip_grad_norm(params, math.inf) == pytest.approx(10 * size, rel=1e-6)


def test_a_hundred_huge_float32_gradients_are_clipped_to_a_tenth_each():
    params = [parameter(0.0, 1e20, np.float32) for _ in range(100)]
    assert clip_grad_norm(params, 1.0) == pytest.approx(1e21, rel=1e-6)
    assert [p.grad.item() for p in params] == pytest.approx([0.1] * 100, rel=1e-6)


def test_the_norm_of_many_elements_does_not_depend_on_where_a_block_ends():
    g = np.random.default_rng(0).standard_normal((3, 2**16 - 1))
    for array in (g, g.T, g[:, ::2], g[:, :0]):
        assert global_norm([array]) == pytest.approx(np.linalg.norm(array), rel=1e-14)
        assert global_norm([array.astype(np.float32)]) == pytest.approx(np.linalg.norm(array), rel=1e-6)


def test_the_norm_of_ten_million_equal_elements_keeps_its_digits_in_float32():
    g = np.full(10**7, 0.1, np.float32)
    assert global_norm([g]) == pytest.approx(float(g[0]) * 10**3.5, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nan_or_infinite_norm_is_returned_and_leaves_the_gradients_unchanged(bad):
    p, q = parameter([0.0, 0.0], [1.0, bad], np.float32), parameter(0.0, 2.0, np.float32)
    norm = clip_grad_norm([p, q], 1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert np.array_equal(p.grad, np.array([1.0, bad], np.float32), equal_nan=True)
    assert q.grad.item() == 2.0


@pytest.mark.parametrize("max_norm", [-1.0, -0.5, math.nan])
def test_a_limit_below_zero_is_refused_and_changes_nothing(max_norm):
    p = parameter([0.0, 0.0], [3.0, 4.0])
    with pytest.raises(ValueError, match="max_norm must be 0 or more"):
        clip_grad_norm([p], max_norm)
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("max_norm", "left"), [(0.0, [0.0, 0.0]), (math.inf, [3.0, 4.0])])
def test_limits_of_zero_and_infinity(max_norm, left):
    p = parameter([0.0, 0.0], [3.0, 4.0])
    assert clip_grad_norm([p], max_norm) == 5.0
    assert p.grad.tolist() == left


def test_clipping_without_gradients_gives_zero():
    assert clip_grad_norm([parameter([1.0, 2.0])], 1.0) == 0.0
    assert clip_grad_norm([parameter([1.0, 2.0], [0.0, 0.0])], 1.0) == 0.0
    assert global_norm([np.zeros((0, 3))]) == 0.0


def test_clipping_one_gradient_does_not_change_another():
    x, y = parameter(np.ones(3)), parameter(np.ones(3))
    (x + y).sum().backward()
    clip_grad_norm([x], 0.1)
    assert np.linalg.norm(x.grad) == pytest.approx(0.1, rel=1e-5)
    assert y.grad.tolist() == [1.0, 1.0, 1.0]
    assert not np.shares_memory(x.grad, y.grad)


def test_clipping_a_scalar_that_was_broadcast_keeps_it_an_array():
    x = tg.Tensor(2.0, requires_grad=True)
    for _ in range(2):
        (x * np.ones(3, np.float32)).sum().backward()
    assert (x.grad.shape, x.grad.dtype, x.grad.item()) == ((), np.float32, 6.0)
    assert clip_grad_norm([x], 3.0) == 6.0
    assert isinstance(x.grad, np.ndarray)
    assert x.grad.item() == pytest.approx(3.0, rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(
    ("step", "lr"), [(0, 2.9985e-7), (1, 5.9970e-7), (1999, 5.99700e-4), (2000, 6e-4), (600_000, 6e-5), (700_000, 6e-5)]
)
def test_warmup_follows_the_rule_of_nanogpt(step, lr):
    assert warmup_cosine(step, 6e-4, 6e-5, 2000, 600_000) == pytest.approx(lr, rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 2, 7])
def test_the_schedule_rises_reaches_its_maximum_once_and_falls(warmup):
    lrs = [warmup_cosine(step, 1.0, 0.1, warmup, 31) for step in range(40)]
    assert lrs[0] > 0
    assert all(a < b for a, b in itertools.pairwise(lrs[: warmup + 1]))
    assert [i for i, lr in enumerate(lrs) if lr == 1.0] == [warmup]
    assert all(a > b for a, b in itertools.pairwise(lrs[warmup:32]))
    assert set(lrs[31:]) == {0.1}
    assert lrs[30] - 0.1 < 0.01


def test_a_schedule_of_warmup_only_ends_at_the_lowest_rate():
    assert warmup_cosine(4, 1.0, 0.1, 5, 5) == pytest.approx(5 / 6)
    assert warmup_cosine(5, 1.0, 0.1, 5, 5) == 0.1
    assert warmup_cosine(0, 1.0, 0.1, 0, 0) == 0.1


@pytest.mark.parametrize(
    "arguments", [(-1, 1, 0, 0, 5), (0, 1, 0, -1, 5), (0, 1, 0, 6, 5), (0, 1, 2, 0, 5), (0, math.inf)]
)
def test_invalid_schedules_are_refused(arguments):
    with pytest.raises(ValueError, match="expected 0 <="):
        warmup_cosine(*arguments)


# ------------------------------------------------------------------------------------------------------------- parity


TORCH_NAMES = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.1})}
TORCH_NAMES |= {"adam": ("Adam", {"weight_decay": 0.1})}
TORCH_NAMES |= {"adamw": ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)})}


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_defaults_are_those_of_torch(name):
    torch = pytest.importorskip("torch")
    ours = {k: p.default for k, p in inspect.signature(getattr(tg.optim, name)).parameters.items()}
    theirs = {k: p.default for k, p in inspect.signature(getattr(torch.optim, name)).parameters.items()}
    for option in ("lr", "betas", "eps", "weight_decay"):
        assert ours[option] == theirs[option], option


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_two_hundred_steps_agree_with_torch(name, dtype, tolerance):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    params = [parameter(rng.standard_normal(shape), dtype=dtype) for shape in [(7, 5), (3,), ()]]
    theirs = [torch.tensor(p.numpy().copy(), requires_grad=True) for p in params]
    ours = MAKERS[name](params)
    kind, options = TORCH_NAMES[name]
    torch_optimizer = getattr(torch.optim, kind)(theirs, lr=0.05, **options)
    for i in range(200):
        random_gradients(params, rng)
        for p, q in zip(params, theirs, strict=True):
            q.grad = torch.tensor(p.grad.copy())
        if i % 5 == 0:  # sometimes without a gradient: its count of steps does not advance
            params[1].grad = theirs[1].grad = None
        ours.lr = torch_optimizer.param_groups[0]["lr"] = 0.05 * (1 + i % 7) / 7
        norm = clip_grad_norm(params, 2.0)
        their_norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        assert norm == pytest.approx(their_norm.item(), rel=1e-6)
        ours.step()
        torch_optimizer.step()
    for p, q in zip(params, theirs, strict=True):
        assert np.allclose(p.numpy(), q.detach().numpy(), rtol=0, atol=tolerance)


# --------------------------------------------------------------------------------------------------------------------
# Memory


class Library:
    """A C library that notes the options that mallopt receives."""

    def __init__(self):
        self.options = []

    def mallopt(self, option, value):
        self.options.append((option, value))


def test_an_optimizer_keeps_freed_memory_once(monkeypatch):
    library = Library()
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    memory.keep_freed_memory.cache_clear()
    for _ in range(2):
        SGD([tg.Tensor([1.0], requires_grad=True)], lr=0.1)
    assert library.options == [(-1, 2**28), (-3, 2**25), (-8, 1)]


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_without_glibc_nothing_is_set(monkeypatch, platform):
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.keep_freed_memory.__wrapped__()
