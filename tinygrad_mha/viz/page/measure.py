"""One attention layer at work: everything that the walkthrough page shows, computed and not yet drawn.

Values are those of `per_head`, gradients those of `grad`. Which row depends on which is answered by vector-Jacobian
products, what a cache computes, reads and saves by decoding with a `KVCache`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tinygrad_mha import engine, modes, ops, transforms
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.decoding import count_multiply_adds
from tinygrad_mha.nn import GPT, CausalSelfAttention, KVCache, MultiHeadAttention
from tinygrad_mha.nn.module import Module, walk
from tinygrad_mha.tensors import Tensor, as_tensor, plain

MOST_TOKENS = 64
MOST_PARAMETER_ROWS = 256  # of a weight: how many are asked what they reach
THRESHOLD = 1e-9  # of the largest derivative: a row whose part is not more than this has not been reached

Json = dict[str, Any]
AnyModule = TypeVar("AnyModule", bound=Module)
AnyAttention = MultiHeadAttention | CausalSelfAttention


class Subject(NamedTuple):
    """An attention (a copy that is ours), its input (T, d_model), the gradient of Y if known, and facts to be told."""

    attention: AnyAttention
    x: np.ndarray
    grad: Any
    facts: Json


def private(module: AnyModule) -> AnyModule:
    """A copy to run: without dropout, and with a gradient for everything, frozen parts too."""
    twin = copy.deepcopy(module).eval()
    for _, found in walk(twin):
        if isinstance(found, Tensor) and found.dtype.kind == "f":
            found.requires_grad = True
    return twin


def subject_of(attention: AnyAttention, x: Any, grad: Any) -> Subject:
    return Subject(private(attention), sequence(as_tensor(x).numpy(), 2, "x must be (T, d_model)"), grad, {})


def layer_of(model: GPT, ids: Any, layer: int, grad: Any) -> Subject:
    """One layer of a GPT as it works on `ids`: what reaches its attention, and the gradient that comes back to it."""
    idx = sequence(as_ids(ids, "the ids that a GPT walks through"), 1, "ids must be (T,)")
    if not 0 <= layer < len(model.h):
        raise ValueError(f"this GPT has the layers 0 to {len(model.h) - 1}, got layer={layer}")
    facts: Json = {"layer": layer, "layers": len(model.h), "ids": [str(i) for i in idx.tolist()]}
    model = private(model)
    logits, trace = model(idx, trace=True)
    if grad is None and len(idx) > 1:
        concat = trace.attention[layer].concat
        (y,) = (t for t in engine.toposort([logits]) if t.node and any(part is concat for part in t.node.inputs))
        loss = ops.cross_entropy(logits[:-1], idx[1:])
        grad = transforms.grad(loss, y)[0].numpy()
        facts |= {"loss": "next_token", "loss_value": finite(loss.numpy())}
    block = model.h[layer]
    x = trace.hidden[layer]
    return Subject(block.attn, (block.ln_1(x) if block.norm_first else x).numpy(), grad, facts)


def sequence(x: Any, ndim: int, wanted: str) -> np.ndarray:
    """One sequence of 1 to 64 tokens; a batch axis of length 1 is dropped."""
    x = np.asarray(x)
    if x.ndim == ndim + 1 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != ndim or len(x) == 0:
        raise ValueError(f"{wanted}, one sequence of at least one token; got shape {x.shape}")
    if len(x) > MOST_TOKENS:
        raise ValueError(f"a page can show {MOST_TOKENS} tokens, got {len(x)}: choose a part of the sequence")
    return x


def token_names(tokens: Sequence[str] | None, subject: Subject) -> list[str]:
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
# Its run


def collected(subject: Subject, tokens: list[str]) -> Json:
    """Everything that the page shows; arrays as arrays."""
    attention, x, grad, facts = subject
    causal = facts["causal"]
    if isinstance(attention, CausalSelfAttention) and not causal:
        raise ValueError("this attention is causal by itself: causal=False cannot be shown")
    y = attention.per_head(Tensor(x, requires_grad=True, name="X"), **mask_of(attention, causal))
    if grad is None:
        grad, facts = y.numpy(), facts | {"loss": "half_squares"}
    grad = np.asarray(plain(grad))
    if grad.shape != y.shape:
        raise ValueError(f"grad must have the shape of Y, (T, d_out) = {y.shape}, got {grad.shape}")
    tensors = named(y, attention)
    gradients = transforms.grad(y, list(tensors.values()), grad_output=grad)
    values = {name: tensor.numpy() for name, tensor in tensors.items()}
    position = attention.heads.position
    bias = position.bias(attention.n_head, len(x), len(x), y.dtype)
    if bias is not None:
        values |= {f"{position.name}_{i + 1}": bias.numpy()[i] for i in range(attention.n_head)}
    shown = ("d_model", "d_k", "d_v", "n_head", "n_kv_head")
    facts = {
        "loss": "given",
        "dtype": str(y.dtype),
        "d_out": y.shape[-1],
        "position": position.name,
        **{name: getattr(attention, name) for name in shown},
        **facts,
    }
    return {
        "tokens": tokens,
        "facts": facts,
        "values": values,
        "gradients": {name: g.numpy() for name, g in zip(tensors, gradients, strict=True)},
        "heads": heads_of(attention),
        "reach": dependencies(attention, x, causal),
        "decode": decoded(attention, x, y.numpy()) if causal else [],
    }


def mask_of(attention: AnyAttention, causal: bool) -> dict[str, Any]:
    """How `attention` is told to be causal: that of a GPT always is."""
    return {} if isinstance(attention, CausalSelfAttention) else {"causal": causal}


class Head(NamedTuple):
    """What the matrices of one head are called in a `per_head` run."""

    number: int
    q: str
    k: str
    v: str
    scores: str
    masked: str
    weights: str
    mixed: str
    wq: str
    wk: str
    wv: str
    bq: str
    bk: str
    bv: str
    alibi: str
    sharing: list[int]  # the numbers of the heads that use the same keys and values, this one too


def heads_of(attention: AnyAttention) -> list[Head]:
    n = attention.n_head
    groups = [i * attention.n_kv_head // n + 1 for i in range(n)]  # which keys and values head i uses
    return [
        Head(
            number=i,
            q=f"Q_{i}",
            k=f"K_{g}",
            v=f"V_{g}",
            scores=f"scores_{i}",
            masked=f"masked_{i}",
            weights=f"S_{i}",
            mixed=f"H_{i}",
            wq=f"W_Q{i}",
            wk=f"W_K{g}",
            wv=f"W_V{g}",
            bq=f"b_Q{i}",
            bk=f"b_K{g}",
            bv=f"b_V{g}",
            alibi=f"{attention.heads.position.name}_{i}",
            sharing=[j for j, other in enumerate(groups, 1) if other == g],
        )
        for i, g in enumerate(groups, 1)
    ]


def named(y: Tensor, attention: AnyAttention) -> dict[str, Tensor]:
    """The tensors of a `per_head` run that made `y`, by name, in the order in which they were made."""
    if y.node is None or y.node.op is not ops.linear:
        raise TypeError("a walkthrough shows Y = Concat @ W_O; this attention makes its output in another way")
    wanted = {"X", "Concat", "Y"} | {name for head in heads_of(attention) for name in head if isinstance(name, str)}
    wanted -= {head.alibi for head in heads_of(attention)}  # a bias is shown, but not followed
    found = {t.name: t for t in engine.toposort([y], everything=True) if t.name in wanted}
    outer = dict(zip(("W_O", "b_O"), y.node.inputs[1:], strict=True))  # whatever their owner calls them
    return found | {name: t for name, t in outer.items() if t is not None}


def dependencies(attention: AnyAttention, x: np.ndarray, causal: bool) -> dict[str, dict[str, np.ndarray]]:
    """Which rows reach which: {made: {from: boolean (rows of made, rows of from)}}.

    The same run is made once for every row, side by side in a batch, and for each tensor one vector-Jacobian product
    asks sequence i of the batch about row i alone. The vectors are random: a softmax answers ones with zeros, whatever
    it was given. In float64, so that rounding stays far below the threshold.
    """
    n = len(x)
    exact = copy.deepcopy(attention).astype(np.float64)
    for parameter in exact.parameters():
        parameter.requires_grad = False
    batch = Tensor(np.broadcast_to(x, (n, *x.shape)), dtype=np.float64, requires_grad=True, name="X")
    tensors = named(exact.per_head(batch, **mask_of(attention, causal)), attention)
    names = {id(tensor): name for name, tensor in tensors.items()}
    rng = np.random.default_rng(0)
    reach: dict[str, dict[str, np.ndarray]] = {}
    for name, made in tensors.items():
        if made is batch or not made.requires_grad:
            continue
        vectors = rng.standard_normal(made.shape) * np.eye(n)[:, :, None]
        sizes: dict[str, np.ndarray] = {}
        for value, g in engine.sweep(made, vectors):
            if id(value) in names:
                sizes[names[id(value)]] = np.abs(g).max(axis=-1)
            sizes |= sizes_of_parameters(value, g, names)
        limit = THRESHOLD * max(size.max(initial=0.0, where=np.isfinite(size)) for size in sizes.values())
        found = {source: ~(size <= limit) for source, size in sizes.items()}  # what is no number may depend on anything
        reach[name] = {source: rows for source, rows in found.items() if rows.any()}
    return reach


def sizes_of_parameters(value: Tensor, g: np.ndarray, names: dict[int, str]) -> dict[str, np.ndarray]:
    """How much each row of a weight or bias that made `value` matters: its part of the derivative, per sequence.

    The engine would sum over the batch, in which each sequence asks about another row. So the rules of x @ w and of
    + b stand here once more, without that sum.
    """
    if value.node is None or value.node.op not in (ops.matmul, ops.linear, ops.add):
        return {}
    x, *parameters = value.node.inputs
    sizes = {}
    for parameter in parameters:
        if isinstance(parameter, Tensor) and not parameter.requires_grad and id(parameter) in names:
            one_row = parameter.ndim == 1
            part = g.sum(axis=-2, keepdims=True) if one_row else x.numpy().mT[:, :MOST_PARAMETER_ROWS] @ g
            sizes[names[id(parameter)]] = np.abs(part).max(axis=-1)
    return sizes


def decoded(attention: AnyAttention, x: np.ndarray, y: np.ndarray) -> list[Json]:
    """Reading the sequence one token at a time with a cache: what each step computes and reads, and what it costs."""
    cache = KVCache()
    steps = []
    with modes.no_grad(), modes.record():
        for t in range(len(x)):
            before = cache.length
            options = {"edit": lambda name, tensor: tensor, **mask_of(attention, True)}  # every step has a node
            row = attention(x[t : t + 1], cache=cache, **options)
            whole = attention(x[: t + 1], **options)
            steps.append(
                {
                    "computed": list(range(before, cache.length)),
                    "cached": list(range(before)),
                    "read": cache.length,
                    "products": count_multiply_adds(row),
                    "products_without": count_multiply_adds(whole),
                    "difference": finite(np.abs(row.numpy()[0] - y[t]).max()),
                }
            )
    return steps


def finite(number: Any) -> float | None:
    """As JSON has it, which knows no infinity."""
    return float(number) if np.isfinite(number) else None
