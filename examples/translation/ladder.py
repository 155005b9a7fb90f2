"""Climb the ladder: every rung on the same sentences with the same training, one table, and the pictures.

    python examples/translation/ladder.py --out ladder          # the whole ladder
    python examples/translation/ladder.py --short               # does it run?
    python examples/translation/ladder.py --only a g            # some rungs
    python examples/translation/ladder.py --pairs FILE.tsv      # on real sentences

FOLDER gets ladder.json (everything measured), ladder.md (the table), accuracy_by_length.png, alignment.png, and the
weights of the last rung. Figures are as they come: the seed is fixed beforehand, and no rung is tuned.
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
SENTENCES = [
    "twelve thousand three hundred and four",
    "two million and five",
    "thirty million forty thousand six hundred and seventy",
]


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted({rung for rung, *_ in RUNGS}), help="these rungs")
    args = parser.parse_args(argv)
    corpus = common.or_exit(common.open_corpus, args)
    settings = common.open_settings(args)
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    print(f"{sizes[0]:,} pairs to learn from, {sizes[1]} to validate, {sizes[2]} to be asked for; {settings}")
    rows = []
    for rung, title, build in RUNGS:
        if args.only and rung not in args.only:
            continue
        model = build(corpus, args.seed)
        row = common.measure(rung, title, model, corpus, settings)
        rows.append(row)
        print(f"{common.table([row])}\n{common.examples(row)}\n", flush=True)
        if args.out:
            common.write_rows(rows, args.out)  # after every rung: a ladder takes a while
    print(common.table(rows))
    if args.out:
        folder = Path(args.out)
        Path(folder, "ladder.md").write_text(common.table(rows) + "\n", encoding="utf-8")
        pictures.accuracy_by_length(rows, folder / "accuracy_by_length.png")
        if rows[-1].rung == "g":
            model.save(folder / "encoder_decoder.safetensors")
            chosen = [pair.source for pair in corpus.test[:3]] if args.pairs else [s.split() for s in SENTENCES]
            draw_alignment(model, corpus, chosen, folder / "alignment.png")
    return rows


def draw_alignment(model, corpus, sentences, path):
    try:
        pictures.alignment(model, corpus, sentences, path)
    except pictures.MissingFontError as error:
        print(f"no {path}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
