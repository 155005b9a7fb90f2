"""Makes the small GPT of the package from a run, and measures what its heads do.

    tinygrad-mha train --out run --config cpu --steps 3000 --set n_embd=96 block_size=128 batch_size=12 \\
        learning_rate=2e-3 min_lr=1e-4 sample_interval=0 eval_interval=500
    python examples/small_gpt.py run        # writes tinygrad_mha/pretrained; without RUN it only measures
"""

from __future__ import annotations

import shutil
import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.data import builtin_corpus, split_text
from tinygrad_mha.files import read_json, write_json
from tinygrad_mha.files.run_folder import find_latest
from tinygrad_mha.training.resume import PRETRAINED

FILES = ("model.safetensors", "characters.json")


def pack(run: str) -> None:
    """Copy the model and tokenizer of the latest checkpoint, with a state that leaves out what only training needs."""
    checkpoint = find_latest(run)
    if checkpoint is None:
        sys.exit(f"{run} has no checkpoint")
    PRETRAINED.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(checkpoint / name, PRETRAINED / name)
    state = read_json(checkpoint / "state.json")
    digests = {name: digest for name, digest in state["files"].items() if name in FILES}
    write_json(PRETRAINED / "state.json", state | {"files": digests, "data": {}, "generators": {}})


def measure(windows: int = 64) -> None:
    """Print, for each head, the mean weight on four kinds of key, over windows of the validation text."""
    model, tokenizer = tg.training.load_trained()
    length = model.config.block_size
    ids = tokenizer.encode(split_text(builtin_corpus())[1])
    starts = np.random.default_rng(0).integers(len(ids) - length, size=windows)
    rows = ids[starts[:, None] + np.arange(length)]
    with tg.no_grad():
        _, trace = model(rows, trace=True)
    query, key = np.indices((length, length))
    same = rows[:, :, None] == rows[:, None, :]  # [b, i, j]: token i is token j
    after_pair = np.zeros_like(same)
    after_pair[:, 2:, 2:] = same[:, 2:, 1:-1] & same[:, 1:-1, :-2]  # j follows an earlier copy of tokens i - 1 and i
    kinds = {
        "itself": query == key,
        "previous": key == query - 1,
        "2 to 8 before": (key < query - 1) & (key >= query - 8),
        "first": (key == 0) & (query > 8),
        "same letter": same & (key < query),
        "after a copy": after_pair & (key <= query),
    }
    print(f"{'layer head':12}" + "".join(f"{name:>15}" for name in kinds))
    for layer, steps in enumerate(trace.attention):
        weights = steps.weights.numpy()[:, :, 16:]  # (B, H, T - 16, T): queries that have seen a few tokens
        for head in range(weights.shape[1]):
            shares = []
            for mask in kinds.values():
                mask = np.broadcast_to(mask, same.shape)[:, 16:]
                has_one = mask.any(-1)
                shares.append((weights[:, head] * mask).sum(-1)[has_one].mean())
            print(f"{layer:5} {head + 1:4}  " + "".join(f"{share:15.2f}" for share in shares))


if __name__ == "__main__":
    if sys.argv[1:]:
        pack(sys.argv[1])
    measure()
