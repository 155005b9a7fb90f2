"""Climb the ladder: every rung on the same sentences with the same training, one table, and the pictures.

    python examples/translation/ladder.py --out ladder          # the whole ladder
    python examples/translation/ladder.py --short               # does it run?
    python examples/translation/ladder.py --only a g            # some rungs
    python examples/translation/ladder.py --pairs FILE.tsv      # on real sentences

FOLDER gets ladder.json (everything measured), ladder.md (the table), accuracy_by_length.png, alignment.png, and the
weights of the last rung. What is in it already is not measured again, so a ladder that was interrupted goes on. Figures
are as they come: the seed is fixed beforehand, and no rung is tuned.
"""

import sys
from pathlib import Path

import a_per_word
import b_rnn
import c_attention
import common
import d_positions
import e_one_head
import f_two_heads
import g_encoder_decoder
import pictures

RUNGS = [(module.RUNG, module.TITLE, module.build) for module in (a_per_word, b_rnn)]
RUNGS += [("b", "GRU", b_rnn.build_gru)]
RUNGS += [
    (module.RUNG, module.TITLE, module.build)
    for module in (c_attention, d_positions, e_one_head, f_two_heads, g_encoder_decoder)
]
WEIGHTS = "encoder_decoder.safetensors"
SENTENCES = [
    "twelve thousand three hundred and four",
    "three million and seven",
    "thirty million forty thousand six hundred and seventy",
]


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted({rung for rung, *_ in RUNGS}), help="these rungs")
    args = parser.parse_args(argv)
    corpus = common.or_exit(common.open_corpus, args)
    settings = common.open_settings(args)
    given = common.conditions(args, settings)
    measured = {}
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        measured = {(row.rung, row.title): row for row in common.or_exit(common.read_rows, args.out, given)}
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    print(f"{sizes[0]:,} pairs to learn from, {sizes[1]} to validate, {sizes[2]} to be asked for; {settings}")
    for rung, title, build in RUNGS:
        if (args.only and rung not in args.only) or (rung, title) in measured:
            continue
        model = build(corpus, args.seed)
        row = measured[rung, title] = common.measure(rung, title, model, corpus, settings)
        print(f"{common.table([row])}\n{common.examples(row)}\n", flush=True)
        if args.out:
            common.write_rows(in_order(measured), args.out, given)  # after every rung: a ladder takes a while
            if rung == "g":
                model.save(Path(args.out, WEIGHTS))
    rows = in_order(measured)
    print(common.table(rows))
    if args.out:
        draw(rows, corpus, args)
    return rows


def in_order(measured):
    return [measured[rung, title] for rung, title, _ in RUNGS if (rung, title) in measured]


def draw(rows, corpus, args):
    folder = Path(args.out)
    (folder / "ladder.md").write_text(common.table(rows) + "\n", encoding="utf-8")
    pictures.accuracy_by_length(rows, folder / "accuracy_by_length.png")
    if (folder / WEIGHTS).exists():
        model = g_encoder_decoder.build(corpus, args.seed)
        model.load(folder / WEIGHTS)
        chosen = [pair.source for pair in corpus.test[:3]] if args.pairs else [s.split() for s in SENTENCES]
        draw_alignment(model, corpus, chosen, folder / "alignment.png")


def draw_alignment(model, corpus, sentences, path):
    try:
        pictures.alignment(model, corpus, sentences, path)
    except pictures.MissingFontError as error:
        print(f"no {path}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
