"""Code that all rungs share: the sentences, training, measuring, and the report."""

import json
import math
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from number_words import split_numbers, to_chinese, to_english

import tinygrad_mha as tg
from tinygrad_mha import programs
from tinygrad_mha.data import read_text
from tinygrad_mha.optim import AdamW, clip_grad_norm, warmup_cosine

PAD, START, END = 0, 1, 2
SPECIAL = ["<pad>", "<start>", "<end>"]

# --------------------------------------------------------------------------------------------------------------------
# Sentences


class Pair(NamedTuple):
    """A sentence and its translation, as words."""

    source: list
    target: list
    group: str  # the report gives the accuracy per group, such as "4 digits"
    origin: str  # where the pair comes from, for error messages


class Words:
    """A vocabulary: maps words to ids and ids to words."""

    def __init__(self, words):
        self.words = SPECIAL + sorted(set(words) - set(SPECIAL))
        self.ids = {word: i for i, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, words, origin="this sentence"):
        """Return the ids of a list of words; `origin` names the list in errors.

        Raises:
            ValueError: an empty list, or a word that is not in the vocabulary.
        """
        if not words:
            raise ValueError(f"{origin} is empty")
        unknown = [word for word in words if word not in self.ids]
        if unknown:
            raise ValueError(f"{origin} has the unknown word {unknown[0]!r}; {len(self)} words are known")
        return [self.ids[word] for word in words]

    def decode(self, ids):
        """Return the words with these ids."""
        return [self.words[i] for i in ids]


class Corpus:
    """Sentence pairs for training, validation and test, with the vocabularies of both languages.

    Args:
        train, validation, test: lists of `Pair`.
        max_len: the length of the longest sentence that a model must accept.
        seen: training pairs on which accuracy is measured as well; the first thousand by default.

    Raises:
        ValueError: a sentence that is empty, too long, or has a word that does not occur in training.
    """

    def __init__(self, train, validation, test, max_len, seen=None):
        self.train, self.validation, self.test, self.max_len = train, validation, test, max_len
        self.seen = train[:1000] if seen is None else seen
        self.source = Words(word for pair in train for word in pair.source)
        self.target = Words(word for pair in train for word in pair.target)
        for pair in train + validation + test:
            self.encode(pair)

    def encode(self, pair):
        """Return the source ids, and the target ids between `start` and `end`."""
        for side, words in (("source", pair.source), ("translation", pair.target)):
            if len(words) >= self.max_len:
                raise ValueError(
                    f"{pair.origin}: the {side} has {len(words)} words, at most {self.max_len - 1} are allowed"
                )
        source = self.source.encode(pair.source, f"{pair.origin}: the source")
        target = self.target.encode(pair.target, f"{pair.origin}: the translation")
        return source, [START, *target, END]


def make_number_corpus(n_train=40_000, n_held_out=1000, seed=0):
    """Make a corpus of English number words and Chinese numerals."""

    def make_pair(n):
        return Pair(to_english(n), to_chinese(n), f"{len(str(n))} digits", f"the number {n}")

    parts = split_numbers(n_train, n_held_out, n_held_out, seed)
    pairs = ([make_pair(n) for n in part] for part in parts)
    return Corpus(*pairs, max_len=17, seen=[make_pair(n) for n in range(1000)])


def read_corpus(path, max_len=None, n_held_out=500, seed=0):
    """Read sentence pairs from a file with a tab between the two sides; further columns are ignored.

    Sentences are split into lower-case words and punctuation marks, Chinese into characters. If a sentence has several
    translations, the first is used. A pair is held out only if each of its words occurs in a training pair: a word that
    does not occur in training cannot be learned.

    Raises:
        ValueError: a line without two columns, with an empty column, or too long for `max_len`; it names the line.
    """
    pairs = {}
    lines = read_text(path).splitlines()
    for i, line in enumerate(lines, 1):
        origin = f"{path}, line {i}"
        columns = line.split("\t")
        if len(columns) < 2:
            raise ValueError(f"{origin}: expected a sentence, a tab and its translation, got {line[:60]!r}")
        source, target = (split_words(text) for text in columns[:2])
        if not source or not target:
            raise ValueError(f"{origin}: the {'translation' if source else 'source'} is empty")
        pairs.setdefault(tuple(source), Pair(source, target, name_length_group(len(source)), origin))
    print(f"{path}: {len(lines)} lines, {len(pairs)} different sources (the first translation of each is used)")
    pairs = list(pairs.values())
    np.random.default_rng(seed).shuffle(pairs)
    train, held_out = hold_out(pairs, 2 * n_held_out)
    if len(train) < 2 or len(held_out) < 2:
        raise ValueError(f"{path}: {len(pairs)} pairs are too few: none can be held out for the test")
    half = len(held_out) // 2
    longest = 1 + max(max(len(pair.source), len(pair.target)) for pair in pairs)
    return Corpus(train, held_out[:half], held_out[half:], longest if max_len is None else max_len)


def hold_out(pairs, n):
    """Split off up to `n` pairs, at most a tenth, all of whose words occur in the rest. Returns (rest, held out)."""
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


def split_words(text):
    """Split a text into Chinese characters, other words in lower case, and punctuation marks."""
    spaced = "".join(f" {c} " if is_chinese(c) or not (c.isalnum() or c in "'’ ") else c for c in text.lower())
    return spaced.split()


def is_chinese(character):
    return "\u2e80" <= character <= "\u9fff" or "\uff00" <= character <= "\uffef"


def name_length_group(n_words):
    low = (n_words - 1) // 4 * 4
    return f"{low + 1}-{low + 4} words"


# --------------------------------------------------------------------------------------------------------------------
# Batches


def pad_rows(rows):
    """Return rows of ids as one array, padded at the end."""
    out = np.full((len(rows), max(map(len, rows))), PAD)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def make_batches(corpus, pairs, size, rng=None):
    """Yield (source ids, target ids) of up to `size` pairs, shuffled if there is an `rng`.

    All sources of a batch have the same length, so they need neither padding nor masks.
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
        yield pad_rows([source for source, _ in group]), pad_rows([target for _, target in group])


def repeat_batches(corpus, size, rng):
    """Yield batches of the training pairs without end, in a new order each time."""
    while True:
        yield from make_batches(corpus, corpus.train, size, rng)


# --------------------------------------------------------------------------------------------------------------------
# Training


@dataclass
class Settings:
    """The training settings, the same for every rung."""

    steps: int = 1600
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 200
    clip: float = 1.0
    seed: int = 0


@dataclass
class Row:
    """The results of one rung."""

    rung: str
    title: str
    parameters: int
    seconds: float
    cpu_seconds: float
    validation_loss: float
    exact: float
    by_group: dict
    seen: float  # exact match on a thousand training sentences (the numbers below 1000)
    losses: list = field(default_factory=list)
    examples: list = field(default_factory=list)


def train(model, corpus, settings, show=print):
    """Run `settings.steps` optimizer steps. Returns the training losses: [(step, mean since the previous entry)]."""
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0)
    batches = repeat_batches(corpus, settings.batch, np.random.default_rng(settings.seed))
    history, recent = [], []
    for step in range(settings.steps):
        optimizer.lr = warmup_cosine(
            step, settings.lr, settings.lr / 100, min(settings.warmup, settings.steps), settings.steps
        )
        loss = model.loss(*next(batches))
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
def measure_validation_loss(model, corpus, size=250):
    """Return the mean loss per target word, `end` included."""
    total = words = 0
    for source, target in make_batches(corpus, corpus.validation, size):
        n = np.count_nonzero(target[:, 1:] != PAD)
        total += model.loss(source, target).item() * n
        words += n
    return total / words


def translate(model, corpus, pairs, size=250, **options):
    """Return the model's translation of each pair's source, as words, in the order of the pairs."""
    encoded = [corpus.encode(pair)[0] for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: len(encoded[i]))
    out = [None] * len(pairs)
    for first in range(0, len(order), size):
        part = order[first : first + size]
        for i, ids in zip(part, model.generate(pad_rows([encoded[i] for i in part]), **options), strict=True):
            out[i] = corpus.target.decode(ids)
    return out


def compute_exact_match(pairs, answers):
    """Return the fraction of answers that equal the translation word for word."""
    return sum(pair.target == answer for pair, answer in zip(pairs, answers, strict=True)) / max(1, len(pairs))


def measure(rung, title, model, corpus, settings, show=print):
    """Train a model and measure it. Returns a `Row`."""
    show(f"{rung}) {title}: {model.count():,} parameters")
    wall, cpu = time.perf_counter(), time.process_time()
    losses = train(model, corpus, settings, show)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    answers = translate(model, corpus, corpus.test)
    groups = {}
    for pair, answer in zip(corpus.test, answers, strict=True):
        groups.setdefault(pair.group, []).append(pair.target == answer)
    row = Row(
        rung,
        title,
        model.count(),
        wall,
        cpu,
        measure_validation_loss(model, corpus),
        compute_exact_match(corpus.test, answers),
        {group: sum(groups[group]) / len(groups[group]) for group in sorted(groups, key=find_first_number)},
        compute_exact_match(corpus.seen, translate(model, corpus, corpus.seen)),
        losses,
    )
    step = max(1, len(corpus.test) // 6)
    for pair, answer in list(zip(corpus.test, answers, strict=True))[::step][:6]:
        row.examples.append((" ".join(pair.source), "".join(pair.target), "".join(answer)))
    return row


def find_first_number(group):
    """Return the number that the name of a group begins with: 5 for "5-8 words"."""
    return int(group.split()[0].split("-")[0])


# --------------------------------------------------------------------------------------------------------------------
# The report


def format_table(rows):
    """Return the rows as a Markdown table."""
    groups = sorted({group for row in rows for group in row.by_group}, key=find_first_number)
    head = ["rung", "parameters", "seconds", "CPU seconds", "validation loss", "exact match", *groups, "trained on"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        accuracies = [row.exact, *(row.by_group.get(group) for group in groups), row.seen]
        times = [f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}"]
        figures = [f"{row.parameters:,}", *times, f"{row.validation_loss:.4f}", *map(format_percent, accuracies)]
        lines.append([f"{row.rung}) {row.title}", *figures])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_percent(fraction):
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def format_examples(row):
    """Return some test sentences with the right answer and the model's."""
    lines = [
        f"{'right' if expected == got else 'WRONG'}  {source}\n       expected {expected}, got {got}"
        for source, expected, got in row.examples
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# The command line of a rung


def make_parser(description):
    """Return a parser of the options that all rungs have."""
    p = programs.make_parser(description)
    p.add_argument("--steps", type=int, default=Settings.steps, help="the number of optimizer steps")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--short", action="store_true", help="run a few steps on little data, as a test")
    p.add_argument(
        "--pairs", metavar="FILE.tsv", help="real sentence pairs instead of numbers, with a tab between the sides"
    )
    p.add_argument("--max-len", type=int, help="with --pairs: the longest sentence allowed (all by default)")
    p.add_argument("--out", metavar="FOLDER", help="write the results (JSON) and pictures to this folder")
    return p


def open_corpus(args):
    if args.max_len is not None and not args.pairs:
        raise ValueError("--max-len needs --pairs")
    if args.pairs:
        return read_corpus(args.pairs, args.max_len, n_held_out=20 if args.short else 500, seed=args.seed)
    return make_number_corpus(7200, 40, args.seed) if args.short else make_number_corpus(seed=args.seed)


def exit_on_error(f, *args):
    """Return f(*args); an error in the input ends the script with one line."""
    try:
        return f(*args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def choose_settings(args):
    if args.short:
        return Settings(steps=min(args.steps, 8), batch=16, warmup=2, seed=args.seed)
    return Settings(steps=args.steps, seed=args.seed)


def run(rung, title, build, description, argv=None):
    """Run a rung as a script: read the command line, train, print the report. Returns (model, corpus)."""
    args = make_parser(description).parse_args(argv)
    corpus = exit_on_error(open_corpus, args)
    model = build(corpus, args.seed)
    report(rung, title, model, corpus, args)
    return model, corpus


def report(rung, title, model, corpus, args):
    """Train and measure a model, print the results, and write them to the folder that the command line gives."""
    settings = choose_settings(args)
    row = measure(rung, title, model, corpus, settings)
    print(f"\n{format_table([row])}\n\n{format_examples(row)}")
    if args.out:
        write_rows([row], args.out, list_conditions(args, settings))


def list_conditions(args, settings):
    """Return the settings that all rows of one table must share."""
    return {**asdict(settings), "pairs": args.pairs, "max_len": args.max_len, "short": args.short}


def write_rows(rows, folder, conditions):
    """Write the rows that were measured under these conditions to ladder.json."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    results = {"conditions": conditions, "rows": [asdict(row) for row in rows]}
    Path(folder, "ladder.json").write_text(json.dumps(results, ensure_ascii=False, indent=1), encoding="utf-8")


def read_rows(folder, conditions):
    """Return the rows that ladder.json in `folder` contains; an empty list if there is no such file.

    Raises:
        ValueError: they were measured under other conditions.
    """
    path = Path(folder, "ladder.json")
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    if results["conditions"] != conditions:
        raise ValueError(f"{path} was measured under other conditions: {results['conditions']}; choose another folder")
    return [Row(**row) for row in results["rows"]]
