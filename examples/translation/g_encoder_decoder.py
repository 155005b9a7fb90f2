"""g) The Transformer: an encoder reads, a decoder writes word by word and looks back at all that was read.

    python examples/translation/g_encoder_decoder.py
    python examples/translation/g_encoder_decoder.py --pairs FILE.tsv
    python examples/translation/g_encoder_decoder.py --say "three million and seven" --beam 3
    python examples/translation/g_encoder_decoder.py --weights ladder/encoder_decoder.safetensors --say "seven"

The answer is no longer tied to the places of the question: the decoder decides what comes next, and when to stop, from
what it has written so far. `--say` translates a sentence and shows the beams as a tree; `--weights` takes the weights
that were trained with the same options instead of training.
"""

import common

from tinygrad_mha import nn

RUNG, TITLE = "g", "encoder-decoder"


def build(corpus, seed=0):
    return nn.Transformer(
        len(corpus.source),
        len(corpus.target),
        d_model=64,
        n_head=4,
        n_layer=2,
        d_ff=256,
        max_len=corpus.max_len,
        seed=seed,
    )


def say(model, corpus, text, beam):
    """Print the translation of a text, and the beams that led to it."""
    words = common.tokens(text)
    if len(words) >= corpus.max_len:
        raise ValueError(f"{text!r} has {len(words)} words, and with an end it must fit into {corpus.max_len}")
    found = model.search(corpus.source.encode(words, repr(text)), beam=beam)
    print(f"\n{text} -> {''.join(corpus.target.decode(model.cut_at_end(found.best.tokens)))}")
    print(found.tree(corpus.target.words.__getitem__))


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--say", metavar="TEXT", help="translate this as well")
    parser.add_argument("--beam", type=int, default=3, help="how many beginnings --say follows")
    parser.add_argument("--weights", metavar="FILE", help="weights to load instead of training")
    args = parser.parse_args(argv)
    corpus = common.or_exit(common.open_corpus, args)
    model = build(corpus, args.seed)
    if args.weights:
        common.or_exit(model.load, args.weights)
    else:
        common.report(RUNG, TITLE, model, corpus, args)
    if args.say:
        common.or_exit(say, model, corpus, args.say, args.beam)


if __name__ == "__main__":
    main()
