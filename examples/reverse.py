"""Learn to copy and to reverse words of three to six letters, from examples alone.

    python examples/reverse.py [--short]

`>lamp=lamp.` copies, `<lamp=pmal.` reverses. A GPT reads up to the equals sign and writes the rest; the point says that
it is done. Words are random letters, so nothing can be learned but the rule. Only what it writes counts in the loss.

It is asked about 1000 words that it did not train on, of all lengths in one batch: `generate` pads them, and stops each
row at its own point.
Target: 99 % of these 1000 answers right in every letter. About a minute on one core.

`--short` stops after a few steps and only shows that the loss falls.
"""

import argparse
import sys

import numpy as np

import tinygrad_mha as tg

IGNORED = -100
SHORTEST, LONGEST = 3, 6
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = tg.data.CharTokenizer(LETTERS + "<>=.")


def random_question(rng):
    word = "".join(LETTERS[i] for i in rng.integers(26, size=rng.integers(SHORTEST, LONGEST + 1)))
    return "<>"[rng.integers(2)] + word + "="


def answer(question):
    word = question[1:-1]
    return (word if question[0] == ">" else word[::-1]) + "."


def as_examples(questions):
    """x, what is read, and y, what should come next after each token of x; short ones are filled up, not counted."""
    width = 2 * LONGEST + 2
    x = np.zeros((len(questions), width), np.int64)
    y = np.full((len(questions), width), IGNORED)
    for row, question in enumerate(questions):
        text = TOKENIZER.encode(question + answer(question))
        x[row, : len(text) - 1] = text[:-1]
        y[row, len(question) - 1 : len(text) - 1] = text[len(question) :]
    return x, y


def answers(model, questions):
    """What the model says, up to and with the point."""
    prompts = [TOKENIZER.encode(question) for question in questions]
    rows = tg.generate(model, prompts, LONGEST + 1, temperature=0, stop=".", tokenizer=TOKENIZER)
    return [TOKENIZER.decode(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]


def main(short=False):
    rng = np.random.default_rng(0)
    asked = [random_question(rng) for _ in range(100 if short else 1000)]
    kept_back = {question[1:] for question in asked}

    config = tg.nn.GPTConfig(TOKENIZER.vocab_size, block_size=2 * LONGEST + 2, n_layer=2, n_head=4, n_embd=64)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    print(f"{model.count():,} parameters")

    total = 1000
    steps, losses = 20 if short else total, []
    for step in range(steps):
        questions = [random_question(rng) for _ in range(64)]
        x, y = as_examples([question for question in questions if question[1:] not in kept_back])
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, warmup=20, total=total)
        loss = model.loss(x, y, ignore_index=IGNORED)
        loss.backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    said = answers(model, asked)
    right = np.array([text == answer(question) for question, text in zip(asked, said, strict=True)])
    for i in range(4):
        print(f"{asked[i]}{said[i]}   {'right' if right[i] else 'wrong'}")
    print(f"right: {right.sum()} of {len(right)}, none of them seen before")
    return {"losses": losses, "right": float(right.mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps only")
    args = parser.parse_args()
    result = main(args.short)
    sys.exit(0 if args.short or result["right"] >= 0.99 else 1)
