"""The main job in two minutes: attention by hand, its gradients proved, its cache proved, a GPT trained and sampled.

Everything that is shown comes from the run itself, and is written into a folder.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import viz
from tinygrad_mha.check import gradcheck
from tinygrad_mha.decoding import ContextFullWarning, CountedModel, generate
from tinygrad_mha.engine import toposort
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, Block, GPTConfig, KVCache, MultiHeadAttention
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.training import Run, preset, train

TOKENS = ["the", "cat", "sat"]
STEPS = 1500


def run_demo(folder: str | os.PathLike[str], steps: int = STEPS, say: Callable[[str], None] = print) -> Path:
    """Run all parts, writing into `folder`, which must not hold anything yet. Returns its path.

    Raises:
        FileExistsError: the folder holds something.
        OSError: it cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something already: choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        *attention_by_hand(folder, say),
        *block_proved(folder, say),
        *cache_proved(say),
        *gpt_trained(folder, steps, say),
    ]
    say(f"\nEverything is in {folder}:")
    for path, what in written:
        say(f"  {path.relative_to(folder)!s:18} {what}")
    return folder


Written = list[tuple[Path, str]]


def title(number: int, text: str, say: Callable[[str], None]) -> None:
    say(f"\n{number}. {text}\n")


def article(seed: int = 0) -> tuple[MultiHeadAttention, Tensor]:
    """X 3x5, W_Q and W_K 5x7, W_V 5x11, two heads, W_O 22x5: a prime for every width, so no axis can be mistaken."""
    rng = np.random.default_rng(seed)
    mha = MultiHeadAttention(d_model=5, n_head=2, d_k=7, d_v=11, rng=rng).astype(np.float64)
    return mha, Tensor(rng.standard_normal((len(TOKENS), 5)), requires_grad=True, name="X")


def words(tokens: Sequence[str], d_model: int, seed: int = 0) -> np.ndarray:
    """A vector for each word, random but the same wherever the word stands, plus that of its place: (T, d_model)."""
    rng = np.random.default_rng(seed)
    table = {word: rng.standard_normal(d_model) for word in dict.fromkeys(tokens)}
    return np.array([table[word] for word in tokens]) + sinusoidal(np.arange(len(tokens)), d_model)


def small_block(seed: int = 0) -> Block:
    """A GPT's block with two heads, 6 wide."""
    return GPT(GPTConfig(vocab_size=7, block_size=5, n_layer=1, n_head=2, n_embd=6), seed=seed).h[0]


# What can be drawn by name: each gives a tensor whose gradients have been computed.


def draw_attention(seed: int = 0) -> Tensor:
    mha, x = article(seed)
    y = mha.per_head(x, causal=True)
    y.backward(np.random.default_rng(seed + 1).standard_normal(y.shape))
    return y


def draw_block(seed: int = 0) -> Tensor:
    block = small_block(seed).astype(np.float64)
    rng = np.random.default_rng(seed)
    y = block(Tensor(rng.standard_normal((1, 3, 6)), requires_grad=True, name="x")).named("y")
    y.backward(rng.standard_normal(y.shape))
    return y


def draw_gpt(seed: int = 0) -> Tensor:
    ids = Tensor(np.random.default_rng(seed).integers(0, 65, (1, 9)))
    model = GPT(GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=32), seed=seed)
    loss = model.loss(ids[:, :-1].named("ids"), ids[:, 1:].named("targets")).named("loss")
    loss.backward()
    return loss


SUBJECTS: dict[str, Callable[[int], Tensor]] = {"mha": draw_attention, "block": draw_block, "gpt": draw_gpt}


def drawn(y: Tensor, path: Path, what: str, **options: Any) -> Written:
    """Draw into a file; without any Graphviz, write the DOT text, and say so."""
    picture = viz.graph(y, **options)
    try:
        return [(picture.save(path), what)]
    except viz.NoEngineError as error:
        path = picture.save(path.with_suffix(".dot"))
        return [(path, f"{what}, as text only: {error}")]


def attention_by_hand(folder: Path, say: Callable[[str], None]) -> Written:
    title(1, "Causal multi-head attention, matrix by matrix", say)
    y = draw_attention()
    named = {t.name: t for t in toposort([y]) if t.name}
    for name in ("X", "Q_1", "K_1", "V_1", "scores_1", "S_1", "H_1", "Y"):
        t = named[name]
        say(f"{name}  {'x'.join(map(str, t.shape))}")
        say(rows_of(t.numpy()))
    mha, x = article()
    batched = mha(x, causal=True)
    say(f"Both heads at once give the same Y: largest difference {np.abs(batched.numpy() - y.numpy()).max():.0e}")
    page = viz.walkthrough(mha, words(TOKENS, 5), TOKENS).save(folder / "walkthrough.html")
    return [
        *drawn(y, folder / "attention.svg", "every matrix of it, with values and gradients"),
        (page, "the same, step by step: open it in a browser"),
    ]


def rows_of(a: np.ndarray) -> str:
    return "\n".join("  " + " ".join(f"{v:6.2f}" for v in row) for row in a)


def block_proved(folder: Path, say: Callable[[str], None]) -> Written:
    title(2, "Every gradient of a Transformer block against finite differences", say)
    report = gradcheck(small_block(), np.random.default_rng(0).standard_normal((1, 3, 6)))
    say(str(report))
    path = folder / "gradcheck.txt"
    path.write_text(f"{report}\n", encoding="utf-8")
    return [(path, "the gradient check of the block")]


def cache_proved(say: Callable[[str], None]) -> Written:
    title(3, "The KV cache: the fourth row costs one row", say)
    mha, x = article()
    fourth = np.random.default_rng(2).standard_normal((1, 5))
    with no_grad():
        whole = mha(np.concatenate([x.numpy(), fourth]), causal=True).numpy()
        cache = KVCache()
        mha(x.numpy(), causal=True, cache=cache)
        last = mha(fourth, causal=True, cache=cache).numpy()
    say(f"Y_4 of all four rows at once   {' '.join(f'{v:9.6f}' for v in whole[3])}")
    say(f"Y_4 alone, through the cache   {' '.join(f'{v:9.6f}' for v in last[0])}")
    say(f"largest difference {np.abs(whole[3] - last[0]).max():.0e}; kept: K and V of {cache.length} rows, no Q")
    return []


def gpt_trained(folder: Path, steps: int, say: Callable[[str], None]) -> Written:
    config = preset("tiny", steps=steps, eval_interval=max(1, steps // 6), sample_interval=0)
    title(4, f"A GPT, trained on the Python language reference for {steps} steps", say)
    run = train(config, folder=folder / "gpt", show="bar" if sys.stderr.isatty() else "quiet")
    say(f"{run.model.count():,} parameters; validation loss in nats per character:")
    for row in run.log.rows:
        if "validation_loss" in row:
            say(f"  step {row['step']:5}   {row['validation_loss']:.3f}")
    text = sample(run, say)
    path = folder / "sample.txt"
    path.write_text(text, encoding="utf-8")
    written = [
        (folder / "gpt", "the run; go on with `tinygrad-mha train --resume --steps N --out` and this folder"),
        (path, "what it wrote"),
        *drawn(draw_gpt(), folder / "gpt.svg", "a GPT, its blocks folded", depth=1),
    ]
    if (folder / "gpt" / "loss.png").exists():
        written.append((folder / "gpt" / "loss.png", "the loss curve"))
    return written


def sample(run: Run, say: Callable[[str], None]) -> str:
    title(5, "A sample, generated with the cache", say)
    prompt, new = run.tokenizer.encode("The "), 28
    cached, uncached = CountedModel(run.model), CountedModel(run.model)
    with_cache = generate(cached, prompt, new, temperature=0)
    without_cache = generate(uncached, prompt, new, temperature=0, use_cache=False)
    say(f"greedy, with and without the cache, the same tokens: {np.array_equal(with_cache, without_cache)}")
    costs = cached.multiply_adds, uncached.multiply_adds
    say(f"multiply-adds {costs[0]:,} with the cache, {costs[1]:,} without: {costs[1] / costs[0]:.1f} times as many\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextFullWarning)  # said below
        ids = generate(run.model, prompt, 300, temperature=0.8, top_k=20, seed=0, on_full="slide")
    text = run.tokenizer.decode(ids[0])
    say(text)
    say(f"\n(Beyond {run.model.config.block_size} characters the context slides, and each new one is computed anew.)")
    return text
