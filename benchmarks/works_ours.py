"""The works of `performance.py` in tinygrad_mha. A work returns its step, and results to compare with the peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from works_files import load_arrays, make_attention_arrays, make_tokens, merge_heads, read

import tinygrad_mha as tg
from tinygrad_mha import nn, optim

Work = tuple[Callable[[], Any], list[float]]
if getattr(getattr(tg, "kernels", None), "active", None) == "numba":  # a baseline may be older than the attribute
    tg.kernels.import_compiled()  # so that its memory counts for the import, as that of the other libraries
VERSIONS = {"tinygrad_mha": tg.__version__, "numpy": np.__version__}


def attention() -> Work:
    """The two-head causal attention with X 3x5, W_Q and W_K 5x7, W_V 5x11, W_O 22x5, operation by operation."""
    step = make_ours_attention(*make_attention_arrays())
    return step, [float(np.abs(g).sum()) for g in step()]


def make_ours_attention(w: dict[str, np.ndarray], x: np.ndarray, g: np.ndarray, allow: np.ndarray) -> Callable[[], Any]:
    p = {name: tg.Tensor(a, requires_grad=True) for name, a in w.items()}
    X, ops = tg.Tensor(x), tg.ops

    def step() -> list[np.ndarray]:
        heads = []
        for h in "12":
            q, k, v = X @ p["Q" + h], X @ p["K" + h], X @ p["V" + h]
            scores = (q @ k.mT) * 7**-0.5
            heads.append(ops.softmax(ops.mask(scores, allow)) @ v)
        y = ops.concat(*heads, axis=-1) @ p["O"]
        for t in p.values():
            t.grad = None
        y.backward(g, leaves_only=True)
        return [t.grad for t in p.values()]

    return step


def attention_module() -> Work:
    """The same attention as a module."""
    w, x, g, _ = make_attention_arrays()
    mha = nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, fused=True)
    parameters = [mha.wq, mha.wk, mha.wv, mha.wo]
    for p, a in zip(parameters, merge_heads(w).values(), strict=True):
        p.assign_(a)
    X = tg.Tensor(x)

    def step() -> list[np.ndarray]:
        y = mha(X, causal=True)
        for p in parameters:
            p.grad = None
        y.backward(g, leaves_only=True)
        return [p.grad for p in parameters]

    return step, [float(np.abs(g).sum()) for g in step()]


def train(folder: str, batch: int, workers: int | None = None) -> Work:
    """A training step: loss, backward, clipping to norm 1, AdamW. The trainer splits the batch over `workers`."""
    config = nn.GPTConfig(**read(folder, "config.json"))
    model = nn.GPT(config)
    model.load_state_dict(load_arrays(folder))
    parameters = list(model.parameters())
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.99))
    tokens = make_tokens(config.vocab_size, batch, config.block_size + 1)
    idx, targets = tokens[:, :-1], tokens[:, 1:]

    def compute_gradients() -> float:
        loss = model.loss(idx, targets)
        loss.backward(leaves_only=True)
        return loss.item()

    if workers is not None:
        from tinygrad_mha.training import TrainConfig
        from tinygrad_mha.training.parallel import Workers

        shape = {"batch_size": batch, "block_size": config.block_size}
        shared = Workers(model.train(), TrainConfig(**shape), tokens.ravel(), workers)
        shared.limit_blas().__enter__()  # for as long as this process lives

        def compute_gradients() -> float:
            return shared.accumulate([(idx, targets)])

    def step() -> float:
        optimizer.zero_grad()
        loss = compute_gradients()
        optim.clip_grad_norm(parameters, 1.0)
        optimizer.step()
        return loss

    return step, [step() for _ in range(3)]


def generate(folder: str, prompt: int, new: int, use_cache: bool = True) -> Work:
    """Greedy decoding of `new` tokens after `prompt` random ones."""
    model = nn.GPT.from_pretrained(folder)
    idx = make_tokens(model.config.vocab_size, 1, prompt)

    def step() -> np.ndarray:
        return tg.generate(model, idx, new, temperature=0, eos=None, use_cache=use_cache)

    return step, np.asarray(step())[0].tolist()


def generate_own(prompt: int, new: int) -> Work:
    """Greedy decoding of a GPT with an attention of a person's own."""

    class Own(nn.Module):
        def __init__(self, config: Any, rng: np.random.Generator) -> None:
            self.n_head, width = config.n_head, config.n_embd
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False, rng=rng) for _ in range(4))

        def forward(self, x: Any, cache: Any = None) -> Any:
            q, k, v = (self.split(w(x)) for w in (self.wq, self.wk, self.wv))
            if cache is not None:
                k, v = cache.append(k, v)
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            scores = tg.ops.mask(scores, nn.causal(q.shape[-2], k.shape[-2]))
            heads = scores.softmax() @ v
            return self.wo(heads.swapaxes(-2, -3).reshape(*x.shape))

        def split(self, x: Any) -> Any:
            return x.reshape(*x.shape[:-1], self.n_head, x.shape[-1] // self.n_head).swapaxes(-2, -3)

    config = nn.GPTConfig(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=128)
    model = nn.GPT(config, seed=0, attention=Own).eval()
    idx = make_tokens(65, 1, prompt)

    def step() -> np.ndarray:
        return tg.generate(model, idx, new, temperature=0, eos=None)

    return step, np.asarray(step())[0].tolist()


def prefill(folder: str, tokens: int) -> Work:
    """The logits after `tokens` tokens, and the cache of all layers."""
    model = nn.GPT.from_pretrained(folder)
    idx = make_tokens(model.config.vocab_size, 1, tokens)

    def step() -> np.ndarray:
        with tg.no_grad():
            return model(idx, cache=nn.KVCache(model.config.n_layer), last_only=True).numpy()

    return step, step().ravel()[:100].tolist()


# --------------------------------------------------------------------------------------------------------------------
# Floors: the matrix products of a work and nothing else, or its calls of NumPy without a graph


def attention_calls() -> Work:
    """The calls of NumPy of `attention`, forward and backward, with the gradients written by hand."""
    w, x, g, allow = make_attention_arrays()
    scale = x.dtype.type(7**-0.5)

    def step() -> list[np.ndarray]:
        saved = []
        for h in "12":
            q, k, v = x.dot(w["Q" + h]), x.dot(w["K" + h]), x.dot(w["V" + h])
            weights = np.where(allow, q.dot(k.T) * scale, -np.inf)
            weights -= weights.max(axis=-1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= weights.sum(axis=-1, keepdims=True)
            saved.append((q, k, v, weights, weights.dot(v)))
        concat = np.concatenate([head[-1] for head in saved], axis=-1)
        concat.dot(w["O"])
        gradients = [concat.T.dot(g)]
        g_heads = np.split(g.dot(w["O"].T), 2, axis=-1)
        for (q, k, v, weights, _), g_head in zip(saved, g_heads, strict=True):
            g_weights = g_head.dot(v.T)
            g_scores = weights * (g_weights - (g_weights * weights).sum(axis=-1, keepdims=True)) * scale
            gradients += [x.T.dot(g_scores.dot(k)), x.T.dot(g_scores.T.dot(q)), x.T.dot(weights.T.dot(g_head))]
        return gradients

    return step, []


def train_products(folder: str, batch: int) -> Work:
    """The products of a training step, forward and backward, each on operands of its own."""
    config = read(folder, "config.json")
    width, tokens, n_layer, n_head = (config[key] for key in ("n_embd", "block_size", "n_layer", "n_head"))
    rng, inner, rows, heads, d = np.random.default_rng(0), 4 * width, batch * tokens, batch * n_head, width // n_head
    linear = [(rows, width, 3 * width), (rows, width, width), (rows, width, inner), (rows, inner, width)]
    shapes = [(1, *s) for s in linear * n_layer] + [(1, rows, width, config["vocab_size"])]
    shapes += [(heads, tokens, d, tokens), (heads, tokens, tokens, d)] * n_layer
    operands = []
    for n, i, j, k in shapes:
        operands.append([rng.standard_normal(s, np.float32) for s in ((n, i, j), (n, j, k), (n, i, k))])

    def step() -> None:
        for x, w, g in operands:
            for a, b in zip(x, w, strict=True):
                a @ b
            for a, b, d in zip(x, w, g, strict=True):
                d @ b.T, a.T @ d

    return step, []


def decode_calls(folder: str, prompt: int, new: int) -> Work:
    """The calls of NumPy of `generate` for a GPT-2, in one function: the tokens after a prompt that was read before."""
    config = read(folder, "config.json")
    w = {name.removeprefix("transformer."): a for name, a in load_arrays(folder).items()}
    n_head, width = config["n_head"], config["n_embd"]
    d = width // n_head
    caches = [np.zeros((2, n_head, prompt + new, d), np.float32) for _ in range(config["n_layer"])]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        y = x.astype(np.float64)
        y -= float(np.add.reduce(y)) / width
        y *= 1.0 / math.sqrt(y.dot(y) / width + 1e-5)
        return y.astype(np.float32) * w[name + ".weight"] + w[name + ".bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x.dot(w[name + ".weight"]) + w[name + ".bias"]

    def read_token(token: int, position: int) -> int:
        x = w["wte.weight"][token] + w["wpe.weight"][position]
        for i, cache in enumerate(caches):
            q, *cache[:, :, position] = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").reshape(3, n_head, d)
            k, v = cache[:, :, : position + 1]
            scores = np.matmul(k, (q * d**-0.5)[..., None])
            scores -= np.maximum.reduce(scores, axis=-2, keepdims=True)
            np.exp(scores, out=scores)
            scores /= np.add.reduce(scores, axis=-2, keepdims=True)
            x = x + linear(np.matmul(scores.mT, v).reshape(width), f"h.{i}.attn.c_proj")
            hidden = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
            z = hidden * hidden
            z *= -2 * math.sqrt(2 / math.pi) * 0.044715
            z -= 2 * math.sqrt(2 / math.pi)
            z *= hidden
            np.exp(z, out=z)
            z += 1
            hidden /= z
            x = x + linear(hidden, f"h.{i}.mlp.c_proj")
        return int(norm(x, "ln_f").dot(w["wte.weight"].T).argmax())

    for position, token in enumerate(make_tokens(config["vocab_size"], 1, prompt)[0]):
        first = read_token(token, position)

    def step() -> list[int]:
        tokens = [first]
        for position in range(prompt, prompt + new - 1):
            tokens.append(read_token(tokens[-1], position))
        return tokens

    return step, step()


def decode_products(folder: str, new: int, **_: int) -> Work:
    """One vector times every matrix of the model, once per new token."""
    matrices = [a for name, a in load_arrays(folder).items() if a.ndim == 2 and "wpe" not in name]
    rows = {a.shape[0]: np.ones((1, a.shape[0]), np.float32) for a in matrices}

    def step() -> None:
        for _ in range(new):
            for a in matrices:
                rows[a.shape[0]] @ a

    return step, []


FLOORS = (attention_calls, train_products, decode_calls, decode_products)
WORKS: dict[str, Callable[..., Work]] = {
    f.__name__: f for f in (attention, attention_module, train, generate, generate_own, prefill, *FLOORS)
}
