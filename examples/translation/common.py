"""What all rungs share: the sentences, the training, and the report."""

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from number_words import chinese, english, split_numbers

import tinygrad_mha as tg
from tinygrad_mha.data import read_text
from tinygrad_mha.optim import AdamW, clip_grad_norm, warmup_cosine

PAD, START, END = 0, 1, 2
SPECIAL = ["<pad>", "<start>", "<end>"]

# --------------------------------------------------------------------------------------------------------------------
# Sentences


class Pair(NamedTuple):
    """A sentence and its translation, as words; `kind` is what the report counts by, `place` where it came from."""

    source: list
    target: list
    kind: str
    place: str


class Words:
    """A vocabulary: words to ids and back."""

    def __init__(self, words):
        self.words = SPECIAL + sorted(set(words) - set(SPECIAL))
        self.ids = {word: i for i, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, words, place="this sentence"):
        """The ids of some words.

        Raises:
            ValueError: no words, or one that is not in the vocabulary.
        """
        if not words:
            raise ValueError(f"{place} is empty")
        unknown = [word for word in words if word not in self.ids]
        if unknown:
            raise ValueError(f"{place} has the unknown word {unknown[0]!r}; {len(self)} words are known")
        return [self.ids[word] for word in words]

    def decode(self, ids):
        return [self.words[i] for i in ids]


class Corpus:
    """Pairs to learn from, to watch the training with, and to be asked for, with the two vocabularies.

    Args:
        train, validation, test: lists of `Pair`.
        max_len: the longest sentence that a model has to hold.
        seen: pairs of the training to ask for as well; the first thousand unless given.

    Raises:
        ValueError: a sentence that is empty, too long, or has a word that is never learned; it names the place.
    """

    def __init__(self, train, validation, test, max_len, seen=None):
        self.train, self.validation, self.test, self.max_len = train, validation, test, max_len
        self.seen = train[:1000] if seen is None else seen
        self.source = Words(word for pair in train for word in pair.source)
        self.target = Words(word for pair in train for word in pair.target)
        for pair in train + validation + test:
            self.encode(pair)

    def encode(self, pair):
        """(source ids, `start` + target ids + `end`)."""
        for side, words in (("source", pair.source), ("translation", pair.target)):
            if len(words) >= self.max_len:
                raise ValueError(
                    f"{pair.place}: the {side} has {len(words)} words, and with an end it must fit into {self.max_len}"
                )
        source = self.source.encode(pair.source, f"{pair.place}: the source")
        target = self.target.encode(pair.target, f"{pair.place}: the translation")
        return source, [START, *target, END]


def number_corpus(n_train=40_000, n_held_out=1000, seed=0):
    """English number words and Chinese numerals."""

    def pair(n):
        return Pair(english(n), chinese(n), f"{len(str(n))} digits", f"the number {n}")

    parts = split_numbers(n_train, n_held_out, n_held_out, seed)
    return Corpus(*([pair(n) for n in part] for part in parts), max_len=17, seen=[pair(n) for n in range(1000)])


def file_corpus(path, max_len=None, n_held_out=500, seed=0):
    """Sentence pairs from a file with a tab between the two sides (more columns are not looked at).

    The source is cut into words and marks, lower case; a translation with Chinese characters into characters. Of
    several translations of a sentence the first is taken. A pair is held out only if each of its words occurs in
    another pair: what is never seen cannot be learned.

    Raises:
        ValueError: a line without two columns, or with an empty one, or too long for `max_len`; it names the line.
    """
    pairs = {}
    lines = read_text(path).splitlines()
    for i, line in enumerate(lines, 1):
        place = f"{path}, line {i}"
        columns = line.split("\t")
        if len(columns) < 2:
            raise ValueError(f"{place}: expected a sentence, a tab and its translation, got {line[:60]!r}")
        source, target = (tokens(text) for text in columns[:2])
        if not source or not target:
            raise ValueError(f"{place}: the {'translation' if source else 'source'} is empty")
        pairs.setdefault(tuple(source), Pair(source, target, kind_of(len(source)), place))
    print(f"{path}: {len(lines)} lines, {len(pairs)} different sources (the first translation of each)")
    pairs = list(pairs.values())
    np.random.default_rng(seed).shuffle(pairs)
    train, held_out = hold_out(pairs, 2 * n_held_out)
    if len(train) < 2 or len(held_out) < 2:
        raise ValueError(f"{path}: {len(pairs)} pairs are too few to hold any out")
    half = len(held_out) // 2
    longest = 1 + max(max(len(pair.source), len(pair.target)) for pair in pairs)
    return Corpus(train, held_out[:half], held_out[half:], longest if max_len is None else max_len)


def hold_out(pairs, n):
    """(the others, up to `n` pairs, and at most a tenth, of which every word stays among the others)."""
    counts = Counter(word for pair in pairs for side in enumerate(pair[:2]) for word in {(side[0], w) for w in side[1]})
    train, held_out = [], []
    n = min(n, len(pairs) // 10)
    for pair in pairs:
        words = {(0, w) for w in pair.source} | {(1, w) for w in pair.target}
        if len(held_out) < n and all(counts[word] > 1 for word in words):
            counts.subtract(words)
            held_out.append(pair)
        else:
            train.append(pair)
    return train, held_out


def tokens(text):
    """Chinese characters one by one, other words whole, marks by themselves."""
    spaced = "".join(f" {c} " if is_chinese(c) or not (c.isalnum() or c in "'’ ") else c for c in text.lower())
    return spaced.split()


def is_chinese(character):
    return "\u2e80" <= character <= "\u9fff" or "\uff00" <= character <= "\uffef"


def kind_of(n_words):
    low = (n_words - 1) // 4 * 4
    return f"{low + 1}-{low + 4} words"


# --------------------------------------------------------------------------------------------------------------------
# Batches


def padded(rows):
    out = np.full((len(rows), max(map(len, rows))), PAD)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def batches(corpus, pairs, size, rng=None):
    """(source ids, target ids) of `size` pairs at a time, all sources of a batch equally long, in random order.

    Sentences of one length need no padding, so nothing is computed for nothing and nothing must be masked.
    """
    encoded = [corpus.encode(pair) for pair in pairs]
    order = np.arange(len(encoded)) if rng is None else rng.permutation(len(encoded))
    by_length = {}
    for i in order:
        by_length.setdefault(len(encoded[i][0]), []).append(encoded[i])
    groups = [rows[i : i + size] for rows in by_length.values() for i in range(0, len(rows), size)]
    if rng is not None:
        rng.shuffle(groups)
    for group in groups:
        yield padded([source for source, _ in group]), padded([target for _, target in group])


def endless(corpus, size, rng):
    while True:
        yield from batches(corpus, corpus.train, size, rng)


# --------------------------------------------------------------------------------------------------------------------
# Training


@dataclass
class Settings:
    """How every rung is trained."""

    steps: int = 1600
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 200
    clip: float = 1.0
    seed: int = 0


@dataclass
class Row:
    """What is reported of a rung."""

    rung: str
    title: str
    parameters: int
    seconds: float
    cpu_seconds: float
    validation_loss: float
    exact: float
    by_kind: dict
    seen: float  # exact match on a thousand sentences of the training (the numbers below 1000)
    losses: list = field(default_factory=list)
    examples: list = field(default_factory=list)


def train(model, corpus, settings, show=print):
    """Move the weights `settings.steps` times. Returns the training losses, [(step, mean since the last)]."""
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0)
    feed = endless(corpus, settings.batch, np.random.default_rng(settings.seed))
    history, recent = [], []
    for step in range(settings.steps):
        optimizer.lr = warmup_cosine(
            step, settings.lr, settings.lr / 100, min(settings.warmup, settings.steps), settings.steps
        )
        loss = model.loss(*next(feed))
        loss.backward(leaves_only=True)
        norm = clip_grad_norm(optimizer.parameters, settings.clip)
        recent.append(loss.item())
        if not math.isfinite(norm):
            raise RuntimeError(f"training diverged at step {step}: the loss is {recent[-1]}, the gradient norm {norm}")
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, settings.steps // 20) == 0:
            history.append((step + 1, sum(recent) / len(recent)))
            recent = []
            show(f"  step {step + 1:5}  loss {history[-1][1]:.4f}")
    return history


@tg.no_grad
def validation_loss(model, corpus, size=250):
    """The mean loss of a target word, `end` among them."""
    total = words = 0
    for source, target in batches(corpus, corpus.validation, size):
        n = np.count_nonzero(target[:, 1:] != PAD)
        total += model.loss(source, target).item() * n
        words += n
    return total / words


def translations(model, corpus, pairs, size=250, **options):
    """What the model makes of each pair's source, as words, in the order of the pairs."""
    encoded = [corpus.encode(pair)[0] for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: len(encoded[i]))
    out = [None] * len(pairs)
    for first in range(0, len(order), size):
        part = order[first : first + size]
        for i, ids in zip(part, model.generate(padded([encoded[i] for i in part]), **options), strict=True):
            out[i] = corpus.target.decode(ids)
    return out


def exact(pairs, answers):
    """The share that is right from the first word to the last."""
    return sum(pair.target == answer for pair, answer in zip(pairs, answers, strict=True)) / max(1, len(pairs))


def measure(rung, title, model, corpus, settings, show=print):
    """Train a model and report it: (row, answers on the test pairs)."""
    show(f"{rung}) {title}: {model.count():,} parameters")
    wall, cpu = time.perf_counter(), time.process_time()
    losses = train(model, corpus, settings, show)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    answers = translations(model, corpus, corpus.test)
    kinds = {}
    for pair, answer in zip(corpus.test, answers, strict=True):
        kinds.setdefault(pair.kind, []).append(pair.target == answer)
    row = Row(
        rung,
        title,
        model.count(),
        wall,
        cpu,
        validation_loss(model, corpus),
        exact(corpus.test, answers),
        {kind: sum(right) / len(right) for kind, right in sorted(kinds.items(), key=lambda item: kind_order(item[0]))},
        exact(corpus.seen, translations(model, corpus, corpus.seen)),
        losses,
    )
    step = max(1, len(corpus.test) // 6)
    for pair, answer in list(zip(corpus.test, answers, strict=True))[::step][:6]:
        row.examples.append((" ".join(pair.source), "".join(pair.target), "".join(answer)))
    return row


def kind_order(kind):
    return int(kind.split()[0].split("-")[0])


# --------------------------------------------------------------------------------------------------------------------
# The report


def table(rows):
    """The rows as a table of Markdown."""
    kinds = sorted({kind for row in rows for kind in row.by_kind}, key=kind_order)
    head = ["rung", "parameters", "seconds", "of CPU", "validation loss", "exact match", *kinds, "trained on"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        shares = [row.exact, *(row.by_kind.get(kind) for kind in kinds), row.seen]
        times = [f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}"]
        figures = [f"{row.parameters:,}", *times, f"{row.validation_loss:.4f}", *map(percent, shares)]
        lines.append([f"{row.rung}) {row.title}", *figures])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share):
    return "" if share is None else f"{100 * share:.1f} %"


def examples(row):
    lines = [
        f"{'right' if wanted == got else 'WRONG'}  {source}\n       {wanted}  <-  {got}"
        for source, wanted, got in row.examples
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# The command line of a rung


def parser(description):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=Settings.steps, help="how many times the weights move")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--short", action="store_true", help="a few steps on little data: does it run?")
    p.add_argument(
        "--pairs", metavar="FILE.tsv", help="real sentence pairs instead of numbers, a tab between the sides"
    )
    p.add_argument("--max-len", type=int, help="with --pairs: refuse longer sentences (unless given, the longest fits)")
    p.add_argument("--out", metavar="FOLDER", help="write the results (JSON) and pictures there")
    return p


def open_corpus(args):
    if args.max_len is not None and not args.pairs:
        raise ValueError("--max-len is for --pairs")
    if args.pairs:
        return file_corpus(args.pairs, args.max_len, n_held_out=20 if args.short else 500, seed=args.seed)
    return number_corpus(7200, 40, args.seed) if args.short else number_corpus(seed=args.seed)


def or_exit(f, *args):
    """f(*args); what is wrong with the input ends the script with one line."""
    try:
        return f(*args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def open_settings(args):
    if args.short:
        return Settings(steps=min(args.steps, 8), batch=16, warmup=2, seed=args.seed)
    return Settings(steps=args.steps, seed=args.seed)


def run(rung, title, build, description, argv=None):
    """The whole of a rung's script: read the command line, train, print the report. Returns (model, corpus)."""
    args = parser(description).parse_args(argv)
    corpus = or_exit(open_corpus, args)
    model = build(corpus, args.seed)
    report(rung, title, model, corpus, args)
    return model, corpus


def report(rung, title, model, corpus, args):
    """Train a model, print the report of it, and write it where the command line says."""
    settings = open_settings(args)
    row = measure(rung, title, model, corpus, settings)
    print(f"\n{table([row])}\n\n{examples(row)}")
    if args.out:
        write_rows([row], args.out, conditions(args, settings))


def conditions(args, settings):
    """What rows must have in common to stand in one table."""
    return {**asdict(settings), "pairs": args.pairs, "max_len": args.max_len, "short": args.short}


def write_rows(rows, folder, given):
    """Keep what was measured under the conditions `given`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    kept = {"conditions": given, "rows": [asdict(row) for row in rows]}
    Path(folder, "ladder.json").write_text(json.dumps(kept, ensure_ascii=False, indent=1), encoding="utf-8")


def read_rows(folder, given):
    """The rows that are in a folder already, none if there is none.

    Raises:
        ValueError: they were measured under other conditions.
    """
    path = Path(folder, "ladder.json")
    if not path.exists():
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["conditions"] != given:
        raise ValueError(f"{path} was measured under other conditions: {kept['conditions']}; choose another folder")
    return [Row(**row) for row in kept["rows"]]
