"""Makes the small GPT of the package from a run, and measures what its heads do.

    tinygrad-mha train --out run --config cpu --steps 5000 --set n_embd=96 block_size=128 batch_size=12 \\
        position=rotary dropout=0.05 learning_rate=3e-3 min_lr=1e-4 sample_interval=0 eval_interval=500
    python examples/small_gpt.py run        # writes tinygrad_mha/pretrained; without RUN it only measures

Measuring takes about a minute and writes no file.
"""

from __future__ import annotations

import shutil
import sys
from string import ascii_letters

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.data import builtin_corpus, split_text
from tinygrad_mha.files import load_arrays, read_json, save_arrays, write_json
from tinygrad_mha.files.run_folder import find_latest
from tinygrad_mha.programs import ending_quietly, make_parser
from tinygrad_mha.training.resume import PRETRAINED, compute_digest, seal_state

MODEL, TOKENIZER = "model.safetensors", "characters.json"


def pack(run: str) -> None:
    """Copy the model and tokenizer of the latest checkpoint, with a state that leaves out what only training needs.

    The weights are rounded to the nearest float16, and still stored as float32: so they compress to two thirds.
    """
    checkpoint = find_latest(run)
    if checkpoint is None:
        sys.exit(f"{run} has no checkpoint")
    PRETRAINED.mkdir(exist_ok=True)
    weights = load_arrays(checkpoint / MODEL)
    save_arrays(PRETRAINED / MODEL, {name: w.astype(np.float16).astype(np.float32) for name, w in weights.items()})
    shutil.copyfile(checkpoint / TOKENIZER, PRETRAINED / TOKENIZER)
    digests = {name: compute_digest(PRETRAINED / name) for name in (MODEL, TOKENIZER)}
    state = read_json(checkpoint / "state.json") | {"files": digests, "data": {}, "generators": {}}
    write_json(PRETRAINED / "state.json", seal_state(state))


def measure(windows: int = 64) -> None:
    """Print, for each head, its mean weight on several kinds of key, over windows of the validation text; what a head
    would give that attends to all keys evenly; and by how much the loss rises if the output of the head is 0."""
    model, tokenizer = tg.training.load_trained()
    length, n_head = model.config.block_size, model.config.n_head
    ids = tokenizer.encode(split_text(builtin_corpus())[1])
    starts = np.random.default_rng(0).integers(len(ids) - length, size=windows)
    rows = ids[starts[:, None] + np.arange(length)]
    with tg.no_grad():
        _, trace = model(rows, trace=True)
        loss = model.loss(rows[:, :-1], rows[:, 1:]).item()

    kinds = find_kinds(rows, tokenizer)
    print(f"{'layer head':12}" + "".join(f"{name:>12}" for name in kinds) + f"{'loss':>12}")

    def print_row(title: str, weights: np.ndarray, rise: str) -> None:
        shares = []
        for mask in kinds.values():
            there = mask[:, 16:].any(-1)  # queries that have seen a few tokens, and a key of this kind
            shares.append((weights * mask)[:, 16:].sum(-1)[there].mean())
        print(f"{title:12}" + "".join(f"{share:12.2f}" for share in shares) + f"{rise:>12}")

    even = np.tri(length) / np.arange(1, length + 1)[:, None]
    print_row(" evenly", even, f"{loss:.3f}")
    for layer, steps in enumerate(trace.attention):
        for head in range(n_head):
            rise = measure_loss_without(model, rows, layer, head) - loss
            print_row(f"{layer:5} {head + 1:4}", steps.weights.numpy()[:, head], f"+{rise:.3f}")


def find_kinds(rows: np.ndarray, tokenizer: tg.data.Tokenizer) -> dict[str, np.ndarray]:
    """For each kind of key a boolean array (B, T, T): which keys are of this kind, seen from each query."""
    query, key = np.indices((rows.shape[1], rows.shape[1]))
    space, line_feed, letter = (np.isin(rows, tokenizer.encode(text)) for text in (" ", "\n", ascii_letters))
    gap = space | line_feed
    begins = np.zeros_like(gap)  # the first character of a word
    begins[:, 1:] = gap[:, :-1] & ~gap[:, 1:]
    word = np.cumsum(gap, axis=1)
    same_word = (word[:, :, None] == word[:, None, :]) & ~gap[:, None, :]
    kinds = {
        "itself": (key == query)[None],
        "previous": (key == query - 1)[None],
        "this word": same_word,
        "word starts": begins[:, None, :],
        "spaces": space[:, None, :],
        "line feeds": line_feed[:, None, :],
        "other signs": ~(letter | gap)[:, None, :],
    }
    return {name: mask & (key <= query) & np.ones((len(rows), 1, 1), bool) for name, mask in kinds.items()}


def measure_loss_without(model: tg.nn.GPT, rows: np.ndarray, layer: int, head: int) -> float:
    """The loss if the rows of W_O that belong to a head are 0."""
    weight = model.h[layer].attn.c_proj.weight
    before, width = weight.numpy().copy(), weight.shape[0] // model.config.n_head
    after = before.copy()
    after[head * width : (head + 1) * width] = 0
    weight.assign_(after)
    with tg.no_grad():
        loss = model.loss(rows[:, :-1], rows[:, 1:]).item()
    weight.assign_(before)
    return loss


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("run", nargs="?", help="the folder of the run to make it from")
        args = parser.parse_args()
        if args.run:
            pack(args.run)
        measure()
