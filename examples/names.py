"""Train a GPT on a list of names, and generate new ones.

    python examples/names.py [--file FILE] [--short]

The tokens are letters, and each name is a sequence from line feed to line feed. The list beside this file has 1300
given names from many countries; FILE may be any other list, one name per line. A tenth of the names is held out: the
loss on their letters (the validation loss, in nats per letter) shows whether the model generalizes or memorizes.

Target: a validation loss below 2.3 on the list beside this file. A uniform guess has ln 27 = 3.30, the frequencies of
letters alone 2.84. And most of the generated names are not in the list. Less than a minute on one core.

`--short` stops after a few steps and only shows that the loss falls.
"""

import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, make_parser

IGNORED = -100
END = "\n"


def as_examples(names, tokenizer, width):
    """Inputs x and targets y, which is x shifted by one letter; padding of short names is ignored by the loss."""
    x = np.zeros((len(names), width), np.int64)
    y = np.full((len(names), width), IGNORED)
    for row, name in enumerate(names):
        text = tokenizer.encode(END + name + END)
        x[row, : len(text) - 1], y[row, : len(text) - 1] = text[:-1], text[1:]
    return x, y


def letter_frequency_loss(seen, unseen):
    """The loss of a model that predicts every letter with its frequency."""
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
    held_out = len(names) // 10
    seen, unseen = names[held_out:], names[:held_out]
    tokenizer = tg.data.CharTokenizer.of(END + "".join(names))
    width = max(map(len, names)) + 1
    validation = as_examples(unseen, tokenizer, width)

    config = tg.nn.GPTConfig(tokenizer.vocab_size, width, n_layer=2, n_head=4, n_embd=32, dropout=0.2)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(tg.optim.decay_groups(model, weight_decay=0.1))
    print(f"{model.count():,} parameters, {len(seen)} names to train on, {len(unseen)} held out")
    frequencies = letter_frequency_loss(seen, unseen)
    print(f"loss of a uniform guess: {np.log(tokenizer.vocab_size):.3f}; of letter frequencies: {frequencies:.3f}")

    total = 1500
    steps, losses = 20 if short else total, []
    for step in range(steps + 1):
        if step % 250 == 0 or step == steps:
            with model.evaluating(), tg.no_grad():
                losses.append(model.loss(*validation, ignore_index=IGNORED).item())
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
    generated = [tokenizer.decode(row).strip(END) for row in rows]
    new = [name for name in generated if name not in names]
    print("generated:", ", ".join(f"{name} (in the list)" if name in names else name for name in generated))
    return {"losses": losses, "new": len(new) / len(generated)}


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--file", type=Path, help="a list of names, one per line")
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short, args.file)
        reached = result["losses"][-1] < 2.3 and result["new"] > 0.5
        sys.exit(0 if args.short or args.file or reached else 1)
