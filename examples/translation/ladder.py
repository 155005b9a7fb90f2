"""Run the ladder: train every rung on the same sentences with the same settings, and make one table and the pictures.

    python examples/translation/ladder.py --out ladder          # the whole ladder
    python examples/translation/ladder.py --short               # a test run
    python examples/translation/ladder.py --only a g            # some rungs
    python examples/translation/ladder.py --pairs FILE.tsv      # on real sentences

`--out FOLDER` writes ladder.json (all results), ladder.md (the table), accuracy_by_length.png, the pictures
alignment_1.png and so on, and the weights of the last rung. Rungs whose results are in the folder are not run again, so
an interrupted run can be continued. The seed is fixed in advance, and no rung is tuned on its own.
"""

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

from tinygrad_mha.programs import ending_quietly

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
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted({rung for rung, *_ in RUNGS}), help="run only these rungs")
    args = parser.parse_args(argv)
    corpus = common.exit_on_error(common.open_corpus, args)
    settings = common.choose_settings(args)
    conditions = common.list_conditions(args, settings)
    measured = {}
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        measured = {(row.rung, row.title): row for row in common.exit_on_error(common.read_rows, args.out, conditions)}
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    print(f"{sizes[0]:,} pairs for training, {sizes[1]} for validation, {sizes[2]} for the test; {settings}")
    for rung, title, build in RUNGS:
        if (args.only and rung not in args.only) or (rung, title) in measured:
            continue
        model = build(corpus, args.seed)
        row = measured[rung, title] = common.measure(rung, title, model, corpus, settings)
        print(f"{common.format_table([row])}\n{common.format_examples(row)}\n", flush=True)
        if args.out:
            common.write_rows(sort_rows(measured), args.out, conditions)  # after every rung, to be able to continue
            if rung == "g":
                model.save(Path(args.out, WEIGHTS))
    rows = sort_rows(measured)
    print(common.format_table(rows))
    if args.out:
        write_report(rows, corpus, args)
    return rows


def sort_rows(measured):
    """Return the rows in the order of the rungs."""
    return [measured[rung, title] for rung, title, _ in RUNGS if (rung, title) in measured]


def write_report(rows, corpus, args):
    """Write the table and the pictures."""
    folder = Path(args.out)
    (folder / "ladder.md").write_text(common.format_table(rows) + "\n", encoding="utf-8")
    pictures.draw_accuracy(rows, folder / "accuracy_by_length.png")
    if (folder / WEIGHTS).exists():
        model = g_encoder_decoder.build(corpus, args.seed)
        model.load(folder / WEIGHTS)
        chosen = [pair.source for pair in corpus.test[:3]] if args.pairs else [s.split() for s in SENTENCES]
        pictures.draw_alignments(model, corpus, chosen, folder / "alignment.png")


if __name__ == "__main__":
    with ending_quietly():
        main()
