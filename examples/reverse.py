"""Train a GPT to copy or reverse words of three to six letters.

    python examples/reverse.py [--short]

`>lamp=lamp.` copies, `<lamp=pmal.` reverses. The GPT reads up to the equals sign and generates the rest, with a period
at the end. Words are random letters, so they cannot be memorized. Only the generated part counts in the loss.

It is tested on 1000 words that are not in the training data, of all lengths in one batch: `generate` pads them, and
stops each row at its period. Target: 99 % of these answers are right in every letter. It takes about a
minute on one core.

`--short` stops after a few steps; the loss falls, but the target is not reached.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, make_parser

IGNORED = -100
SHORTEST, LONGEST = 3, 6
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = tg.data.CharTokenizer(LETTERS + "<>=.")


def sample_question(rng):
    """A question such as `<lamp=`."""
    word = "".join(LETTERS[i] for i in rng.integers(26, size=rng.integers(SHORTEST, LONGEST + 1)))
    return "<>"[rng.integers(2)] + word + "="


def make_answer(question):
    """The right answer, such as `pmal.`."""
    word = question[1:-1]
    return (word if question[0] == ">" else word[::-1]) + "."


def make_batch(questions):
    """Questions -> the inputs x and the targets y, the next token after each token of x; padding does not count."""
    width = 2 * LONGEST + 2
    x = np.zeros((len(questions), width), np.int64)
    y = np.full((len(questions), width), IGNORED)
    for row, question in enumerate(questions):
        text = TOKENIZER.encode(question + make_answer(question))
        x[row, : len(text) - 1] = text[:-1]
        y[row, len(question) - 1 : len(text) - 1] = text[len(question) :]
    return x, y


def generate_answers(model, questions):
    """The answers that the model generates, up to and including the period."""
    prompts = [TOKENIZER.encode(question) for question in questions]
    rows = tg.generate(model, prompts, LONGEST + 1, temperature=0, stop=".", tokenizer=TOKENIZER)
    return [TOKENIZER.decode(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]


def main(short=False):
    rng = np.random.default_rng(0)
    test_questions = [sample_question(rng) for _ in range(100 if short else 1000)]
    test_words = {question[1:] for question in test_questions}

    config = tg.nn.GPTConfig(TOKENIZER.vocab_size, block_size=2 * LONGEST + 2, n_layer=2, n_head=4, n_embd=64)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    print(f"{model.count():,} parameters")

    total = 1000
    steps, losses = 20 if short else total, []
    for step in range(steps):
        questions = [sample_question(rng) for _ in range(64)]
        x, y = make_batch([question for question in questions if question[1:] not in test_words])
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, warmup=20, total=total)
        loss = model.loss(x, y, ignore_index=IGNORED)
        loss.backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    generated = generate_answers(model, test_questions)
    right = np.array([text == make_answer(question) for question, text in zip(test_questions, generated, strict=True)])
    for i in range(4):
        print(f"{test_questions[i]}{generated[i]}   {'right' if right[i] else 'wrong'}")
    print(f"right: {right.sum()} of {len(right)}, none of them in the training data")
    return {"losses": losses, "right": float(right.mean())}


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short)
        sys.exit(0 if args.short or result["right"] >= 0.99 else 1)
