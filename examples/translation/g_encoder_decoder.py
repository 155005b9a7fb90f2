"""g) The Transformer: an encoder reads the source, a decoder writes word by word and attends to all source words.

    python examples/translation/g_encoder_decoder.py
    python examples/translation/g_encoder_decoder.py --pairs FILE.tsv
    python examples/translation/g_encoder_decoder.py --say "three million and seven" --beam 3
    python examples/translation/g_encoder_decoder.py --weights ladder/encoder_decoder.safetensors --say "seven"

The answer is no longer tied to the positions of the source words: the decoder predicts the next word, or the end, from
the words written so far. `--say` translates a sentence and shows the beams as a tree; `--weights` loads weights that
were trained with the same options, instead of training.
"""

import common

from tinygrad_mha import nn
from tinygrad_mha.programs import ending_quietly

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


def translate_text(model, corpus, text, beam):
    """Print the translation of a text and the tree of the beam search."""
    words = common.split_words(text)
    if len(words) >= corpus.max_len:
        raise ValueError(f"{text!r} has {len(words)} words, at most {corpus.max_len - 1} are allowed")
    found = model.search(corpus.source.encode(words, repr(text)), beam=beam)
    print(f"\n{text} -> {''.join(corpus.target.decode(model.cut_at_end(found.best.tokens)))}")
    print(found.tree(corpus.target.words.__getitem__))


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("--say", metavar="TEXT", help="also translate this text")
    parser.add_argument("--beam", type=int, default=3, help="the number of beams of --say")
    parser.add_argument("--weights", metavar="FILE", help="load these weights instead of training")
    args = parser.parse_args(argv)
    corpus = common.exit_on_error(common.open_corpus, args)
    model = build(corpus, args.seed)
    if args.weights:
        common.exit_on_error(model.load, args.weights)
    else:
        common.report(RUNG, TITLE, model, corpus, args)
    if args.say:
        common.exit_on_error(translate_text, model, corpus, args.say, args.beam)


if __name__ == "__main__":
    with ending_quietly():
        main()
