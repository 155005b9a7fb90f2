"""Learn to sort six digits, from examples alone.

    python examples/sort_digits.py [--short]

The text is six digits 0, 1 or 2 and then the same digits in order: 021101 001112. A GPT reads the first six and writes
the last six. Only what it writes counts in the loss, since nobody could guess the prompt.

There are 3^6 = 729 prompts; the model trains on 629 and never meets the other 100.
Target: all 729 sorted without a mistake, those 100 too. Some seconds on one core.

`--short` stops after a few steps and only shows that the loss falls.
"""

import argparse
import itertools
import sys

import numpy as np

import tinygrad_mha as tg

IGNORED = -100


def as_examples(prompts):
    """x, what is read, and y, what should come next after each token of x: (B, 11) each."""
    text = np.hstack([prompts, np.sort(prompts)])
    x, y = text[:, :-1], text[:, 1:].copy()
    y[:, : prompts.shape[1] - 1] = IGNORED
    return x, y


def is_sorted(model, prompts):
    """Whether the model sorts each of the prompts: boolean (B,)."""
    answers = tg.generate(model, prompts, 6, temperature=0)[:, 6:]
    return (answers == np.sort(prompts)).all(axis=1)


def main(short=False):
    rng = np.random.default_rng(0)
    prompts = rng.permutation(list(itertools.product(range(3), repeat=6)))
    seen, unseen = prompts[100:], prompts[:100]

    config = tg.nn.GPTConfig(vocab_size=3, block_size=11, n_layer=2, n_head=3, n_embd=48)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(model.parameters(), weight_decay=0.1)
    print(f"{model.count():,} parameters, {len(seen)} prompts to learn from, {len(unseen)} kept back")

    steps, losses = 20 if short else 400, []
    for step in range(steps):
        x, y = as_examples(seen[rng.integers(len(seen), size=64)])
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, warmup=20, total=400)
        loss = model.loss(x, y, ignore_index=IGNORED)
        loss.backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    for prompt, answer in zip(unseen[:3], tg.generate(model, unseen[:3], 6, temperature=0)[:, 6:], strict=True):
        print(*prompt, "->", *answer)
    right = is_sorted(model, seen).sum(), is_sorted(model, unseen).sum()
    print(f"sorted: {right[0]} of {len(seen)} seen, {right[1]} of {len(unseen)} unseen, {sum(right)} of 729")
    return {"losses": losses, "sorted": int(sum(right))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps only")
    args = parser.parse_args()
    result = main(args.short)
    sys.exit(0 if args.short or result["sorted"] == 729 else 1)
