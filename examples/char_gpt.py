"""Train a GPT on the characters of a text, and generate text with it.

    python examples/char_gpt.py [--text FILE] [--short]

Without FILE the text is the language reference that is part of Python. The loop below is a complete training loop: draw
windows of text, compute the loss of every next character, and move every weight against its gradient.
(`tinygrad-mha train` does the same, and can resume an interrupted run.)

Target: the validation loss, on a tenth of the text that is not trained on, falls below half of the loss of a uniform
guess. Then text is generated with and without the KV cache, and is the same. About a minute on one core.

`--short` stops after a few steps and only shows that the loss falls.
"""

import math
import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.decoding import CountedModel
from tinygrad_mha.programs import ending_quietly, make_parser


def mean_loss(model, batches):
    """The loss of the first windows of `batches`, side by side, in eval mode and without gradients."""
    starts = np.arange(40) * batches.block_size
    with model.evaluating(), tg.no_grad():
        return model.loss(*batches.at(starts[starts < len(batches.ids) - batches.block_size])).item()


def main(short=False, file=None):
    text = tg.data.read_text(file) if file else tg.data.builtin_corpus()
    tokenizer = tg.data.CharTokenizer.of(text)
    training, validation = (
        tg.data.Batches(tokenizer.encode(part), block_size=64, batch_size=12, seed=0)
        for part in tg.data.split_text(text)
    )
    config = tg.nn.GPTConfig(tokenizer.vocab_size, block_size=64, n_layer=2, n_head=4, n_embd=64)
    model = tg.nn.GPT(config, seed=0)
    optimizer = tg.optim.AdamW(tg.optim.decay_groups(model, weight_decay=0.1), betas=(0.9, 0.99))
    guess = math.log(tokenizer.vocab_size)
    print(f"{model.count():,} parameters, {len(text):,} characters, {tokenizer.vocab_size} distinct")
    print(f"the loss of a uniform guess: {guess:.3f}")

    total = 1000
    steps, losses = 20 if short else total, []
    for step in range(steps + 1):
        if step % 200 == 0 or step == steps:
            losses.append(mean_loss(model, validation))
            print(f"step {step:4}  validation loss {losses[-1]:.4f}")
        if step == steps:
            break
        optimizer.lr = tg.optim.warmup_cosine(step, max_lr=3e-3, min_lr=3e-4, warmup=50, total=total)
        model.loss(*next(training)).backward(leaves_only=True)
        tg.optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    prompt = tokenizer.encode(text[:8])
    new = config.block_size + 1 - len(prompt)
    options = {"temperature": 0.8, "seed": 0}
    print(f"\n{text[:8]}", end="")
    for piece in tg.stream(model, prompt, new, tokenizer=tokenizer, **options):
        print(piece, end="", flush=True)
    with_cache, without_cache = CountedModel(model), CountedModel(model)
    cached = tg.generate(with_cache, prompt, new, **options)
    uncached = tg.generate(without_cache, prompt, new, use_cache=False, **options)
    costs = [with_cache.multiply_adds, without_cache.multiply_adds]
    same = bool((cached == uncached).all())
    print(f"\n\nwith and without the cache the same text: {same}")
    print(f"multiply-adds: {costs[0]:,} with, {costs[1]:,} without, {costs[1] / costs[0]:.1f} times as many")
    return {"losses": losses, "guess": guess, "same": same}


if __name__ == "__main__":
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--text", type=Path, help="a text file (UTF-8)")
        parser.add_argument("--short", action="store_true", help="a few steps only")
        args = parser.parse_args()
        result = main(args.short, args.text)
        reached = result["same"] and result["losses"][-1] < result["guess"] / 2
        sys.exit(0 if args.short or args.text or reached else 1)
