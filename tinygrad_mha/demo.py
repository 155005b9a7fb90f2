"""The demo: attention by hand, a gradient check, a verdict, the KV cache, and a GPT that is trained, in two minutes.

All numbers come from the run itself. The results are written into a folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import viz
from tinygrad_mha.check import attention as check_attention
from tinygrad_mha.check import gradcheck
from tinygrad_mha.decoding import ContextFullWarning, CountedModel, generate
from tinygrad_mha.engine import toposort
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, Block, GPTConfig, KVCache, MultiHeadAttention
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.training import Run, preset, train

__all__ = ["OWN_ATTENTION", "STEPS", "SUBJECTS", "embed_words", "write_demo"]

TOKENS = ["the", "cat", "sat"]
STEPS = 1500

# A first function to check and to change.
OWN_ATTENTION = """def attention(q, k, v):
    return (q @ k.mT / k.shape[-1] ** 0.5).softmax() @ v
"""

Say = Callable[[str], None]
Files = list[tuple[Path, str]]  # the files that a part of the demo wrote, and what they contain


def write_demo(folder: str | os.PathLike[str], steps: int = STEPS, say: Say = print) -> Path:
    """Run all parts and write their results into `folder`, which must be empty or new. Returns its path.

    If a part fails or is interrupted, the folder is removed.

    Raises:
        FileExistsError: the folder is not empty.
        OSError: it cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files = [*show_attention(folder, say), *check_block(folder, say)]
        files += judge_attention(folder, say)
        compare_cache(say)
        files += train_gpt(folder, steps, say)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"\nAll files are in {folder}:")
    for path, content in files:
        say(f"  {path.relative_to(folder)!s:18} {content}")
    if any(path.suffix == ".dot" for path, _ in files):
        say('Graphviz, which draws .dot files, was not found or does not work: pip install "tinygrad_mha[render]"')
    tell_next(folder, steps, say)
    return folder


def tell_next(folder: Path, steps: int, say: Say) -> None:
    """Print commands that continue where the demo ends; each can be run as it stands."""
    gpt, own = (shlex.quote(str(path)) for path in (folder / "gpt", folder / "model.py:attention"))
    for purpose, command in (
        ("To change an attention in the browser, and see what it computes", "lab --open"),
        ("To follow a sentence of yours through every matrix", 'walkthrough "the cat sat on mats" --open'),
        ("To check a function of yours: change the one in model.py first", f"check {own}"),
        ("To train the GPT further", f"train --resume --steps {steps + STEPS} --out {gpt}"),
    ):
        say(f"{purpose}:\n  tinygrad-mha {command}")


# --------------------------------------------------------------------------------------------------------------------
# What can be drawn by name: each function returns a tensor whose gradients have been computed.


def make_attention(seed: int = 0) -> tuple[MultiHeadAttention, Tensor]:
    """Two heads, and an input X 3x5: W_Q and W_K 5x7, W_V 5x11, W_O 22x5. Prime widths tell the axes apart."""
    rng = np.random.default_rng(seed)
    mha = MultiHeadAttention(d_model=5, n_head=2, d_k=7, d_v=11, rng=rng).astype(np.float64)
    return mha, Tensor(rng.standard_normal((len(TOKENS), 5)), requires_grad=True, name="X")


def make_block(seed: int = 0) -> Block:
    """A block of a GPT with two heads and width 6."""
    return GPT(GPTConfig(vocab_size=7, block_size=5, n_layer=1, n_head=2, n_embd=6), seed=seed).h[0]


def run_attention(seed: int = 0) -> Tensor:
    """Y of causal attention, computed head by head."""
    mha, x = make_attention(seed)
    y = mha.per_head(x, causal=True)
    y.backward(np.random.default_rng(seed + 1).standard_normal(y.shape))
    return y


def run_block(seed: int = 0) -> Tensor:
    """The output of a block of a GPT."""
    block = make_block(seed).astype(np.float64)
    rng = np.random.default_rng(seed)
    y = block(Tensor(rng.standard_normal((1, 3, 6)), requires_grad=True, name="x")).named("y")
    y.backward(rng.standard_normal(y.shape))
    return y


def run_gpt(seed: int = 0) -> Tensor:
    """The loss of a GPT with four blocks."""
    ids = Tensor(np.random.default_rng(seed).integers(0, 65, (1, 9)))
    model = GPT(GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=32), seed=seed)
    loss = model.loss(ids[:, :-1].named("ids"), ids[:, 1:].named("targets")).named("loss")
    loss.backward()
    return loss


SUBJECTS: dict[str, Callable[[int], Tensor]] = {"mha": run_attention, "block": run_block, "gpt": run_gpt}


def embed_words(tokens: Sequence[str], d_model: int, seed: int = 0) -> np.ndarray:
    """A random vector per distinct word, plus the sinusoids of its position: (T, d_model)."""
    rng = np.random.default_rng(seed)
    table = {word: rng.standard_normal(d_model) for word in dict.fromkeys(tokens)}
    return np.array([table[word] for word in tokens]) + sinusoidal(np.arange(len(tokens)), d_model)


def draw(y: Tensor, path: Path, content: str, **options: Any) -> Files:
    """Draw the computation of `y` into a file; without Graphviz, write the DOT text."""
    picture = viz.graph(y, **options)
    try:
        return [(picture.save(path), content)]
    except viz.NoEngineError:
        return [(picture.save(path.with_suffix(".dot")), f"{content}, as text only")]


# --------------------------------------------------------------------------------------------------------------------
# The parts


def show_attention(folder: Path, say: Say) -> Files:
    """Part 1: print the matrices of causal attention; draw them and write the page."""
    say("\n1. Causal multi-head attention, matrix by matrix\n")
    y = run_attention()
    named = {t.name: t for t in toposort([y]) if t.name}
    for name in ("X", "Q_1", "K_1", "V_1", "scores_1", "S_1", "H_1", "Y"):
        matrix = named[name].numpy()
        say(f"{name}  {'x'.join(map(str, matrix.shape))}")
        say("\n".join("  " + " ".join(f"{v:z6.2f}" for v in row) for row in matrix))
    mha, x = make_attention()
    batched = mha(x, causal=True)
    say(f"Both heads at once give the same Y: largest difference {np.abs(batched.numpy() - y.numpy()).max():.0e}")
    page = viz.walkthrough(mha, embed_words(TOKENS, 5), TOKENS).save(folder / "walkthrough.html")
    return [
        *draw(y, folder / "attention.svg", "every matrix, with values and gradients"),
        (page, "the same step by step: open it in a browser"),
    ]


def check_block(folder: Path, say: Say) -> Files:
    """Part 2: check the gradients of a block."""
    say("\n2. Every gradient of a Transformer block against finite differences\n")
    report = gradcheck(make_block(), np.random.default_rng(0).standard_normal((1, 3, 6)))
    say(str(report))
    path = folder / "gradcheck.txt"
    path.write_text(f"{report}\n", encoding="utf-8")
    return [(path, "the gradient check of the block")]


def judge_attention(folder: Path, say: Say) -> Files:
    """Part 3: the verdict on an attention with a fault; write one without, for changes."""
    say("\n3. An attention that divides its scores by d, not by its root, and what a check says of it\n")

    def scaled_by_d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1]).softmax() @ v

    say(str(check_attention(scaled_by_d)))
    path = folder / "model.py"
    path.write_text(OWN_ATTENTION, encoding="utf-8")
    return [(path, "an attention without the fault, to change and to check")]


def compare_cache(say: Say) -> None:
    """Part 4: compare a row computed with a KV cache with the full computation."""
    say("\n4. The KV cache: the fourth row costs one row\n")
    mha, x = make_attention()
    fourth = np.random.default_rng(2).standard_normal((1, 5))
    with no_grad():
        whole = mha(np.concatenate([x.numpy(), fourth]), causal=True).numpy()
        cache = KVCache()
        mha(x.numpy(), causal=True, cache=cache)
        last = mha(fourth, causal=True, cache=cache).numpy()
    say(f"Y_4 of all four rows at once   {' '.join(f'{v:9.6f}' for v in whole[3])}")
    say(f"Y_4 alone, with the cache      {' '.join(f'{v:9.6f}' for v in last[0])}")
    say(f"largest difference {np.abs(whole[3] - last[0]).max():.0e}; cached: K and V of {cache.length} rows, no Q")


def train_gpt(folder: Path, steps: int, say: Say) -> Files:
    """Part 5: train a GPT, and sample from it."""
    config = preset("tiny", steps=steps, eval_interval=max(1, steps // 6), sample_interval=0)
    say(f"\n5. A GPT, trained on the Python language reference for {steps} steps\n")
    run = train(config, folder=folder / "gpt", show="bar" if sys.stderr.isatty() else "quiet")
    if run.interrupted:
        raise KeyboardInterrupt
    say(f"{run.model.count():,} parameters; validation loss in nats per character:")
    for row in run.log.rows:
        if "validation_loss" in row:
            say(f"  step {row['step']:5}   {row['validation_loss']:.3f}")
    path = folder / "sample.txt"
    path.write_text(sample_text(run, say), encoding="utf-8")
    files = [
        (folder / "gpt", "the folder of the run"),
        (path, "the text that the GPT generated"),
        *draw(run_gpt(), folder / "gpt.svg", "a GPT with folded blocks", depth=1),
    ]
    plot = folder / "gpt" / "loss.png"
    return [*files, (plot, "the loss curve")] if plot.exists() else files


def sample_text(run: Run, say: Say) -> str:
    """Part 6: generate text with and without the cache."""
    say("\n6. A sample, generated with the cache\n")
    prompt = run.tokenizer.encode("The ")
    cached, uncached = CountedModel(run.model), CountedModel(run.model)
    with_cache = generate(cached, prompt, 28, temperature=0)
    without_cache = generate(uncached, prompt, 28, temperature=0, use_cache=False)
    say(f"greedy, with and without the cache, the same tokens: {np.array_equal(with_cache, without_cache)}")
    costs = cached.multiply_adds, uncached.multiply_adds
    say(f"multiply-adds {costs[0]:,} with the cache, {costs[1]:,} without: {costs[1] / costs[0]:.1f} times as many\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextFullWarning)  # explained below
        ids = generate(run.model, prompt, 300, temperature=0.8, top_k=20, seed=0, on_full="slide")
    text = run.tokenizer.decode(ids[0])
    say(text)
    say(f"\n(After {run.model.config.block_size} characters the context slides, and each new one is computed anew.)")
    return text
