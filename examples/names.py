"""Learn from a list of names how names are spelled, and make up new ones.

    python examples/names.py [--file FILE] [--short]

A name is read letter by letter, from a line feed to a line feed. The list beside this file has 1300 given names of
many countries; FILE may be any other, one name a line. A tenth of the names is kept back: how surprised the model is
by their letters (the validation loss, in nats per letter) tells whether it has learned to spell or to recite.

Target: a validation loss below 2.3 on the list beside this file. Knowing nothing is ln 27 = 3.30, knowing only how
often each letter occurs 2.84. And most of the names that it makes up stand nowhere in the list. Less than a minute on
one core.

`--short` stops after a few steps and only shows that the loss falls.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg

IGNORED = -100
END = "\n"


def as_examples(names, tokenizer, width):
    """x, what is read, and y, what comes next after each letter of x; short names are filled up, and not counted."""
    x = np.zeros((len(names), width), np.int64)
    y = np.full((len(names), width), IGNORED)
    for row, name in enumerate(names):
        text = tokenizer.encode(END + name + END)
        x[row, : len(text) - 1], y[row, : len(text) - 1] = text[:-1], text[1:]
    return x, y


def letter_frequency_loss(seen, unseen):
    """The loss of somebody who knows how often each letter occurs, and nothing else."""
    letters = tg.data.CharTokenizer.of(END.join([*seen, *unseen, ""]))
    counts, asked = (
        np.bincount(letters.encode(END.join([*names, ""])), minlength=letters.vocab_size) for names in (seen, unseen)
    )
    p = (counts + 1) / (counts + 1).sum()
    return float(-(asked * np.log(p)).sum() / asked.sum())


def main(short=False, file=None):
    names = tg.data.read_text(file or Path(__file__).with_name("names.txt")).split()
    rng = np.random.default_rng(0)
    names = [names[i] for i in rng.permutation(len(names))]
    kept_back = len(names) // 10
    seen, unseen = names[kept_back:], names[:kept_back]
    tokenizer = tg.data.CharTokenizer.of(END + "".join(names))
    width = max(map(len, names)) + 1
    validation = as_examples(unseen, tokenizer, width)

    config = tg.nn.GPTConfig(tokenizer.vocab_size, width, n_layer=2, n_head=4, n_embd=32, dropout=0.2)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(tg.optim.decay_groups(model, weight_decay=0.1))
    print(f"{model.count():,} parameters, {len(seen)} names to learn from, {len(unseen)} kept back")
    frequencies = letter_frequency_loss(seen, unseen)
    print(
        f"knowing nothing: {np.log(tokenizer.vocab_size):.3f}; knowing how often each letter occurs: {frequencies:.3f}"
    )

    total = 1500
    steps, losses = 20 if short else total, []
    for step in range(steps + 1):
        if step % 250 == 0 or step == steps:
            model.eval()
            with tg.no_grad():
                losses.append(model.loss(*validation, ignore_index=IGNORED).item())
            model.train()
            print(f"step {step:4}  validation loss {losses[-1]:.4f}")
        if step == steps:
            break
        x, y = as_examples([seen[i] for i in rng.integers(len(seen), size=64)], tokenizer, width)
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=5e-3, warmup=20, total=total)
        model.loss(x, y, ignore_index=IGNORED).backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    start = tokenizer.encode(END)
    rows = tg.generate(model, [start] * 20, width, temperature=0.8, stop=END, tokenizer=tokenizer, seed=0)
    made_up = [tokenizer.decode(row).strip(END) for row in rows]
    new = [name for name in made_up if name not in names]
    print("made up:", ", ".join(f"{name} (in the list)" if name in names else name for name in made_up))
    return {"losses": losses, "new": len(new) / len(made_up)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a list of names, one a line")
    parser.add_argument("--short", action="store_true", help="a few steps only")
    args = parser.parse_args()
    result = main(args.short, args.file)
    reached = result["losses"][-1] < 2.3 and result["new"] > 0.5
    sys.exit(0 if args.short or args.file or reached else 1)
