"""Train a GPT to sort six digits.

    python examples/sort_digits.py [--short]

A text is six digits 0, 1 or 2, then the same digits in order: 021101 001112. The GPT reads the first six and generates
the last six. Only the generated part counts in the loss, because the prompt is random.

There are 3^6 = 729 prompts; 629 are for training, 100 for testing. Target: all 729 are sorted correctly. It takes some
seconds on one core.

`--short` stops after a few steps; the loss falls, but the target is not reached.
"""

import itertools
import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, make_parser

IGNORED = -100


def make_batch(prompts):
    """Prompts (B, 6) -> the inputs x and the targets y, the next token after each token of x: (B, 11) each."""
    text = np.hstack([prompts, np.sort(prompts)])
    x, y = text[:, :-1], text[:, 1:].copy()
    y[:, : prompts.shape[1] - 1] = IGNORED
    return x, y


def is_sorted(model, prompts):
    """Whether the model sorts each prompt: (B, 6) -> boolean (B,)."""
    answers = tg.generate(model, prompts, 6, temperature=0)[:, 6:]
    return (answers == np.sort(prompts)).all(axis=1)


def main(short=False):
    rng = np.random.default_rng(0)
    prompts = rng.permutation(list(itertools.product(range(3), repeat=6)))
    training, test = prompts[100:], prompts[:100]

    config = tg.nn.GPTConfig(vocab_size=3, block_size=11, n_layer=2, n_head=3, n_embd=48)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(model.parameters(), weight_decay=0.1)
    print(f"{model.count():,} parameters, {len(training)} training prompts, {len(test)} test prompts")

    steps, losses = 20 if short else 400, []
    for step in range(steps):
        x, y = make_batch(training[rng.integers(len(training), size=64)])
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, warmup=20, total=400)
        loss = model.loss(x, y, ignore_index=IGNORED)
        loss.backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    for prompt, answer in zip(test[:3], tg.generate(model, test[:3], 6, temperature=0)[:, 6:], strict=True):
        print(*prompt, "->", *answer)
    n_training, n_test = is_sorted(model, training).sum(), is_sorted(model, test).sum()
    print(f"sorted: {n_training} of {len(training)} training prompts, {n_test} of {len(test)} test prompts,", end=" ")
    print(f"{n_training + n_test} of 729")
    return {"losses": losses, "sorted": int(n_training + n_test)}


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short)
        sys.exit(0 if args.short or result["sorted"] == 729 else 1)
