"""What the walkthrough page shows of an attention layer: equations, matrices, dependence of rows, decoding.

Values come from a run of `per_head`, gradients from its recorded backward pass, and equations from both. Which row
depends on which is measured by vector-Jacobian products, and decoding by running the layer with a `KVCache`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha import engine, modes, transforms
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.decoding import count_multiply_adds
from tinygrad_mha.nn import GPT, KVCache
from tinygrad_mha.nn.heads import NAMES
from tinygrad_mha.nn.module import Module, walk
from tinygrad_mha.tensors import Tensor, as_tensor, plain
from tinygrad_mha.viz.diagram.record import record_backward
from tinygrad_mha.viz.page.equations import Json, as_matrix, write_walks
from tinygrad_mha.viz.page.heads import HeadByHead
from tinygrad_mha.viz.page.model_run import ModelRun, copy_for_run, run_model

__all__ = ["MOST_PARAMETER_ROWS", "Subject", "as_json_number", "check_sequence", "collect", "compare_with_whole"]
__all__ += ["enter_layer", "name_tokens", "prepare_attention", "prepare_layer"]

MOST_TOKENS = 64
MOST_PARAMETER_ROWS = 256  # of a parameter: for how many rows it is measured what they reach
THRESHOLD = 1e-9  # relative: a row is reached if its derivative is more than this part of the largest one


class Subject(NamedTuple):
    """An attention layer (a copy), its input (T, d_model), the gradient of Y if it is known, and facts to show."""

    attention: Any
    x: np.ndarray
    grad: Any
    facts: Json


def prepare_attention(attention: Module, x: Any, grad: Any) -> Subject:
    """An attention by itself."""
    x = check_sequence(as_tensor(x).numpy(), 2, "x must be (T, d_model)")
    attention = copy_for_run(attention)
    return Subject(attention if hasattr(attention, "per_head") else HeadByHead(attention), x, grad, {})


def has_own_per_head(attention: Module) -> bool:
    """Whether it has a `per_head`, and no class derived from the one that defines it defines another `forward`."""
    names = (name for kind in type(attention).__mro__ for name in ("per_head", "forward") if name in vars(kind))
    return next(names) == "per_head"


def prepare_layer(model: GPT, ids: Any, layer: int, grad: Any) -> Subject:
    """One layer of a GPT in a run on `ids`: the input of its attention, and the gradient of the output of that."""
    idx = check_sequence(as_ids(ids, "ids"), 1, "ids must be (T,)")
    if not 0 <= layer < len(model.h):
        raise ValueError(f"this GPT has the layers 0 to {len(model.h) - 1}, got layer={layer}")
    run = run_model(model, idx)
    y = run.parts[f"h.{layer}.attn"].y
    known = [None] if grad is not None else run.get_gradients([y])
    return enter_layer(run, layer, grad if known[0] is None else known[0], from_loss=known[0] is not None)


def enter_layer(run: ModelRun, layer: int, grad: Any, from_loss: bool) -> Subject:
    """The attention of one layer of a run, and the gradient of its output; `from_loss`: by the loss of the run."""
    facts: Json = {"layer": layer, "layers": len(run.model.h), "ids": [str(i) for i in run.idx.tolist()]}
    if from_loss and run.loss is not None:
        facts |= {"loss": "next_token", "loss_value": as_json_number(run.loss.numpy())}
    recorder = run.parts[f"h.{layer}.attn"]
    attention = recorder.module
    # A GPT calls its attention without `causal`, so a per_head with that argument could show another mask.
    is_same = has_own_per_head(attention) and not accepts(attention.per_head, "causal")
    return Subject(attention if is_same else HeadByHead(attention), recorder.x.numpy(), grad, facts)


def check_sequence(x: Any, ndim: int, expected: str) -> np.ndarray:
    """One sequence of 1 to MOST_TOKENS tokens; a batch axis of length 1 is dropped."""
    x = np.asarray(x)
    if x.ndim == ndim + 1 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != ndim or len(x) == 0:
        raise ValueError(f"{expected}, one sequence of at least one token; got shape {x.shape}")
    if len(x) > MOST_TOKENS:
        raise ValueError(f"a page can show {MOST_TOKENS} tokens, got {len(x)}: choose a part of the sequence")
    return x


def name_tokens(tokens: Sequence[str] | None, subject: Subject) -> list[str]:
    """The names of the rows of x: `tokens`, or else the ids or 1, 2, ..."""
    n = len(subject.x)
    if tokens is None:
        return subject.facts.get("ids") or [str(i + 1) for i in range(n)]
    tokens = list(tokens)
    if not all(isinstance(token, str) for token in tokens):
        raise TypeError(f"tokens are strings, one for each row of x; got {tokens!r}")
    if len(tokens) != n:
        raise ValueError(f"x has {n} rows, so it needs {n} tokens; got {len(tokens)}")
    return tokens


# --------------------------------------------------------------------------------------------------------------------
# The run


def collect(subject: Subject, tokens: list[str], causal: bool) -> Json:
    """Run the layer and collect everything that the page shows, as plain data and arrays."""
    attention, x, grad, facts = subject
    options = {"causal": causal} if accepts(attention.per_head, "causal") else {}
    y = attention.per_head(Tensor(x, requires_grad=True, name="X"), **options)
    if not causal and not options:
        raise ValueError("this attention is causal by itself: causal=False cannot be shown")
    if grad is None:
        grad, facts = y.numpy(), facts | {"loss": "half_squares"}
    y.grad = np.array(plain(grad), y.dtype)
    if y.grad.shape != y.shape:
        raise ValueError(f"grad must have the shape of Y, (T, d_out) = {y.shape}, got {y.grad.shape}")
    check_forward(attention, x, y.grad, options)
    walks, matrices = write_walks(record_backward(y), name_tensors(y, attention), len(x))
    reached = {title for title, matrix in matrices.items() if matrix["kind"] != "constant"}
    has_cache = causal and accepts(attention.forward, "cache") and getattr(attention, "takes_cache", True)
    widths = {"d_model": x, "d_k": matrices["Q_1"]["values"], "d_v": matrices["V_1"]["values"], "d_out": y}
    facts = {"loss": "given", "dtype": str(y.dtype)} | {name: a.shape[1] for name, a in widths.items()} | facts
    return {
        "tokens": tokens,
        "facts": facts | {"n_head": len(walks)},
        "walks": walks,
        "matrices": matrices,
        "reach": measure_reach(attention, x, options, reached),
        "decode": measure_decoding(attention, x, y.numpy(), options) if has_cache else [],
    }


def accepts(method: Callable[..., Any], option: str) -> bool:
    """Whether a method has a parameter of this name, or takes any keyword."""
    parameters = inspect.signature(method).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def run_forward(attention: Any, x: Any, options: Json, **more: Any) -> Tensor:
    """Call the attention; `causal` is left out of `options` if its forward does not have such a parameter."""
    return attention(x, **(options if accepts(attention.forward, "causal") else {}), **more)


def name_tensors(y: Tensor, attention: Module) -> dict[int, str]:
    """The names of the tensors that made `y`, by identity: their own, or the path of a parameter.

    If several tensors have the same name, it is that of the last one.
    """
    named = {path: found for path, found in walk(attention) if isinstance(found, Tensor) and not found.name}
    named |= {tensor.name: tensor for tensor in engine.toposort([y], everything=True) if tensor.name} | {"Y": y}
    return {id(tensor): name.replace(" ", "_") for name, tensor in named.items()}


def check_forward(attention: Any, x: np.ndarray, grad: np.ndarray, options: Json) -> None:
    """Raise ValueError if `forward` and `per_head` differ in Y or in the gradient of X, by more than rounding."""
    exact = copy.deepcopy(attention).astype(np.float64)
    leaf = Tensor(x, dtype=np.float64, requires_grad=True, name="X")
    forward, per_head = run_forward(exact, leaf, options), exact.per_head(leaf, **options)
    reason = None
    if forward.shape != per_head.shape or not is_close(forward.numpy(), per_head.numpy()):
        reason = f"first in {find_difference(exact, leaf, per_head, options)}"
    elif np.isfinite(per_head.numpy()).all():
        gradients = [transforms.grad(y, leaf, grad_output=grad)[0].numpy() for y in (forward, per_head)]
        reason = None if is_close(*gradients) else "in the gradient of X"
    if reason:
        raise ValueError(
            f"forward and per_head of this {type(attention).__name__} differ {reason}. A walkthrough shows the steps "
            f"of per_head: define it so that it computes what forward does"
        )


def is_close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float64 arrays are equal up to rounding."""
    size = np.abs(b).max(initial=0.0, where=np.isfinite(b))
    return bool(np.allclose(a, b, rtol=THRESHOLD, atol=THRESHOLD * size, equal_nan=True))


def find_difference(attention: Any, x: Tensor, per_head: Tensor, options: Json) -> str:
    """The first step that `forward` shows to `edit` and that `per_head` computes differently; "Y" if there is none."""
    expected = {tensor.name: tensor.numpy() for tensor in engine.toposort([per_head], everything=True)}
    differing = []

    def compare(step: str, tensor: Tensor) -> Tensor:
        name = NAMES[step]
        heads = {f"{name}_{i}": head for i, head in enumerate(tensor.numpy(), 1)} if tensor.ndim == 3 else {}
        for title, array in (heads or {name: tensor.numpy()}).items():
            if title in expected and not is_close(array, expected[title]):
                differing.append(title)
        return tensor

    if accepts(attention.forward, "edit"):
        with contextlib.suppress(TypeError):  # a forward that takes **options and passes an `edit` itself
            run_forward(attention, x, options, edit=compare)
    return next(iter(differing), "Y")


# --------------------------------------------------------------------------------------------------------------------
# Dependence


def measure_reach(attention: Any, x: np.ndarray, options: Json, names: set[str]) -> dict[str, dict[str, np.ndarray]]:
    """Which rows reach which: {made: {from: boolean (rows of made, rows of from)}}.

    One run computes the sequence n times, side by side in a batch, in float64. For each matrix, one vector-Jacobian
    product asks sequence i of the batch about row i alone. The vectors are random, because the derivative of a softmax
    in the direction of ones is zero.
    """
    n = len(x)
    exact = copy.deepcopy(attention).astype(np.float64)
    for parameter in exact.parameters():
        parameter.requires_grad = False
    batch = Tensor(np.broadcast_to(x, (n, *x.shape)), dtype=np.float64, requires_grad=True, name="X")
    y = exact.per_head(batch, **options)
    titles = {key: name for key, name in name_tensors(y, exact).items() if name in names}
    rng = np.random.default_rng(0)
    reach: dict[str, dict[str, np.ndarray]] = {}
    pulls: dict[tuple[int, int], Callable[[np.ndarray], np.ndarray]] = {}
    for made in engine.toposort([y]):
        if id(made) not in titles or made is batch or made.shape[:2] != (n, n):
            continue
        vectors = rng.standard_normal(made.shape) * np.eye(n)[:, :, None]
        gradients: dict[str, np.ndarray] = {}
        for value, g in engine.sweep(made, vectors):
            if id(value) in titles:
                gradients[titles[id(value)]] = g
            for i, parameter in enumerate(value.node.inputs if value.node else ()):
                if id(parameter) in titles and not parameter.requires_grad:
                    key = id(value), i
                    pulls[key] = pulls.get(key) or pull_sequence(value, i)
                    part = np.array([pulls[key](rows) for rows in g])
                    gradients[titles[id(parameter)]] = gradients.get(titles[id(parameter)], 0.0) + part
        sizes = {}
        for name, g in gradients.items():
            matrices = np.abs(g).reshape(n, *as_matrix(g[0]).shape)
            sizes[name] = matrices[:, :MOST_PARAMETER_ROWS].max(axis=-1)
        limit = THRESHOLD * max(size.max(initial=0.0, where=np.isfinite(size)) for size in sizes.values())
        found = {source: ~(size <= limit) for source, size in sizes.items()}  # nan may depend on anything
        reach[titles[id(made)]] = {source: rows for source, rows in found.items() if rows.any()}
    return reach


def pull_sequence(value: Tensor, i: int) -> Callable[[np.ndarray], np.ndarray]:
    """The vector-Jacobian product from one sequence of a batch of equal ones to the parameter at input `i` of `value`.

    A backward pass would add up what the sequences contribute, so the operation runs again on one of them alone.
    """
    node: Any = value.node
    inputs = [x.numpy()[0] if getattr(x, "requires_grad", False) else plain(x) for x in node.inputs]
    parameter = inputs[i] = Tensor(inputs[i], requires_grad=True)
    y = node.op(*inputs, **node.kwargs)

    def pull(g: np.ndarray) -> np.ndarray:
        gradients: dict[int, np.ndarray] = {}
        engine.backprop_node(y, g, gradients, differentiable=False)
        return gradients[id(parameter)]

    return pull


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def measure_decoding(attention: Any, x: np.ndarray, y: np.ndarray, options: Json) -> list[Json]:
    """Decode the sequence token by token with a cache: what each step computes and reads, and what it costs."""
    cache = KVCache()
    steps = []
    with modes.no_grad(), modes.record():
        for t in range(len(x)):
            before = cache.length
            row = run_forward(attention, x[t : t + 1], options, cache=cache)
            whole = run_forward(attention, x[: t + 1], options)
            rows = {"computed": list(range(before, cache.length)), "cached": list(range(before)), "read": cache.length}
            steps.append(rows | compare_with_whole(row, whole, y[t]))
    return steps


def compare_with_whole(row: Tensor, whole: Tensor, expected: np.ndarray) -> Json:
    """A row (1, C) that was decoded with a cache, and `whole` without: what both cost, and whether it is `expected`."""
    difference = np.abs(row.numpy()[0] - expected).max()
    rounding = 1000 * np.finfo(row.dtype).eps * max(1.0, np.abs(expected).max())
    return {
        "products": count_multiply_adds(row),
        "products_without": count_multiply_adds(whole),
        "difference": as_json_number(difference),
        "agrees": not difference > rounding,
    }


def as_json_number(number: Any) -> float | None:
    """None for infinity and nan, which JSON does not have."""
    return float(number) if np.isfinite(number) else None
