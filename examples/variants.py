"""Train a GPT with six kinds of attention on the same text, and compare them in one table and one picture.

    python examples/variants.py [--picture FILE] [--short]

Four differ in how they use positions: a learned table, rotary, ALiBi, relative (T5). One lets each token attend to
itself and 15 tokens before it, and gives each head a sink (`window=`, `score="sinks"`). The last one is an attention of
our own, written below: scores are cosines of queries and keys times a learned number for each head (QK normalization).

All see windows of 64 tokens in training. The table gives the loss on held-out text for windows of that length and for
windows of 128 tokens, whose second half stands at positions that no model has seen. The picture shows the attention of
the last layer on one sentence: a row for each kind, a column for each head. It needs matplotlib.

Target: every kind falls below 60 % of the loss of a uniform guess, and those that see only distances (rotary, ALiBi,
relative, the window) lose less on the longer windows than the learned table. One to two minutes on two cores.

`--short` stops after a few steps and only shows that the loss falls.
"""

import math
import sys
import time

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.programs import ending_quietly, make_parser

LENGTH = 64  # of a window in training
SENTENCE = "The value of the expression is the object itself."


class Cosine(nn.Module):
    """Attention whose scores are cosines of queries and keys, times a learned number for each head."""

    is_attention = True

    def __init__(self, config, rng):
        width = config.n_embd
        self.n_head = config.n_head
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, std=0.02, rng=rng) for _ in range(4))
        self.sharpness = tg.Tensor(np.full((self.n_head, 1, 1), 8.0), requires_grad=True)

    def forward(self, x, cache=None, positions=None, key_allow=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        q, k, v = (nn.split_heads(layer(x), self.n_head) for layer in (self.query, self.key, self.value))
        q, k = show("q", to_unit_length(q) * self.sharpness), show("k", to_unit_length(k))
        v = show("v", v)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = ops.attend(q, k, v, nn.allow_past(q, k, key_allow), scale=1.0, observe=show)
        return self.out(show("concat", nn.join_heads(heads)))


def to_unit_length(x):
    """Each row divided by its length."""
    return x / ((x * x).sum(axis=-1, keepdims=True) + 1e-6).sqrt()


VARIANTS = {
    "learned": {},
    "rotary": {"position": "rotary"},
    "ALiBi": {"position": "alibi"},
    "relative": {"position": "relative"},
    "window, sinks": {"position": "rotary", "window": 16, "score": "sinks"},
    "our own": {"attention": Cosine},
}


def make_model(vocab_size, attention=None, **settings):
    sizes = {"block_size": 2 * LENGTH, "n_layer": 2, "n_head": 4, "n_embd": 64}
    return nn.GPT(nn.GPTConfig(vocab_size, **sizes, **settings), seed=0, attention=attention)


def mean_loss(model, ids, length):
    """The loss of the first windows of `ids`, in eval mode and without gradients."""
    batches = tg.data.Batches(ids, block_size=length, batch_size=1)
    starts = np.arange(0, min(len(ids) - length, 40 * LENGTH), length)
    with model.evaluating(), tg.no_grad():
        return model.loss(*batches.at(starts)).item()


def draw(weights, tokens, path):
    """A row for each kind of attention, a column for each head; `weights` are {name: (H, T, T)}."""
    import matplotlib.pyplot as plt

    n_head = len(next(iter(weights.values())))
    figure, grid = plt.subplots(
        len(weights), n_head, figsize=(1.7 * n_head + 0.5, 1.75 * len(weights) + 0.5), squeeze=False
    )
    for line, (name, of_heads) in zip(grid, weights.items(), strict=True):
        for axes, matrix in zip(line, of_heads, strict=True):
            axes.imshow(np.sqrt(matrix), cmap="Purples", vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        line[0].set_ylabel(name, fontsize=11)
    for i, axes in enumerate(grid[0], 1):
        axes.set_title(f"head {i}", fontsize=10)
    figure.suptitle(
        f"attention of the last layer to {tokens!r}\nrows are queries; darker is more (by the square root)", fontsize=10
    )
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(short=False, picture=None):
    text = tg.data.builtin_corpus()
    tokenizer = tg.data.CharTokenizer.of(text)
    _, held_out = tg.data.split_text(text)
    held_out, sentence = tokenizer.encode(held_out), tokenizer.encode(SENTENCE)
    steps = 20 if short else 600
    options = {
        "steps": steps,
        "block_size": LENGTH,
        "batch_size": 12,
        "learning_rate": 3e-3,
        "min_lr": 3e-4,
        "warmup": 30,
    }
    options |= {"eval_interval": steps, "eval_batches": 1, "sample_interval": 0, "show": "quiet"}
    guess = math.log(tokenizer.vocab_size)
    print(f"{steps} steps on {len(text):,} characters; the loss of a uniform guess is {guess:.3f}\n")
    print(f"{'attention':14} {'parameters':>10} {'seconds':>8} {'loss at 64':>11} {'at 128':>8}")
    results, weights = {}, {}
    for name, settings in VARIANTS.items():
        model = make_model(tokenizer.vocab_size, **settings)
        before, start = mean_loss(model, held_out, LENGTH), time.perf_counter()
        tg.training.train("tiny", text=text, model=model, tokenizer=tokenizer, **options)
        seconds = time.perf_counter() - start
        results[name] = before, mean_loss(model, held_out, LENGTH), mean_loss(model, held_out, 2 * LENGTH)
        print(f"{name:14} {model.count():10,} {seconds:8.1f} {results[name][1]:11.4f} {results[name][2]:8.4f}")
        with model.evaluating(), tg.no_grad():
            weights[name] = model(sentence, trace=True)[1].attention[-1].weights.numpy()
    if picture is not None:
        draw(weights, SENTENCE, picture)
        print(f"\nthe picture is {picture}")
    losses = [np.mean([result[i] for result in results.values()]) for i in (0, 1)]
    print(f"\nthe mean loss fell from {losses[0]:.4f} to {losses[1]:.4f}")
    return {"losses": losses, "results": results, "guess": guess}


def reaches_target(results, guess):
    gap = {name: longer - loss for name, (_, loss, longer) in results.items()}
    distances = ("rotary", "ALiBi", "relative", "window, sinks")
    falls = all(loss < 0.6 * guess for _, loss, _ in results.values())
    return falls and all(gap[name] < gap["learned"] for name in distances)


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--picture", help="where to write the picture")
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short, args.picture)
        sys.exit(0 if args.short or reaches_target(result["results"], result["guess"]) else 1)
