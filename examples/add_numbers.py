"""Train a GPT to add two numbers below 100.

    python examples/add_numbers.py [--short]

A text is the four digits of a and b, then the three of their sum, ones first: 85 + 50 = 135 is 8550531. With ones
first, as on paper, each carry is known before it is needed. Only the sum counts in the loss.

There are 10 000 pairs; 9000 are for training, 1000 for testing. Target: 99 % of the test pairs and of all pairs are
added correctly. It takes less than a minute on one core.

`--short` stops after a few steps; the loss falls, but the target is not reached.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, make_parser

IGNORED = -100


def split_digits(numbers, n):
    """The last n decimal digits of each number, ones first: (B,) -> (B, n)."""
    return numbers[:, None] // 10 ** np.arange(n) % 10


def make_prompts(a, b):
    """The digits of a and b, tens first: (B,), (B,) -> (B, 4)."""
    return np.hstack([split_digits(a, 2)[:, ::-1], split_digits(b, 2)[:, ::-1]])


def make_batch(a, b):
    """Pairs -> the inputs x and the targets y, the next token after each token of x: (B, 6) each."""
    text = np.hstack([make_prompts(a, b), split_digits(a + b, 3)])
    x, y = text[:, :-1], text[:, 1:].copy()
    y[:, :3] = IGNORED
    return x, y


def generate_sums(model, a, b):
    """The sums that the model generates: (B,)."""
    answers = tg.generate(model, make_prompts(a, b), 3, temperature=0)[:, 4:]
    return answers @ [1, 10, 100]


def main(short=False):
    rng = np.random.default_rng(0)
    pairs = rng.permutation(10_000)
    training, test = pairs[1000:], pairs[:1000]

    config = tg.nn.GPTConfig(vocab_size=10, block_size=6, n_layer=2, n_head=4, n_embd=64)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(model.parameters(), weight_decay=0.1)
    print(f"{model.count():,} parameters, {len(training)} training pairs, {len(test)} test pairs")

    total = 900
    steps, losses = 30 if short else total, []
    for step in range(steps):
        x, y = make_batch(*np.divmod(training[rng.integers(len(training), size=128)], 100))
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, warmup=20, total=total)
        loss = model.loss(x, y, ignore_index=IGNORED)
        loss.backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    a, b = np.divmod(pairs, 100)
    answers = generate_sums(model, a, b)
    right = answers == a + b  # the test pairs first
    for i in range(3):
        print(f"{a[i]:2} + {b[i]:2} -> {answers[i]:3}   {'right' if right[i] else 'wrong'}, a test pair")
    print(f"right: {right[:1000].sum()} of 1000 test pairs, {right.sum()} of 10000")
    return {"losses": losses, "test": float(right[:1000].mean()), "all": float(right.mean())}


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short)
        sys.exit(0 if args.short or min(result["test"], result["all"]) >= 0.99 else 1)
