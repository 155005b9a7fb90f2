"""Replay a recorded training run of nanoGPT, update by update, and print the differences.

    python examples/replay_nanogpt.py FOLDER [--iterations 101]

FOLDER holds `nanogpt-cpu-run/full_2000_iterations.npz` (initial weights, the drawn batches, and torch's loss and
gradient norm of every iteration) and `corpora/tinyshakespeare.txt`. Initial weights, batches and update rules are the
same, so only the rounding of float32 differs. The whole run takes a few minutes; the exit code is 0 if all differences
are within their limits.
"""

import math
import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.data import Batches, CharTokenizer, read_text, split_text
from tinygrad_mha.nn import GPT
from tinygrad_mha.optim import AdamW, clip_grad_norm, decay_groups
from tinygrad_mha.programs import ending_quietly, make_parser
from tinygrad_mha.training import preset

CONFIG = preset("cpu")  # nanoGPT's configuration for a CPU
EVERY, BATCHES = CONFIG.eval_interval, CONFIG.eval_batches

# Mean losses over the recorded evaluation batches, (training, validation), recomputed from the recorded weights.
EVALUATIONS = {
    0: (4.1676, 4.1649),
    250: (2.4293, 2.4447),
    500: (2.2732, 2.3141),
    750: (2.1338, 2.1905),
    1000: (1.9714, 2.0528),
    1250: (1.8756, 2.0089),
    1500: (1.8557, 1.9225),
    1750: (1.7790, 1.8922),
    2000: (1.7648, 1.8857),
}


class Replay:
    """A recorded run, and our model at the same iteration."""

    def __init__(self, folder, recording="full_2000_iterations.npz"):
        text = read_text(Path(folder, "corpora", "tinyshakespeare.txt"))
        tokenizer = CharTokenizer.of(text)
        self.splits = [
            Batches(tokenizer.encode(part), CONFIG.block_size, CONFIG.batch_size) for part in split_text(text)
        ]
        with np.load(Path(folder, "nanogpt-cpu-run", recording)) as arrays:
            self.recorded = dict(arrays)
        self.iterations = len(self.recorded["loss"])
        self.model = GPT(CONFIG.make_model_config(tokenizer.vocab_size))
        self.model.load_state_dict(self.weights("init"))
        self.optimizer = AdamW(decay_groups(self.model, CONFIG.weight_decay), betas=CONFIG.betas, weight_decay=0.0)
        self.iteration = 0

    def weights(self, moment):
        """The recorded weights at "init" or "final", by our names. torch stores (out, in), we store (in, out)."""
        state = {}
        for name, _ in self.model.named_parameters():
            array = self.recorded[f"{moment}.transformer.{name}"]
            state[name] = array.T if ".attn." in name or ".mlp." in name else array
        return state

    def batch(self, row):
        """The batch that was drawn as number `row`."""
        return self.splits[self.recorded["split"][row]].at(self.recorded["ix"][row])

    def update(self):
        """One update. Returns the loss before it and the gradient norm before clipping."""
        i = self.iteration
        self.optimizer.lr = CONFIG.lr(i)
        # Before the batches of an iteration that is a multiple of EVERY, those of its evaluation were drawn.
        loss = self.model.loss(*self.batch(i + 2 * BATCHES * math.ceil(i / EVERY)))
        loss.backward(leaves_only=True)
        norm = clip_grad_norm(self.optimizer.parameters, CONFIG.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1
        return loss.item(), norm

    @tg.no_grad
    def evaluate(self):
        """The mean losses over the recorded training and validation batches of this iteration."""
        first = self.iteration // EVERY * (EVERY + 2 * BATCHES) + 1
        losses = [self.model.loss(*self.batch(first + k)).item() for k in range(2 * BATCHES)]
        return sum(losses[:BATCHES]) / BATCHES, sum(losses[BATCHES:]) / BATCHES

    def distance(self, moment):
        """The largest difference of any weight from the recorded one."""
        weights = self.weights(moment)
        return max(np.abs(p.numpy() - weights[name]).max() for name, p in self.model.named_parameters())


def main():
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, help="stop after so many (all unless given)")
    args = parser.parse_args()
    run = Replay(args.folder)
    recorded = run.recorded
    n = min(args.iterations or run.iterations, run.iterations)
    loss_errors, norm_errors, evaluation_errors = [], [], []
    print("iteration    loss  recorded  largest difference   training  recorded   validation  recorded")
    for i in range(n):
        evaluations = ""
        if i % EVERY == 0:
            ours, theirs = run.evaluate(), EVALUATIONS[i]
            evaluation_errors += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            evaluations = f"     {ours[0]:.4f}    {theirs[0]:.4f}       {ours[1]:.4f}    {theirs[1]:.4f}"
        loss, norm = run.update()
        loss_errors.append(abs(loss - recorded["loss"][i]))
        norm_errors.append(abs(norm / recorded["gradnorm"][i] - 1))
        if i % EVERY == 0 or i in (10, 100, n - 1):
            print(f"{i:9}  {loss:.4f}    {recorded['loss'][i]:.4f}             {max(loss_errors):.1e}{evaluations}")
            sys.stdout.flush()

    limits = [
        (f"losses, first {len(loss_errors[:101])} iterations", max(loss_errors[:101]), 3e-6),
        (f"gradient norms, first {len(norm_errors[:101])} iterations, relative", max(norm_errors[:101]), 1e-5),
        (f"losses, all {n} iterations", max(loss_errors), 1e-4),
        ("mean evaluation losses", max(evaluation_errors), 1e-3),
    ]
    print(f"\n{'largest difference':48}  measured    limit")
    for what, measured, limit in limits:
        print(f"{what:48}   {measured:.1e}  {limit:.0e}  {'kept' if measured <= limit else 'EXCEEDED'}")
    if n == run.iterations:
        print(f"{'final weights':48}   {run.distance('final'):.1e}")
    return int(any(measured > limit for _, measured, limit in limits))


if __name__ == "__main__":
    with ending_quietly():
        sys.exit(main())
