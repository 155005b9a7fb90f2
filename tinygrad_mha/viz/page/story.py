"""What the page of a whole GPT shows: from the text to the next token, in one recorded run.

Axes: T tokens, C width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.data import name_token
from tinygrad_mha.decoding.sampling import Sampler, compute_probabilities, draw
from tinygrad_mha.nn import GPT
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.page.equations import Json
from tinygrad_mha.viz.page.measure import (
    as_json_number,
    check_sequence,
    collect,
    compare_with_whole,
    enter_layer,
    name_tokens,
)
from tinygrad_mha.viz.page.model_run import ModelRun, run_model

__all__ = ["collect_model", "encode_text"]

MOST_WEIGHTS = 150_000  # attention weights of all layers and heads: more cannot be looked at
GUESSES = 5  # of a logit lens, for each token
CANDIDATES = 16  # tokens for which logits and probabilities are shown
DRAWS = 10  # seeds
TEMPERATURES = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
TOP_K = (None, 3, 10, 50)
TOP_P = (None, 0.95, 0.9, 0.5)

# The results of a block in order: key, whether it is a state of the residual stream, formula.
BEFORE = (  # a norm before each part
    ("norm_1", False, "norm(x)"),
    ("attention", False, "attention(norm(x))"),
    ("sum_1", True, "x + attention(norm(x))"),
    ("norm_2", False, "norm(x)"),
    ("inner", False, "activation(norm(x) @ W_1)"),
    ("mlp", False, "inner @ W_2"),
    ("sum_2", True, "x + inner @ W_2"),
)
AFTER = (  # a norm after each sum
    ("attention", False, "attention(x)"),
    ("sum_1", False, "x + attention(x)"),
    ("norm_1", True, "norm(x + attention(x))"),
    ("inner", False, "activation(x @ W_1)"),
    ("mlp", False, "inner @ W_2"),
    ("sum_2", False, "x + inner @ W_2"),
    ("norm_2", True, "norm(x + inner @ W_2)"),
)


def encode_text(x: Any, tokenizer: Any) -> Any:
    """The ids of a text; ids as they are.

    Raises:
        TypeError: a text without a tokenizer.
        ValueError: a text without tokens.
    """
    if not isinstance(x, str):
        return x
    if tokenizer is None:
        raise TypeError("a text needs the tokenizer of the model, tokenizer=load_tokenizer(folder); or pass token ids")
    ids = tokenizer.encode(x)
    if not len(ids):
        raise ValueError("the text has no tokens: give at least one character that the tokenizer knows")
    return ids


def collect_model(model: GPT, ids: Any, tokens: Sequence[str] | None, tokenizer: Any) -> Json:
    """Run the model and collect everything that the page shows, as plain data and arrays.

    Raises:
        ValueError: more tokens, layers and heads than can be looked at.
    """
    idx = check_sequence(as_ids(ids, "ids"), 1, "ids must be (T,)")
    check_size(model, len(idx))
    run = run_model(model, idx)
    names = Names(tokenizer)
    for i in idx.tolist():
        names.add(i)
    matrices, stream, blocks = find_results(run)
    gradients = run.get_gradients([run.parts[f"h.{i}.attn"].y for i in range(len(model.h))])
    subjects = [enter_layer(run, i, g, from_loss=True) for i, g in enumerate(gradients)]
    shown = [names.names[i] for i in idx.tolist()] if tokens is None else name_tokens(tokens, subjects[0])
    lenses = {name: read_lens(run, matrices[name]["tensor"], names) for name in stream}
    options = model.config
    return {
        "tokens": shown,
        "ids": idx.tolist(),
        "matrices": matrices,
        "stream": stream,
        "blocks": blocks,
        "lenses": lenses,
        "rooms": [collect(subject, shown, causal=True) for subject in subjects],
        "sampling": measure_sampling(run.logits.numpy()[-1], names),
        "decode": measure_model_decoding(model, idx, run.logits.numpy()),
        "names": {str(i): name for i, name in names.names.items()},
        "facts": {
            "has_text": tokenizer is not None,
            "layers": len(model.h),
            "n_head": options.n_head,
            "width": options.n_embd,
            "vocabulary": options.vocab_size,
            "norm": options.norm,
            "norm_first": options.norm_first,
            "activation": options.activation,
            "position": options.position if isinstance(options.position, str) else type(options.position).__name__,
            "dtype": str(run.logits.dtype),
            "parameters": model.count(),
            "loss_value": None if run.loss is None else as_json_number(run.loss.numpy()),
        },
    }


def check_size(model: GPT, n: int) -> None:
    """Raise ValueError before any work if the page would show more weights than MOST_WEIGHTS."""
    heads = len(model.h) * model.config.n_head
    if heads * n * n > MOST_WEIGHTS:
        fits = int((MOST_WEIGHTS / heads) ** 0.5)
        advice = f"choose at most {fits} tokens, or one layer with layer=0" if fits else "choose one layer with layer=0"
        raise ValueError(
            f"{n} tokens in {len(model.h)} layers of {model.config.n_head} heads have {heads * n * n} attention "
            f"weights, more than the {MOST_WEIGHTS} that a page of the whole model shows: {advice}"
        )


class Names:
    """The pieces of text of token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.names: dict[int, str] = {}

    def add(self, i: int) -> int:
        """Find the name of an id, and return the id."""
        if i not in self.names:
            self.names[i] = name_token(self.tokenizer, i)
        return i


def find_results(run: ModelRun) -> tuple[dict[str, Json], list[str], list[list[Json]]]:
    """All results as matrices, the names of those in the residual stream, and the results of each block."""
    parts, n_layer = run.parts, len(run.model.h)
    first = parts["h.0.ln_1"].x if run.model.config.norm_first else parts["h.0.attn"].x
    tensors: dict[str, Tensor] = {"token": parts["wte"].y}
    if "wpe" in parts:
        tensors["position"] = parts["wpe"].y
    tensors["embedding"] = first
    stream: list[str] = ["embedding"]
    blocks: list[list[Json]] = []
    for i in range(n_layer):
        path, following = f"h.{i}.", "ln_f" if i == n_layer - 1 else f"h.{i + 1}.ln_1"
        after = parts[following if run.model.config.norm_first else f"{path}ln_2"].x
        found = {
            "norm_1": parts[f"{path}ln_1"].y,
            "attention": parts[f"{path}attn"].y,
            "sum_1": parts[f"{path}ln_2" if run.model.config.norm_first else f"{path}ln_1"].x,
            "norm_2": parts[f"{path}ln_2"].y,
            "inner": parts[f"{path}mlp.c_proj"].x,
            "mlp": parts[f"{path}mlp"].y,
            "sum_2": after,
        }
        blocks.append([])
        for key, in_stream, formula in BEFORE if run.model.config.norm_first else AFTER:
            tensors[path + key] = found[key]
            blocks[-1].append({"key": key, "name": path + key, "stream": in_stream, "formula": formula})
            stream += [path + key] * in_stream
    if "ln_f" in parts:
        tensors["final"] = parts["ln_f"].y
    with_gradient = [name for name, tensor in tensors.items() if tensor.requires_grad]
    gradients = dict(zip(with_gradient, run.get_gradients([tensors[name] for name in with_gradient]), strict=True))
    matrices = {name: pack_result(tensor, gradients.get(name), len(run.idx)) for name, tensor in tensors.items()}
    return matrices, stream, blocks


def pack_result(tensor: Tensor, gradient: np.ndarray | None, n: int) -> Json:
    """A result (..., T, C) with its values and gradient as (T, C)."""
    rows = [None if array is None else array.reshape(n, -1) for array in (tensor.numpy(), gradient)]
    return {"tensor": tensor, "values": rows[0], "gradient": rows[1]}


def read_lens(run: ModelRun, state: Tensor, names: Names) -> Json:
    """What a state of the residual stream would predict: it goes straight to the final norm and the head.

    This is the logit lens (nostalgebraist, 2020). The answer of the last token is not known: the text ends there.
    """
    with modes.no_grad():
        final = run.parts["ln_f"].module(state) if "ln_f" in run.parts else state
        logits = run.parts["lm_head"].module(final).numpy()
    p = ops.softmax(logits.astype(np.float64))
    order = np.argsort(-p, axis=-1, kind="stable")[:, :GUESSES]
    answers = run.idx[1:]
    right = p[np.arange(len(answers)), answers]
    return {
        "ids": [[names.add(i) for i in row] for row in order.tolist()],
        "p": as_numbers(np.take_along_axis(p, order, axis=-1)),
        "answer_p": as_numbers(right),
        "answer_rank": [int((row > q).sum()) + 1 for row, q in zip(p, right, strict=False)],
    }


def measure_sampling(logits: np.ndarray, names: Names) -> Json:
    """The most likely candidates for the next token, and for each setting their probabilities and ten draws.

    A draw is the one of `generate` with that seed. What is not finite cannot be sampled, and has no settings.
    """
    order = np.argsort(-logits, kind="stable")[:CANDIDATES]
    result: Json = {
        "ids": [names.add(i) for i in order.tolist()],
        "logits": as_numbers(logits[order]),
        "temperatures": TEMPERATURES,
        "top_k": TOP_K,
        "top_p": TOP_P,
        "settings": [],
    }
    if not np.isfinite(logits.max()):
        return result
    for temperature in TEMPERATURES:
        for k in TOP_K:
            for top_p in TOP_P:
                p = compute_probabilities(logits, temperature, k, top_p)
                samplers = [Sampler(temperature, k, top_p, seed, 1) for seed in range(DRAWS)]
                draws = [draw(p, sampler.generators[0]) for sampler in samplers]
                setting = {
                    "p": as_numbers(p[order]),
                    "kept": int((p > 0).sum()),
                    "rest": float(p.sum() - p[order].sum()),
                }
                result["settings"].append(setting | {"draws": [names.add(i) for i in draws]})
    return result


def measure_model_decoding(model: GPT, idx: np.ndarray, logits: np.ndarray) -> list[Json]:
    """Decode the sequence with a cache: what each step computes, keeps and throws away. [] if nothing is cached."""
    cache = model.new_cache()
    if cache is None:
        return []
    steps = []
    with model.evaluating(), modes.no_grad(), modes.record():
        for t in range(len(idx)):
            bytes_before = cache.nbytes
            row = model(idx[t : t + 1], cache=cache)
            whole = model(idx[: t + 1])
            kept = (cache.nbytes - bytes_before) // row.dtype.itemsize
            computed = count_numbers(row)
            numbers = {
                "computed": computed,
                "kept": kept,
                "thrown": computed - kept - row.size,
                "read": bytes_before // row.dtype.itemsize,
                "logits": row.size,
            }
            steps.append(numbers | compare_with_whole(row, whole, logits[t]))
    return steps


def count_numbers(y: Tensor) -> int:
    """How many numbers were computed for `y`, itself included; views of others are not counted."""
    values = engine.toposort([y], everything=True)
    return sum(x.size for x in values if x.node is not None and x.node.op.kind not in ("movement", "index"))


def as_numbers(array: np.ndarray) -> list[Any]:
    """Nested lists for JSON, with five significant digits; None for nan and infinity."""
    if array.ndim > 1:
        return [as_numbers(row) for row in array]
    return [float(f"{x:.5g}") if np.isfinite(x) else None for x in array.tolist()]
