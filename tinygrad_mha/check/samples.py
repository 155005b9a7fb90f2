"""The inputs at which each primitive is checked: `SAMPLES[name](rng)` is a list of `(inputs, keywords)`.

Lengths are different primes, so that a swapped axis cannot pass. Inputs keep their distance from every point where a
derivative does not exist.
"""

from __future__ import annotations

import numpy as np

from tinygrad_mha.ops import REGISTRY

__all__ = ["SAMPLES"]


def normal(rng, *shape):
    """Standard normal."""
    return np.asarray(rng.standard_normal(shape))


def positive(rng, *shape):
    """Uniform in [0.4, 1.4)."""
    return np.asarray(0.4 + rng.random(shape))


def nonzero(rng, *shape):
    """Of both signs, at least 0.4 from 0."""
    return np.asarray(positive(rng, *shape) * rng.choice([-1.0, 1.0], shape))


def distinct(rng, *shape):
    """All different, by at least 0.2, so that there are no ties."""
    n = int(np.prod(shape))
    return (rng.permutation(n) * 0.3 + 0.1 * rng.random(n) - 0.15 * n).reshape(shape)


def without_ties(rng):
    """Samples of an operation on two arrays that differ by at least 0.05 wherever they meet."""

    def spread(shape):
        return 0.3 * rng.integers(-4, 5, shape) + 0.1 * rng.random(shape)

    return [((spread(a), spread(b) + 0.15), {}) for a, b in [((2, 3), (2, 3)), ((5, 3), (3,)), ((5, 3), ())]]


def random_mask(rng, *shape):
    """A boolean mask that allows something in every row."""
    allow = rng.random(shape) < 0.6
    allow[..., 0] = True
    return allow


def two_operands(make):
    """Samples of an operation on two arrays: of one shape, broadcast in front, in the middle, with a scalar, empty."""
    shapes = [((2, 3), (2, 3)), ((2, 3, 5), (5,)), ((3, 1, 2), (5, 1)), ((), (3,)), ((2, 3), ()), ((0, 3), (0, 3))]
    return lambda rng: [(tuple(make(rng, *s) for s in shape), {}) for shape in shapes]


def one_operand(make, *shapes, **keywords):
    """Samples of an operation on one array."""
    return lambda rng: [((make(rng, *shape),), keywords) for shape in shapes or [(2, 3), (), (5,), (2, 0)]]


def reductions(make, empty=True):
    """Samples of a reduction: all ways to give axes."""
    ways = [{}, {"axis": 0}, {"axis": -1}, {"axis": (0, 2)}, {"axis": (-1, -2)}, {"axis": 1, "keepdims": True}]
    shapes = [((2, 3, 5), way) for way in ways] + [((), {})] + ([((0, 3), {"axis": 0})] if empty else [])
    return lambda rng: [((make(rng, *shape),), way) for shape, way in shapes]


def attention(rng):
    """Without options, with a mask and a scale, with a mask and a bias, and with dropout on one key matrix for all."""
    q, k, v = normal(rng, 2, 3, 5), normal(rng, 2, 7, 5), normal(rng, 2, 7, 2)
    keep_mask = rng.integers(0, 2, (2, 3, 7)) * 2.0
    return [
        ((q[0], k[0], v[0]), {}),
        ((q, k, v, random_mask(rng, 3, 7)), {"scale": 0.3}),
        ((q[0], k[0, :3], v[0, :3], np.tri(3, dtype=bool), normal(rng, 3, 3)), {}),
        ((q, k[0], v[0], None, None, keep_mask), {}),
    ]


SAMPLES = {
    **dict.fromkeys(("add", "sub", "mul"), two_operands(normal)),
    **dict.fromkeys(("maximum", "minimum"), without_ties),
    **dict.fromkeys(("max", "min"), reductions(distinct, empty=False)),
    **dict.fromkeys(("mean", "logsumexp"), reductions(normal, empty=False)),
    **dict.fromkeys(("neg", "exp", "expm1", "sin", "cos", "tanh", "sigmoid"), one_operand(normal)),
    **dict.fromkeys(("log", "sqrt", "log1p"), one_operand(positive)),
    "div": two_operands(nonzero),
    "pow": lambda rng: [
        *two_operands(positive)(rng),
        ((normal(rng, 2, 3), 3), {}),
        ((nonzero(rng, 2, 3), -2), {}),
        ((positive(rng, 2, 3), 0.5), {}),
        ((2.5, normal(rng, 3)), {}),
        ((positive(rng, 3), np.array([0.0, 1.0, 2.0])), {}),
    ],
    "scale": one_operand(normal, by=-0.7),
    "cumsum": lambda rng: [((normal(rng, 2, 3, 5),), {"axis": axis}) for axis in (0, 1, -1)],
    "erf": lambda rng: [((np.linspace(-3.1, 3.3, 17),), {}), ((normal(rng, 2, 3),), {})],
    "relu": one_operand(nonzero, (2, 3), (5,), (2, 0)),
    "gelu": lambda rng: [((normal(rng, 2, 3) * 2,), {"tanh": tanh}) for tanh in (False, True)],
    "abs": one_operand(nonzero),
    "clip": lambda rng: [
        ((distinct(rng, 2, 5),), limits) for limits in ({"min": -0.52, "max": 0.47}, {"min": 0.03}, {"max": 0.03})
    ],
    "where": lambda rng: [
        ((rng.random((2, 3)) < 0.5, normal(rng, 2, 3), normal(rng, 2, 3)), {}),
        ((rng.random((2, 1, 3)) < 0.5, normal(rng, 5, 1), normal(rng, 3)), {}),
        ((rng.random((2, 3)) < 0.5, normal(rng, 2, 3), 0.5), {}),
    ],
    # Masked scores are -inf, and differences of them are nan. So the mask here allows everything; `softmax` and
    # `attention` are checked with real masks.
    "mask": lambda rng: [((normal(rng, 2, 3), np.ones((2, 3), bool)), {})],
    "sum": reductions(normal),
    "var": lambda rng: [*reductions(normal, empty=False)(rng)[:-1], ((normal(rng, 3, 5),), {"axis": 1, "ddof": 1})],
    "reshape": lambda rng: [((normal(rng, 2, 3, 5),), {"shape": shape}) for shape in [(6, 5), (-1,), (5, 1, 6)]],
    "transpose": lambda rng: [((normal(rng, 2, 3, 5),), {"axes": axes}) for axes in [None, (1, 2, 0), (0, -1, -2)]],
    "broadcast_to": lambda rng: [((normal(rng, 3, 1),), {"shape": (2, 3, 5)}), ((normal(rng),), {"shape": (2,)})],
    "cast": lambda rng: [((normal(rng, 2, 3),), {"dtype": np.float64})],
    "concat": lambda rng: [
        ((normal(rng, 2, 3), normal(rng, 5, 3)), {"axis": 0}),
        ((normal(rng, 2, 3), normal(rng, 2, 5), normal(rng, 2, 0)), {"axis": -1}),
    ],
    "stack": lambda rng: [((normal(rng, 2, 3), normal(rng, 2, 3)), {"axis": axis}) for axis in (0, 1, -1)],
    "getitem": lambda rng: [
        ((normal(rng, 3, 5, 2),), {"index": index})
        for index in (
            1,
            (0, 3, 1),
            (slice(None), slice(None, None, -2)),
            (..., None, 0),
            np.array([0, 2, 0, -1]),
            (np.array([0, 0, 2]), np.array([4, 4, 1])),
            (slice(1, None), [3, 3]),
            rng.random((3, 5)) < 0.5,
        )
    ],
    "scatter_add": lambda rng: [
        ((normal(rng, 3, 2),), {"index": np.array([1, 1, -1]), "shape": (5, 2)}),
        ((normal(rng, 5),), {"index": (slice(None), 1), "shape": (5, 3)}),
        ((normal(rng, 2),), {"index": (np.array([0, 0]), np.array([1, 1])), "shape": (2, 3)}),
    ],
    "take": lambda rng: [((normal(rng, 5, 3), np.array([[4, 0, 4], [1, 1, 2]])), {})],
    "matmul": lambda rng: [
        ((normal(rng, 2, 3), normal(rng, 3, 5)), {}),
        ((normal(rng, 2, 2, 3), normal(rng, 3, 5)), {}),
        ((normal(rng, 2, 1, 2, 3), normal(rng, 7, 3, 2)), {}),
        ((normal(rng, 2, 0), normal(rng, 0, 3)), {}),
    ],
    "linear": lambda rng: [
        ((normal(rng, 2, 3), normal(rng, 3, 5), normal(rng, 5)), {}),
        ((normal(rng, 2, 7, 3), normal(rng, 3, 5)), {}),
        ((normal(rng, 3), normal(rng, 3, 5), normal(rng, 5)), {}),
    ],
    "einsum": lambda rng: [
        ((normal(rng, 2, 3), normal(rng, 3, 5)), {"subscripts": "ij,jk->ik"}),
        ((normal(rng, 2, 3), normal(rng, 2, 3)), {"subscripts": "ij,ij"}),
        ((normal(rng, 3, 3),), {"subscripts": "ii"}),
        ((normal(rng, 3, 3, 2),), {"subscripts": "iij->ji"}),
        ((normal(rng, 2, 3, 5), normal(rng, 7, 5)), {"subscripts": "...ij,kj->...ki"}),
        ((normal(rng, 2, 1, 3), normal(rng, 5, 3)), {"subscripts": "...i,...i->..."}),
        ((normal(rng, 2), normal(rng, 3), normal(rng, 2, 3)), {"subscripts": "a,b,ab->b"}),
    ],
    "softmax": lambda rng: [
        ((normal(rng, 2, 3),), {}),
        ((normal(rng, 2, 3, 5),), {"axis": 1}),
        ((normal(rng, 0, 3),), {}),
        ((np.where(random_mask(rng, 3, 5), normal(rng, 3, 5), -np.inf),), {}),
    ],
    "log_softmax": one_operand(normal, (2, 3), (5,), axis=-1),
    "cross_entropy": lambda rng: [
        ((normal(rng, 7, 5), np.array([0, 4, 2, -100, 1, 1, 3])), way)
        for way in [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}, {"reduction": "none", "label_smoothing": 0.1}]
    ],
    "layer_norm": lambda rng: [
        ((normal(rng, 2, 5), normal(rng, 5), normal(rng, 5)), {}),
        ((normal(rng, 2, 3, 5), normal(rng, 5)), {"eps": 0.1}),
        ((normal(rng, 2, 5),), {}),
    ],
    "rms_norm": lambda rng: [((normal(rng, 2, 5), normal(rng, 5)), {}), ((normal(rng, 5),), {"eps": 0.1})],
    "dropout": lambda rng: [((normal(rng, 2, 3, 5), rng.integers(0, 2, (3, 5)) * 2.0), {})],
    "rotate": lambda rng: [((normal(rng, 2, 3, 6),), {"angles": normal(rng, 3, 3)})],
    "attention": attention,
    "multi_head_attention": lambda rng: [
        ((normal(rng, 3, 7), normal(rng, 5, 7), normal(rng, 5, 2)), {"n_head": 1}),
        (
            (normal(rng, 2, 3, 6), normal(rng, 2, 5, 6), normal(rng, 2, 5, 10), np.tri(3, 5, 2, dtype=bool)),
            {"n_head": 2},
        ),
        (
            (
                normal(rng, 3, 6),
                normal(rng, 5, 6),
                normal(rng, 5, 4),
                None,
                normal(rng, 2, 3, 5),
                random_mask(rng, 3, 5) * 2.0,
            ),
            {"n_head": 2},
        ),
    ],
    "self_attention": lambda rng: [
        ((normal(rng, 3, 6),), {"n_head": 1}),
        ((normal(rng, 2, 3, 12), np.tri(3, dtype=bool)), {"n_head": 2}),
        ((normal(rng, 2, 3, 6), random_mask(rng, 2, 1, 3, 3), normal(rng, 2, 3, 3)), {"n_head": 2}),
        ((normal(rng, 2, 3, 6), None, None, rng.integers(0, 2, (2, 3, 3)) * 2.0), {"n_head": 2}),
    ],
}

for name, samples in SAMPLES.items():
    REGISTRY[name].samples = samples
