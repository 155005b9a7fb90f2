"""What a primitive is: a pure function of arrays, with one derivative rule per array argument.

A primitive knows nothing of tensors. Called with arrays it is the NumPy function that it was written as; when one of
its arguments has a method `__apply_primitive__`, that argument is asked to make the call instead. This is how `Tensor`
remembers where it came from, and why this file does not import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

REGISTRY: dict[str, Primitive] = {}


class Primitive:
    """A differentiable function of arrays.

    Attributes:
        name: what it is called in graphs, errors and the registry.
        forward: the function itself, `forward(*arrays, **keywords)`, returning an array, or `(array, *residuals)`.
        arguments: names of the array arguments; the last one repeats when `variadic`.
        defaults: the keywords and their default values.
        rules: one rule per array argument, or None where an argument has no derivative.
        joint_rule: one rule that answers for all arguments at once (fused primitives share work between them).
        composition: the same function built from simpler primitives, or None.
        samples: `samples(rng)` gives a list of `(inputs, keywords)` at which the rules can be checked.
    """

    EXPLAINED = (ValueError, IndexError, TypeError, AttributeError)  # raised again, with the shapes that were met

    def __init__(self, forward: Callable[..., Any], arrange: Callable[..., Any] | None = None) -> None:
        self.name = forward.__name__
        if not self.name.isidentifier():
            raise ValueError(f"a primitive needs a name: write it with def, got {self.name!r}")
        self.__doc__ = forward.__doc__
        self.forward = forward
        self.arrange = arrange
        parameters = inspect.signature(forward).parameters.values()
        for p in parameters:
            if p.kind is p.VAR_KEYWORD or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None)):
                raise TypeError(
                    f"{self.name}: {p} is neither an array, which is positional and at most optional with the default "
                    f"None, nor a keyword, which comes after *"
                )
        self.arguments = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.required = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
        self.keywords = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        self.keywords_known = frozenset(self.keywords)
        self.defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
        self.rules: tuple[Callable[..., Any] | None, ...] | None = None
        self.underivable: frozenset[int] = frozenset()  # the arguments whose rule is None
        self.each_rule: Callable[..., Any] | None = None
        self.joint_rule: Callable[..., Any] | None = None
        self.composition: Callable[..., Any] | None = None
        self.samples: Callable[[np.random.Generator], list[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None

    def vjps(self, *rules: Callable[..., Any] | None) -> Primitive:
        """Give one rule per array argument: `rule(g, y, *residuals, *inputs, **keywords) -> gradient of that argument`.

        `g` is the gradient of the output `y`. Write a rule with primitives and with what arrays and tensors share, and
        it serves second derivatives too. It may return the broadcast shape: the engine sums it back. None says that an
        argument has no derivative.
        """
        if self.variadic or len(rules) != len(self.arguments):
            wanted = (
                "one rule through vjp_each" if self.variadic else f"{len(self.arguments)} rules, for {self.arguments}"
            )
            raise TypeError(f"primitive {self.name!r} wants {wanted}, got {len(rules)}")
        self.rules = rules
        self.underivable = frozenset(i for i, rule in enumerate(rules) if rule is None)
        return self

    def vjp_each(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give a variadic primitive its one rule, `rule(i, g, y, *inputs, **keywords)`, told the argument."""
        self.each_rule = rule
        return rule

    def vjp_joint(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give one rule for all: `rule(g, y, *residuals, *inputs, **keywords) -> a gradient or None for each`.

        It sees arrays only; a primitive that has one names its `composition`, which carries the second derivative.
        """
        self.joint_rule = rule
        return rule

    def composed_of(self, composition: Callable[..., Any]) -> Callable[..., Any]:
        """Name the same function in simpler primitives: the oracle of the fused one, and its second derivative."""
        self.composition = composition
        return composition

    def rule(self, i: int) -> Callable[..., Any] | None:
        """The rule of argument `i`, or None where the argument has no derivative."""
        if self.each_rule is not None:
            return partial(self.each_rule, i)
        return self.rules[i] if self.rules is not None else None

    def argument(self, i: int) -> str:
        """The name of array argument `i`, for messages."""
        return f"{self.arguments[-1]}[{i}]" if self.variadic else self.arguments[i]

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        if self.arrange is not None:
            inputs, keywords = self.arrange(inputs, keywords)
        if keywords and not self.variadic and not self.keywords_known.issuperset(keywords):
            inputs, keywords = self._by_position(inputs, keywords)
        if self.defaults:
            keywords = {**self.defaults, **keywords}
        if len(inputs) < len(self.arguments) and not self.variadic:
            inputs = self._complete(inputs)
        for x in inputs:
            apply = getattr(x, "__apply_primitive__", None)
            if apply is not None:
                return apply(self, inputs, keywords)
        arrays = [as_operand(x) for x in inputs]
        try:
            return self.value_and_residuals(self.forward(*arrays, **keywords))[0]
        except self.EXPLAINED as error:
            raise self.explained(error, arrays, keywords) from error

    @staticmethod
    def value_and_residuals(result: Any) -> tuple[np.ndarray, tuple[Any, ...]]:
        """What a forward returned: the value, always an array, and what its rules want to see again."""
        value, *residuals = result if result.__class__ is tuple else (result,)
        return np.asarray(value), tuple(residuals)

    def _by_position(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Array arguments that were given by name, put into their places."""
        named = {name: x for name, x in keywords.items() if name not in self.keywords_known}
        unknown = [name for name in named if name not in self.arguments[len(inputs) :]]
        if unknown:
            shapes = ", ".join(str(np.shape(x)) for x in inputs)
            raise TypeError(f"{self!r} has no argument {unknown[0]!r} to give besides arrays of shapes {shapes}")
        missing = self.arguments[len(inputs) :]
        last = max(missing.index(name) for name in named)
        placed = tuple(named.get(name) for name in missing[: last + 1])
        return inputs + placed, {name: x for name, x in keywords.items() if name in self.keywords_known}

    def _complete(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fill optional array arguments with None, so that every rule sees every argument."""
        if len(inputs) < self.required:
            missing = self.arguments[len(inputs) : self.required]
            raise TypeError(f"{self.name}: expected the arrays {self.arguments}, got {len(inputs)}; missing {missing}")
        return inputs + (None,) * (len(self.arguments) - len(inputs))

    def explained(self, error: Exception, arrays: Iterable[Any], keywords: dict[str, Any]) -> Exception:
        """The same error, saying which primitive met which shapes."""
        shapes = ", ".join(str(x.shape) if isinstance(x, np.ndarray) else repr(x) for x in arrays if x is not None)
        options = "".join(f", {k}={v!r}" for k, v in keywords.items() if not isinstance(v, np.ndarray))
        kinds = (np.exceptions.AxisError, ValueError, IndexError)
        kind = next((k for k in kinds if isinstance(error, k)), TypeError)
        return kind(f"{self.name} of {shapes}{options}: {error}")

    def __repr__(self) -> str:
        return f"<primitive {self.name}({', '.join(self.arguments + self.keywords)})>"


def as_operand(x: Any) -> Any:
    """An operand as forwards and rules see it: an array, a Python number, or None.

    NumPy's scalars become Python numbers, so that they are weak: a float32 array times `np.float64(2)` stays float32.
    A list, of ints too, becomes a float32 array, as in `Tensor`.
    """
    if x.__class__ is np.ndarray or x is None:
        return x
    if isinstance(x, np.generic):
        return x.item()
    return x if isinstance(x, (int, float)) else from_data(x)


def from_data(data: Any) -> np.ndarray:
    """Data as an array: an array keeps its dtype, Python numbers and lists become float32 (of booleans: bool)."""
    keeps = isinstance(data, (np.ndarray, np.generic)) or hasattr(data, "__array_interface__")
    array = np.asarray(data)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, got dtype {array.dtype} from {type(data).__name__}")
    return array if keeps or array.dtype.kind == "b" else array.astype(np.float32)


def primitive(forward: Callable[..., Any] | None = None, *, arrange: Callable[..., Any] | None = None) -> Any:
    """Make a primitive of a function of arrays and enter it into the registry.

    Array arguments are positional (an optional one has the default None), everything else is keyword-only. `arrange`
    may turn a friendlier call into that form: `arrange(inputs, keywords) -> (inputs, keywords)`.

    Example:
        >>> @primitive
        ... def cube(x):
        ...     return x * x * x
        >>> cube.vjps(lambda g, y, x: 3 * g * x * x)
        <primitive cube(x)>
    """
    if forward is None:
        return lambda function: primitive(function, arrange=arrange)
    op = Primitive(forward, arrange)
    known = REGISTRY.get(op.name)
    if known is not None and known.forward.__module__ != forward.__module__:
        raise ValueError(
            f"a primitive {op.name!r} exists already, from {known.forward.__module__}; choose another name"
        )
    REGISTRY[op.name] = op
    return op
