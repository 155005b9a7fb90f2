"""Random programs computed by this package and by torch: python tests/differential.py [--programs N] [--json FILE].

Each kind of program draws options from a seed and compares results. A disagreement is made smaller, by trying simpler
values of each option as long as it remains, and then shown as options with the first numbers that differ. The tests run
the same kinds with few seeds.

    expression      values and gradients of random expressions over all primitives, in float64 and float32
    second order    second derivatives of such expressions
    attention       multi-head attention with masks, padding, biases and shared keys, with all gradients
    gpt             logits, loss, gradients and Hessian-vector products of random GPTs
    optimizer       100 steps of random optimizers, with groups, clipping, a schedule, and gradients that are missing
    training        100 steps of a GPT: loss, clipping, optimizer and schedule together
    generation      `generate` against a greedy loop that calls the twin of the model on the whole text
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_twins as twins
from expressions import expression
from test_torch_parity import assert_close, assert_parity, assert_second_order_parity

import tinygrad_mha as tg
from tinygrad_mha import nn, optim

Options = dict[str, Any]


def close(ours: Any, theirs: Any, what: str, tolerance: float = 1e-9) -> None:
    """Equal within `tolerance` times the largest number (at least 1)."""
    assert_close(ours, theirs.detach(), tolerance, what)


def choose(rng: np.random.Generator, *options: Any) -> Any:
    return options[rng.integers(len(options))]


# --------------------------------------------------------------------------------------------------------------------
# Expressions


def check_expression(seed: int) -> None:
    assert_parity(expression(seed), np.float64, 1e-10)
    assert_parity(expression(seed), np.float32, 2e-4)


def check_second_order(seed: int) -> None:
    assert_second_order_parity(expression(seed), seed)


# --------------------------------------------------------------------------------------------------------------------
# Attention


def draw_attention(rng: np.random.Generator) -> Options:
    n_kv_head = int(choose(rng, 1, 1, 2, 3))
    return {
        "n_kv_head": n_kv_head,
        "n_head": n_kv_head * int(choose(rng, 1, 2, 3)),
        "widths": tuple(int(n) for n in rng.integers(1, 8, 5)),  # d_model, d_k, d_v, d_out, d_memory
        "batch": int(choose(rng, 1, 2, 3)),
        "lengths": (int(rng.integers(1, 8)), int(rng.integers(1, 8))),
        "cross": bool(rng.random() < 0.4),
        "bias": bool(rng.random() < 0.5),
        "causal": bool(rng.random() < 0.5),
        "allow": choose(rng, None, "2-D", "3-D", "4-D"),
        "score_bias": bool(rng.random() < 0.4),
        "padding": bool(rng.random() < 0.4),
        "seed": int(rng.integers(1 << 30)),
    }


def check_attention(n_head: int, n_kv_head: int, widths: Any, batch: int, lengths: Any, cross: bool, bias: bool,
                    causal: bool, allow: Any, score_bias: bool, padding: bool, seed: int) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    d_model, d_k, d_v, d_out, d_memory = widths
    n_q, n_k = lengths if cross else (lengths[0], lengths[0])
    causal = causal and n_q <= n_k
    layer = nn.MultiHeadAttention(
        d_model, n_head, d_k, d_v, d_out, d_memory if cross else None, n_kv_head, bias=bias, rng=seed
    ).astype(np.float64)
    for p in layer.parameters():
        p.assign_(rng.standard_normal(p.shape))
    x = tg.Tensor(rng.standard_normal((batch, n_q, d_model)), requires_grad=True)
    memory = tg.Tensor(rng.standard_normal((batch, n_k, d_memory)), requires_grad=True) if cross else None
    shape = {None: None, "2-D": (n_q, n_k), "3-D": (batch, n_q, n_k), "4-D": (batch, n_head, n_q, n_k)}[allow]
    mask = None if shape is None else rng.random(shape) < 0.7
    keys = rng.random((batch, n_k)) < 0.7 if padding else None
    extra = tg.Tensor(rng.standard_normal((n_head, n_q, n_k))[None], requires_grad=True) if score_bias else None
    y = layer(x, memory, allow=mask, key_allow=keys, bias=extra, causal=causal)

    everything = torch.ones((batch, n_head, n_q, n_k), dtype=torch.bool)
    if mask is not None:
        everything &= torch.tensor(mask[None, None] if allow == "2-D" else mask[:, None] if allow == "3-D" else mask)
    if keys is not None:
        everything &= torch.tensor(keys[:, None, None])
    if causal:
        everything &= torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)
    leaves = [x, *([memory] if memory is not None else []), *([extra] if extra is not None else [])]
    theirs = [torch.tensor(leaf.numpy(), requires_grad=True) for leaf in leaves]
    parameters = twins.copy_parameters(layer)
    their_y = twins.multi_head(
        parameters, n_head, n_kv_head, theirs[0], theirs[1 if cross else 0], everything,
        theirs[-1] if score_bias else None,
    )  # fmt: skip
    close(y.numpy(), their_y, "output")
    g = rng.standard_normal(y.shape)
    y.backward(g)
    their_y.backward(torch.tensor(g))
    for name, p in layer.named_parameters():
        close(p.grad, parameters[name].grad, f"gradient of {name}")
    for i, (a, b) in enumerate(zip(leaves, theirs, strict=True)):
        close(a.grad, b.grad, f"gradient of input {i}")


# --------------------------------------------------------------------------------------------------------------------
# GPT


def draw_gpt(rng: np.random.Generator) -> Options:
    n_kv_head = int(choose(rng, 1, 2, 4))
    return {
        "n_layer": int(choose(rng, 1, 2, 3)),
        "n_head": 4,
        "n_kv_head": n_kv_head,
        "n_embd": int(choose(rng, 8, 16, 24)),
        "vocab_size": int(rng.integers(2, 14)),
        "n_inner": choose(rng, None, 5, 11),
        "bias": bool(rng.random() < 0.5),
        "norm": choose(rng, "layer", "rms"),
        "norm_first": bool(rng.random() < 0.7),
        "activation": choose(rng, "gelu_tanh", "gelu", "relu", "swiglu"),
        "position": choose(rng, "learned", "sinusoidal", "rotary", "alibi", "none"),
        "tie_weights": bool(rng.random() < 0.5),
        "eps": choose(rng, 1e-5, 1e-2),
        "rope_base": choose(rng, 10000.0, 100.0),
        "window": choose(rng, None, 1, 3),
        "score": choose(rng, None, None, "softcap", "sinks"),
        "batch": int(choose(rng, 1, 2)),
        "length": int(rng.integers(1, 9)),
        "seed": int(rng.integers(1 << 30)),
    }


def make_gpt(seed: int, **options: Any) -> tuple[nn.GPT, np.random.Generator]:
    """A GPT in float64 whose parameters are all random and not small."""
    rng = np.random.default_rng(seed)
    model = nn.GPT(nn.GPTConfig(block_size=9, **options), seed=seed).astype(np.float64)
    for p in model.parameters():
        p.assign_(0.6 * rng.standard_normal(p.shape) + (0 if p.ndim > 1 else 0.5))
    return model.eval(), rng


def check_gpt(batch: int, length: int, **options: Any) -> None:
    model, rng = make_gpt(**options)
    idx, targets = rng.integers(0, model.config.vocab_size, (2, batch, length))
    targets[rng.random(targets.shape) < 0.2] = -100
    targets[0, 0] = 0  # torch's mean over no target is nan
    p = twins.copy_parameters(model)
    logits = twins.gpt(p, model.config, idx)
    close(model(idx).numpy(), logits, "logits")
    their_loss = twins.F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss = model.loss(idx, targets)
    close(loss.numpy(), their_loss, "loss")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = tg.grad(loss, parameters, create_graph=True)
    their_gradients = torch.autograd.grad(their_loss, [p[name] for name in names], create_graph=True, **UNUSED)
    directions = [rng.standard_normal(g.shape) for g in gradients]
    for name, a, b in zip(names, gradients, their_gradients, strict=True):
        close(a.numpy(), b, f"gradient of {name}")
    dot = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))
    their_dot = sum((g * torch.tensor(v)).sum() for g, v in zip(their_gradients, directions, strict=True))
    seconds = tg.grad(dot, parameters)
    their_seconds = torch.autograd.grad(their_dot, [p[name] for name in names], **UNUSED)
    for name, a, b in zip(names, seconds, their_seconds, strict=True):
        close(a.numpy(), b, f"Hessian-vector product of {name}", 1e-7)


UNUSED: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}


# --------------------------------------------------------------------------------------------------------------------
# Optimizers and training


def draw_optimizer(rng: np.random.Generator) -> Options:
    kind = choose(rng, "SGD", "Adam", "AdamW")
    options = {"lr": float(10 ** rng.uniform(-4, -1)), "weight_decay": choose(rng, 0.0, 0.1)}
    if kind == "SGD":
        options["momentum"] = choose(rng, 0.0, 0.9)
    else:
        options["betas"] = (choose(rng, 0.0, 0.9), choose(rng, 0.95, 0.999))
        options["eps"] = choose(rng, 1e-8, 1e-3)
    return {
        "kind": kind,
        "options": options,
        "clip": choose(rng, None, 0.5, 100.0),
        "schedule": bool(rng.random() < 0.5),
        "seed": int(rng.integers(1 << 30)),
    }


def learning_rate(step: int, highest: float, schedule: bool) -> float:
    """Linear warm-up over 10 steps, then half a cosine until step 80, then a tenth of the highest."""
    if not schedule:
        return highest
    if step < 10:
        return highest * (step + 1) / 11
    return highest * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * min(1, (step - 10) / 70))))


def step_both(ours: Any, theirs: Any, their_parameters: Any, step: int, clip: Any, schedule: bool, lr: float) -> None:
    """Clip, set the learning rate, and update on both sides."""
    if schedule:
        ours.lr = optim.warmup_cosine(step, lr, lr / 10, 10, 80)
        for group in theirs.param_groups:
            group["lr"] = learning_rate(step, lr, schedule)
    if clip is not None:
        norm = optim.clip_grad_norm(ours.parameters, clip)
        close(norm, torch.nn.utils.clip_grad_norm_(their_parameters, clip), "norm of the gradients")
    ours.step()
    theirs.step()


def check_optimizer(kind: str, options: Options, clip: Any, schedule: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(3, 5), (7,), (), (2, 1, 3)]
    ours = [tg.Tensor(rng.standard_normal(s), requires_grad=True) for s in shapes]
    theirs = [torch.tensor(p.numpy(), requires_grad=True) for p in ours]
    groups = [{"params": ours[:2]}, {"params": ours[2:], "weight_decay": 0.03}]
    optimizer = getattr(optim, kind)(groups, **options)
    twin = twins.make_optimizer(kind, [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.03}], options)
    for step in range(100):
        for a, b in zip(ours, theirs, strict=True):
            g = rng.standard_normal(a.shape) * 10.0 ** rng.integers(-4, 3)
            a.grad, b.grad = (None, None) if rng.random() < 0.1 else (np.array(g), torch.tensor(g))
        step_both(optimizer, twin, theirs, step, clip, schedule, options["lr"])
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        close(a.numpy(), b, f"parameter {i} after 100 steps")


def draw_training(rng: np.random.Generator) -> Options:
    model = draw_gpt(rng) | {"n_layer": 1, "n_embd": 8, "batch": 2, "length": 5}
    return {"optimizer": draw_optimizer(rng), "steps": 100, **model}


def check_training(optimizer: Options, steps: int, batch: int, length: int, **options: Any) -> None:
    model, rng = make_gpt(**options)
    p = twins.copy_parameters(model)
    kind, settings = optimizer["kind"], optimizer["options"] | {"lr": min(1e-3, optimizer["options"]["lr"])}
    ours = getattr(optim, kind)(optim.decay_groups(model, 0.1), **settings)
    groups = [
        {"params": [x for x in p.values() if x.ndim >= 2], "weight_decay": 0.1},
        {"params": [x for x in p.values() if x.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = twins.make_optimizer(kind, groups, settings)
    for step in range(steps):
        idx, targets = rng.integers(0, model.config.vocab_size, (2, batch, length))
        ours.zero_grad()
        theirs.zero_grad()
        loss = model.loss(idx, targets)
        their_loss = twins.F.cross_entropy(
            twins.gpt(p, model.config, idx).flatten(0, 1), torch.tensor(targets).flatten()
        )
        loss.backward()
        their_loss.backward()
        # Adam divides by the gradient's size, so an element whose gradient is rounding moves by a whole step: the
        # key's bias has gradient 0. The losses do not depend on it.
        close(loss.numpy(), their_loss, f"loss at step {step}", 1e-6)
        step_both(ours, theirs, list(p.values()), step, optimizer["clip"], optimizer["schedule"], settings["lr"])


# --------------------------------------------------------------------------------------------------------------------
# Generation


def draw_generation(rng: np.random.Generator) -> Options:
    return {
        **draw_gpt(rng),
        "use_cache": bool(rng.random() < 0.7),
        "n": int(rng.integers(1, 7)),
        "batch": 3,
        "length": 3,
    }


def check_generation(use_cache: bool, n: int, batch: int, length: int, **options: Any) -> None:
    model, rng = make_gpt(**options)
    p = twins.copy_parameters(model)
    vocabulary, limit = model.config.vocab_size, model.config.block_size
    lengths = rng.integers(1, length + 1, batch)
    prompts = [rng.integers(0, vocabulary, size) for size in lengths]
    stop = int(rng.integers(vocabulary))
    texts = tg.generate(model, prompts, min(n, limit - max(lengths)), 0, stop=stop, use_cache=use_cache)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = list(prompt)
        while len(ids) - len(prompt) < min(n, limit - max(lengths)):
            ids.append(int(twins.gpt(p, model.config, np.array([ids]))[0, -1].argmax()))
            if ids[-1] == stop:
                break
        np.testing.assert_array_equal(text, ids)


# --------------------------------------------------------------------------------------------------------------------
# Running

Check = Callable[..., None]
EXPRESSIONS: dict[str, Check] = {"expression": check_expression, "second order": check_second_order}
KINDS: dict[str, tuple[Callable[[np.random.Generator], Options], Check]] = {
    "attention": (draw_attention, check_attention),
    "gpt": (draw_gpt, check_gpt),
    "optimizer": (draw_optimizer, check_optimizer),
    "training": (draw_training, check_training),
    "generation": (draw_generation, check_generation),
}
SHARES = {
    "expression": 50,
    "second order": 10,
    "attention": 20,
    "gpt": 8,
    "optimizer": 6,
    "training": 1,
    "generation": 5,
}
SIMPLER: dict[str, tuple[Any, ...]] = {
    "n_layer": (1,), "n_head": (1, 2), "n_kv_head": (1,), "n_embd": (8,), "n_inner": (None,), "bias": (False,),
    "norm": ("layer",), "norm_first": (True,), "activation": ("relu", "gelu"), "position": ("none",),
    "tie_weights": (True,), "eps": (1e-5,), "window": (None,), "score": (None,), "batch": (1,), "length": (1, 2, 3),
    "widths": ((1, 1, 1, 1, 1), (2, 3, 5, 7, 11)), "lengths": ((1, 1), (2, 2), (2, 3)), "cross": (False,),
    "causal": (False,), "allow": (None, "2-D"), "score_bias": (False,), "padding": (False,), "clip": (None,),
    "schedule": (False,), "steps": (1, 2, 5), "use_cache": (False,), "n": (1, 2),
}  # fmt: skip


def check(kind: str, seed: int) -> None:
    """Compare one program.

    Raises:
        AssertionError: the results differ; the message shows the smallest program found.
    """
    if kind in EXPRESSIONS:
        try:
            EXPRESSIONS[kind](seed)
        except Exception as error:
            raise AssertionError(f"{kind} {seed}: {error}\n{expression(seed)}") from error
        return
    draw, compare = KINDS[kind]
    options = draw(np.random.default_rng([seed, *kind.encode()]))
    try:
        compare(**options)
    except Exception as error:
        smallest, last = shrink(compare, options, error)
        raise AssertionError(f"{kind} {seed}: check_{kind}(**{smallest})\n{last}") from error


def shrink(compare: Check, options: Options, error: Exception) -> tuple[Options, Exception]:
    """Replace each option by a simpler value as long as the comparison fails."""
    for key in options:
        for simpler in SIMPLER.get(key, ()):
            candidate = options | {key: simpler}
            try:
                compare(**candidate)
            except AssertionError as failure:
                options, error = candidate, failure
                break
            except Exception:  # the simpler value does not fit the others
                continue
    return options, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000, help="how many in all (default: 10000)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first seed (default: 1000000)")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts, failures, start = dict.fromkeys(SHARES, 0), [], time.perf_counter()
    for kind, share in SHARES.items():
        for seed in range(args.seed, args.seed + round(args.programs * share / sum(SHARES.values()))):
            counts[kind] += 1
            try:
                check(kind, seed)
            except AssertionError as error:
                failures.append(str(error))
                print(error, flush=True)
        print(f"{kind:14} {counts[kind]:7} programs, {time.perf_counter() - start:6.0f} s", flush=True)
    print(f"{sum(counts.values())} programs, {len(failures)} disagreements")
    if args.json:
        args.json.write_text(json.dumps({"programs": counts, "disagreements": failures}, indent=2) + "\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
