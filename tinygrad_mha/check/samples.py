"""Where each primitive is checked: inputs of prime lengths, so that no axis can be mistaken for another, and at a
distance from every point where a derivative does not exist."""

from __future__ import annotations

import numpy as np

from tinygrad_mha.ops import REGISTRY


def normal(rng, *shape):
    return np.asarray(rng.standard_normal(shape))


def positive(rng, *shape):
    return np.asarray(0.4 + rng.random(shape))


def nonzero(rng, *shape):
    """Of both signs, and at least 0.4 from 0."""
    return np.asarray(positive(rng, *shape) * rng.choice([-1.0, 1.0], shape))


def spread(rng, *shape):
    """All different, by at least 0.1: no ties."""
    n = int(np.prod(shape))
    return (rng.permutation(n) * 0.3 + 0.1 * rng.random(n) - 0.15 * n).reshape(shape)


def apart(rng, a, b):
    """Two arrays that are nowhere within 0.05 of each other."""
    left = 0.3 * rng.integers(-4, 5, a) + 0.1 * rng.random(a)
    right = 0.3 * rng.integers(-4, 5, b) + 0.1 * rng.random(b) + 0.15
    return left, right


def allowed(rng, *shape):
    """A boolean mask in which every row sees something."""
    allow = rng.random(shape) < 0.6
    allow[..., 0] = True
    return allow


def pairs(make):
    """Two operands of one shape, broadcast in front, in the middle, against a scalar, and empty."""
    shapes = [((2, 3), (2, 3)), ((2, 3, 5), (5,)), ((3, 1, 2), (5, 1)), ((), (3,)), ((2, 3), ()), ((0, 3), (0, 3))]
    return lambda rng: [(tuple(make(rng, *s) for s in shape), {}) for shape in shapes]


def arrays(make, *shapes, **keywords):
    """One operand, of several shapes."""
    return lambda rng: [((make(rng, *shape),), keywords) for shape in shapes or [(2, 3), (), (5,), (2, 0)]]


def reductions(make, empty=True):
    """All ways to say which axes."""
    ways = [{}, {"axis": 0}, {"axis": -1}, {"axis": (0, 2)}, {"axis": (-1, -2)}, {"axis": 1, "keepdims": True}]
    shapes = [((2, 3, 5), way) for way in ways] + [((), {})] + ([((0, 3), {"axis": 0})] if empty else [])
    return lambda rng: [((make(rng, *shape),), way) for shape, way in shapes]


SAMPLES = {
    "add": pairs(normal),
    "sub": pairs(normal),
    "mul": pairs(normal),
    "div": pairs(nonzero),
    "pow": lambda rng: [
        *pairs(positive)(rng),
        ((normal(rng, 2, 3), 3), {}),
        ((nonzero(rng, 2, 3), -2), {}),
        ((positive(rng, 2, 3), 0.5), {}),
        ((2.5, normal(rng, 3)), {}),
    ],
    "neg": arrays(normal),
    "scale": arrays(normal, by=-0.7),
    "exp": arrays(normal),
    "log": arrays(positive),
    "sqrt": arrays(positive),
    "erf": lambda rng: [((np.linspace(-3.1, 3.3, 17),), {}), ((normal(rng, 2, 3),), {})],
    "tanh": arrays(normal),
    "sigmoid": arrays(normal),
    "relu": arrays(nonzero, (2, 3), (5,), (2, 0)),
    "gelu": lambda rng: [((normal(rng, 2, 3) * 2,), {"tanh": tanh}) for tanh in (False, True)],
    "abs": arrays(nonzero),
    "clip": lambda rng: [
        ((spread(rng, 2, 5),), limits) for limits in ({"min": -0.52, "max": 0.47}, {"min": 0.03}, {"max": 0.03})
    ],
    "where": lambda rng: [
        ((rng.random((2, 3)) < 0.5, normal(rng, 2, 3), normal(rng, 2, 3)), {}),
        ((rng.random((2, 1, 3)) < 0.5, normal(rng, 5, 1), normal(rng, 3)), {}),
        ((rng.random((2, 3)) < 0.5, normal(rng, 2, 3), 0.5), {}),
    ],
    # What a mask excludes is -inf, which no finite difference can follow: it is checked where all are allowed,
    # and with a real mask through `softmax` and `attention`.
    "mask": lambda rng: [((normal(rng, 2, 3), np.ones((2, 3), bool)), {})],
    "maximum": lambda rng: [(apart(rng, *s), {}) for s in [((2, 3), (2, 3)), ((5, 3), (3,)), ((5, 3), ())]],
    "minimum": lambda rng: [(apart(rng, *s), {}) for s in [((2, 3), (2, 3)), ((5, 3), (3,)), ((5, 3), ())]],
    "sum": reductions(normal),
    "mean": reductions(normal, empty=False),
    "var": lambda rng: [*reductions(normal, empty=False)(rng)[:-1], ((normal(rng, 3, 5),), {"axis": 1, "ddof": 1})],
    "max": reductions(spread, empty=False),
    "min": reductions(spread, empty=False),
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
        ((np.where(allowed(rng, 3, 5), normal(rng, 3, 5), -np.inf),), {}),
    ],
    "log_softmax": arrays(normal, (2, 3), (5,), axis=-1),
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
    "attention": lambda rng: [
        ((normal(rng, 3, 5), normal(rng, 7, 5), normal(rng, 7, 2)), {}),
        ((normal(rng, 2, 3, 5), normal(rng, 2, 7, 5), normal(rng, 2, 7, 2), allowed(rng, 3, 7)), {"scale": 0.3}),
        (
            (normal(rng, 3, 5), normal(rng, 3, 5), normal(rng, 3, 2), np.tri(3, dtype=bool), normal(rng, 3, 3)),
            {},
        ),
        (
            (
                normal(rng, 2, 3, 5),
                normal(rng, 7, 5),
                normal(rng, 7, 2),
                None,
                None,
                rng.integers(0, 2, (2, 3, 7)) * 2.0,
            ),
            {},
        ),
    ],
}

for name, samples in SAMPLES.items():
    REGISTRY[name].samples = samples
