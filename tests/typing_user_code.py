"""Typical user code, checked by mypy --strict and pyright, and run. An `assert_type` states what an editor shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import Tensor, nn, notation, ops

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]
RNG = np.random.default_rng(0)


def use_tensors() -> Tensor:
    x = Tensor(RNG.standard_normal((3, 5)), requires_grad=True, name="x")
    w = Tensor(RNG.standard_normal((5, 7)), requires_grad=True)
    y = (np.ones((3, 5)) + x * 2) @ w
    assert_type(y, Tensor)
    assert_type(np.ones((2, 3)) @ x, Tensor)
    assert_type(1 - x / 2, Tensor)
    assert_type(x.mT, Tensor)
    assert_type(x[0, 1:], Tensor)
    assert_type(x.sum(axis=-1, keepdims=True), Tensor)
    assert_type(x.softmax(axis=0), Tensor)
    assert_type(x.numpy(), Array)
    assert_type(x.shape, tuple[int, ...])
    assert_type(x.named("X"), Tensor)
    loss = y.tanh().mean()
    loss.backward()
    assert_type(x.grad, Array | None)
    assert_type(loss.item(), float | int | bool)
    return y


def use_primitives() -> None:
    x, array = Tensor(RNG.standard_normal((3, 5))), RNG.standard_normal((3, 5))
    assert_type(ops.softmax(x, axis=-1), Tensor)
    assert_type(ops.softmax(array), Array)
    assert_type(ops.linear(x, x.mT), Tensor)
    assert_type(ops.where(array > 0, x, 0.0), Any)  # the first argument does not decide it
    assert_type(ops.concat([x, x], axis=1), Tensor)
    assert_type(ops.concat(x, x, axis=1), Tensor)
    assert_type(ops.cross_entropy(x, [1, 2, 0], label_smoothing=0.1), Tensor)
    assert_type(ops.split(x, 3), list[Tensor])
    rows: Tensor = ops.einsum("ij,kj->ik", x, x)
    assert rows.shape == (3, 3)


@ops.primitive
def cube(x: Array) -> Array:
    return x**3


cube.vjps(lambda g, y, x: 3 * g * x**2)


@ops.primitive(kind="product", roles=("data", "weight"), formula=notation.infix("⊙"))
def gate(x: Array, weight: Array) -> Any:
    return x * weight


gate.vjps(lambda g, y, x, weight: g * weight, lambda g, y, x, weight: g * x)


def use_primitives_of_my_own() -> None:
    assert_type(gate(Tensor([1.0, 2.0]), np.ones(2)), Tensor)
    assert_type(cube(Tensor([1.0, 2.0])), Tensor)
    assert_type(cube(np.ones(2)), Array)
    report = tg.gradcheck(cube, np.array([0.3, -1.2]), order=2)
    assert_type(report, tg.GradcheckReport)
    assert_type(report.ok, bool)


def use_derivatives() -> None:
    x = Tensor([0.5, 1.5], requires_grad=True)
    (first,) = tg.grad((x**3).sum(), x, create_graph=True)
    assert_type(first, Tensor)
    assert_type(tg.hessian(lambda x: (x**3).sum(), x), Tensor)
    y, pull = tg.vjp(lambda x: x.exp(), x)
    assert_type(y, Tensor)
    assert_type(pull(np.ones(2)), tuple[Tensor, ...])


class TwoLayers(nn.Module):
    def __init__(self, width: int) -> None:
        self.hidden = nn.Linear(width, 4 * width, rng=0)
        self.out = nn.Linear(4 * width, width, rng=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(ops.gelu(self.hidden(x)))


def use_modules() -> None:
    model = TwoLayers(5)
    x = Tensor(RNG.standard_normal((3, 5)).astype(np.float32))
    assert_type(model(x), Tensor)
    assert_type(nn.LayerNorm(5)(x), Tensor)
    assert_type(model.state_dict(), dict[str, Array])
    optimizer = tg.optim.AdamW(tg.optim.decay_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.99))
    for step in range(3):
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=1e-3, warmup=1, total=3)
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward(leaves_only=True)
        assert_type(tg.optim.clip_grad_norm(model.parameters(), 1.0), float)
        optimizer.step()
    with tg.no_grad():
        assert not model(x).requires_grad
    with model.evaluating() as same:
        assert_type(same, TwoLayers)
    assert_type(apply(model, x), Tensor)
    assert_type(apply(nn.MultiHeadAttention(5, 1, position=nn.Relative(num_buckets=4)), x), Tensor)


def apply(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A module is accepted where a function is."""
    return f(x)


@tg.no_grad
def evaluate(model: TwoLayers, x: Tensor) -> float:
    return float(model(x).sum())


def use_decorators() -> None:
    assert_type(evaluate(TwoLayers(5), Tensor(np.ones((3, 5), np.float32))), float)


def use_attention() -> None:
    x = Tensor(RNG.standard_normal((3, 5)), requires_grad=True)
    y = nn.attention(x, x, x, allow=nn.causal(3))
    assert_type(y, Tensor)
    mha = nn.MultiHeadAttention(d_model=5, n_head=2, d_k=7, d_v=11, rng=0)
    assert_type(mha(x, causal=True), Tensor)
    out, trace = mha(x, causal=True, trace=True)
    assert_type(out, Tensor)
    assert_type(trace.weights, Tensor)
    assert_type(mha.per_head(x, causal=True), Tensor)
    assert_type(tg.vjp(mha, x)[0], Tensor)
    assert tg.gradcheck(mha, x.numpy()).ok


def use_a_language_model() -> None:
    text = "the cat sat on the mat, and the dog sat on the log"
    tokenizer = tg.data.CharTokenizer.of(text)
    config = nn.GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=8)
    model = nn.GPT(config, seed=0)
    x, y = next(tg.data.Batches(tokenizer.encode(text), block_size=8, batch_size=3, seed=0))
    assert_type(model(x), Tensor)
    assert_type(model.loss(x, y), Tensor)
    ids = tg.generate(model, tokenizer.encode("the "), 4, temperature=0.8, seed=0)
    assert_type(tokenizer.decode(np.asarray(ids)[0]), str)
    _, logs = tg.generate(model, [1, 2], 3, logprobs=True)
    assert np.asarray(logs).shape == (1, 3)
    for piece in tg.stream(model, [1, 2], 3, tokenizer=tokenizer):
        assert isinstance(piece, str)


def use_pictures() -> None:
    graph = tg.graph(use_tensors())
    assert_type(graph.dot, str)


if __name__ == "__main__":
    for name, function in list(globals().items()):
        if name.startswith("use_"):
            function()
