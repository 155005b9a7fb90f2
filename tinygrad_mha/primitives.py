"""Primitives: pure functions of arrays, each with one derivative rule per array argument.

A primitive does not depend on Tensor. If all arguments are arrays, a call simply runs the NumPy function. If one has a
method `__apply_primitive__`, as a Tensor has, that method runs the function and records the call in the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

import numpy as np
from numpy import ndarray

from tinygrad_mha.arguments import as_array
from tinygrad_mha.notation import Call, FormulaWriter, write_call
from tinygrad_mha.torch_names import KEYWORDS, unknown_keyword

__all__ = ["KINDS", "REGISTRY", "ROLES", "Primitive", "as_dtype", "as_operand", "from_data", "primitive"]

REGISTRY: dict[str, Primitive[..., Any]] = {}

# What a primitive does. Pictures decide by it what gets a box of its own and what becomes part of a formula.
# Computing kinds make new numbers, arranging kinds only select or move elements. Those that are not obvious:
#     choice: selects elements of its arguments by a condition    mask: sets elements that are not allowed to -inf
#     normalization: of each row to a mean, a variance, a sum     distribution: rows are positive and sum to 1
#     movement: the same elements in another shape, order, dtype  index: a part of an array
#     scatter: the derivative of an index                         lookup: rows of a table
#     composite: several primitives in one node; its composition is drawn and counted in its place
Computing = Literal["function", "elementwise", "addition", "activation", "reduction", "normalization", "distribution"]
Arranging = Literal["choice", "mask", "movement", "index", "scatter", "join", "lookup"]
Kind = Literal[Computing, Arranging, "product", "attention", "loss", "composite"]
KINDS: tuple[str, ...] = get_args(Kind)

# What an array argument is. In pictures, a plain array in the role "operand" or "mask" is a constant in the formula; a
# plain array in another role gets a box. A leaf that is used as a weight or bias is a parameter.
Role = Literal["operand", "data", "weight", "bias", "ids", "targets", "mask"]
ROLES: tuple[str, ...] = get_args(Role)


class Traced(Protocol):
    """A type that records the primitives applied to it, such as Tensor."""

    @staticmethod
    def __apply_primitive__(op: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T", bound=Traced)


class Primitive(Generic[P, R_co]):
    """A differentiable function of arrays.

    For type checkers it is `Primitive[P, R]`: P are the parameters after the first array, R is the annotated result. If
    the first argument of a call is a Tensor, the result is typed as a Tensor, else as R. A function of several arrays
    is annotated `-> Any`, because a later argument may be a Tensor.

    Attributes:
        name: its name in graphs, errors and the registry.
        forward: the function, `forward(*arrays, **keywords)`, returning an array or `(array, *residuals)`.
        arrange: `arrange(inputs, keywords) -> (inputs, keywords)` converts other ways to call it to this one, or None.
        arguments: names of the array arguments; the last one repeats if `variadic`.
        defaults: the keywords that have a default, and their default values.
        rules: one derivative rule per array argument, or None for an argument without derivative.
        joint_rule: one rule that returns the gradients of all arguments, for fused primitives.
        composition: the same function built from simpler primitives, or None.
        samples: `samples(rng)` returns a list of `(inputs, keywords)` at which the rules are checked.
        kind: what it does, one of KINDS.
        roles: what each array argument is, each one of ROLES.
        label: its name in formulas.
        formula: writes one call as a formula, see `notation`.
        sentence: describes one call in words, where all operands have names; or None.
    """

    EXPLAINED = (ValueError, IndexError, TypeError, AttributeError)  # re-raised with the shapes of the operands

    def __init__(
        self,
        forward: Callable[Concatenate[Any, P], R_co],
        arrange: Callable[..., Any] | None = None,
        kind: Kind = "function",
        roles: Sequence[Role] = (),
        label: str | None = None,
        formula: FormulaWriter = write_call,
        sentence: Callable[[Call], str] | None = None,
    ) -> None:
        self.name = forward.__name__
        if not self.name.isidentifier():
            raise ValueError(f"a primitive needs a name: write it with def, got {self.name!r}")
        self.__doc__ = forward.__doc__
        self.forward: Callable[..., Any] = forward
        self.arrange = arrange
        parameters = inspect.signature(forward).parameters.values()
        for p in parameters:
            if p.kind is p.VAR_KEYWORD or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None)):
                raise TypeError(
                    f"{self.name}: expected array arguments (positional; optional ones have the default None) and "
                    f"options after *, got {p}; if that is an option, put it after *"
                )
        self.arguments = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.required = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
        self.keywords = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        self.keywords_known = frozenset(self.keywords)
        self.defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
        self.rules: tuple[Callable[..., Any] | None, ...] | None = None
        self.without_rule: frozenset[int] = frozenset()  # the arguments whose rule is None
        self.each_rule: Callable[..., Any] | None = None
        self.joint_rule: Callable[..., Any] | None = None
        self.composition: Callable[..., Any] | None = None
        self.samples: Callable[[np.random.Generator], list[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None
        self.kind = kind
        self.roles: tuple[str, ...] = tuple(roles) or ("operand",) * len(self.arguments)
        self.label = label or self.name
        self.formula = formula
        self.sentence = sentence
        if kind not in KINDS:
            raise ValueError(f"{self.name}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if len(self.roles) != len(self.arguments) or not set(ROLES).issuperset(self.roles):
            raise ValueError(f"{self.name}: roles must hold one of {ROLES} for each of {self.arguments}, got {roles!r}")

    def vjps(self, *rules: Callable[..., Any] | None) -> Primitive[P, R_co]:
        """Set one rule per array argument: `rule(g, y, *residuals, *inputs, **keywords) -> gradient of that argument`.

        `g` is the gradient of the output `y`. A rule written with primitives and with what arrays and Tensors share
        also serves second derivatives. It may return the broadcast shape; the engine sums it to the argument's shape.
        None means that the argument has no derivative.
        """
        if self.variadic or len(rules) != len(self.arguments):
            expected = "one rule with vjp_each" if self.variadic else f"{len(self.arguments)} rules: {self.arguments}"
            raise TypeError(f"primitive {self.name!r} expects {expected}, got {len(rules)}")
        self.rules = rules
        self.without_rule = frozenset(i for i, rule in enumerate(rules) if rule is None)
        return self

    def vjp_each(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule of a variadic primitive: `rule(i, g, y, *inputs, **keywords) -> gradient of input i`."""
        self.each_rule = rule
        return rule

    def vjp_joint(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set one rule for all arguments: `rule(g, y, *residuals, *inputs, **keywords) -> a gradient or None for each`.

        It is called with arrays only. Second derivatives go through the `composition`, which it therefore needs.
        """
        self.joint_rule = rule
        return rule

    def composed_of(self, composition: Callable[..., Any]) -> Callable[..., Any]:
        """Set the same function in simpler primitives. Tests compare the two; second derivatives go through it."""
        self.composition = composition
        return composition

    def rule(self, i: int) -> Callable[..., Any] | None:
        """The rule of argument `i`, or None if the argument has no derivative."""
        if self.each_rule is not None:
            return partial(self.each_rule, i)
        return self.rules[i] if self.rules is not None else None

    def argument_name(self, i: int) -> str:
        """The name of array argument `i`, for messages."""
        return f"{self.arguments[-1]}[{i}]" if self.variadic else self.arguments[i]

    def role(self, i: int) -> str:
        """What array argument `i` is, one of ROLES."""
        return self.roles[-1] if self.variadic else self.roles[i]

    @overload
    def __call__(self, x: T | Sequence[T], /, *inputs: P.args, **keywords: P.kwargs) -> T: ...

    @overload
    def __call__(self, x: Any, /, *inputs: P.args, **keywords: P.kwargs) -> R_co: ...

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:  # type: ignore[misc]  # P cannot describe this
        if self.arrange is not None:
            inputs, keywords = self.arrange(inputs, keywords)
        if keywords and not self.keywords_known.issuperset(keywords):
            if self.variadic:
                raise unknown_keyword(self.name, [name for name in keywords if name not in self.keywords_known])
            inputs, keywords = self._by_position(inputs, keywords)
        are_arrays = True
        for x in inputs:
            if x is None or (x.__class__ is ndarray and x.dtype.isnative):
                continue
            if hasattr(x, "__apply_primitive__"):
                return x.__apply_primitive__(self, *self._fill_in(inputs, keywords))
            are_arrays = False
        if are_arrays and len(inputs) >= self.required:  # what is missing are defaults of the function
            return self.compute(inputs, keywords)
        inputs, keywords = self._fill_in(inputs, keywords)
        return self.compute([as_operand(x, inputs) for x in inputs], keywords)

    def compute(self, arrays: Sequence[Any], keywords: dict[str, Any]) -> np.ndarray:
        """The result for arrays and numbers, without residuals. An error gets the shapes of the operands."""
        try:
            value = self.forward(*arrays, **keywords)
        except self.EXPLAINED as error:
            raise self.explain(error, arrays, {**self.defaults, **keywords}) from error
        if value.__class__ is tuple and value[0].__class__ is ndarray:  # residuals are not wanted
            value = value[0]
        return value if value.__class__ is ndarray else self.value_and_residuals(value)[0]

    def value_and_residuals(self, result: Any) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Split the result of a forward into the value, always an array, and the residuals for its rules."""
        value, *residuals = result if result.__class__ is tuple else (result,)
        array = np.asarray(value)
        if array.dtype.kind not in "fiubc":
            raise TypeError(f"primitive {self.name!r} must return an array of numbers, got {type(value).__name__}")
        return array, tuple(residuals)

    def _by_position(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move array arguments that were given by name to their positions; optional ones that are missing are None."""
        named = {name: x for name, x in keywords.items() if name not in self.keywords_known}
        free = self.arguments[len(inputs) :]
        unknown = [name for name in named if name not in free]
        if unknown:
            if unknown[0] in KEYWORDS:
                raise unknown_keyword(self.name, unknown)
            shapes = ", ".join(str(np.shape(x)) for x in inputs)
            raise TypeError(
                f"{self.name} has no argument {unknown[0]!r}, or it is one of the arrays given by position (shapes "
                f"{shapes}); the arguments are {', '.join(self.arguments + self.keywords)}"
            )
        absent = [name for name in self.arguments[len(inputs) : self.required] if name not in named]
        if absent:
            raise TypeError(f"{self.name}: expected the arrays {self.arguments}; missing {tuple(absent)}")
        placed = tuple(named.get(name) for name in free)
        return inputs + placed, {name: x for name, x in keywords.items() if name in self.keywords_known}

    def _fill_in(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add None for optional array arguments that are missing, so that every rule gets every argument; defaults."""
        if self.defaults and len(keywords) < len(self.keywords):
            keywords = {**self.defaults, **keywords}
        if len(inputs) < self.required:
            missing = self.arguments[len(inputs) : self.required]
            raise TypeError(f"{self.name}: expected the arrays {self.arguments}, got {len(inputs)}; missing {missing}")
        if len(inputs) < len(self.arguments) and not self.variadic:
            inputs += (None,) * (len(self.arguments) - len(inputs))
        return inputs, keywords

    def explain(self, error: Exception, arrays: Iterable[Any], keywords: dict[str, Any]) -> Exception:
        """The same error with the name of the primitive, the shapes of its operands and its options."""
        shapes = ", ".join(str(x.shape) if isinstance(x, np.ndarray) else repr(x) for x in arrays if x is not None)
        options = "".join(f", {k}={v!r}" for k, v in keywords.items() if not isinstance(v, np.ndarray))
        classes = (np.exceptions.AxisError, ValueError, IndexError)
        error_class = next((c for c in classes if isinstance(error, c)), TypeError)
        return error_class(f"{self.name} of {shapes}{options}: {error}")

    def __reduce__(self) -> tuple[Any, ...]:  # for copy and pickle: there is one object of each name
        return look_up, (self.name,)

    def __repr__(self) -> str:
        return f"<primitive {self.name}({', '.join(self.arguments + self.keywords)})>"


def look_up(name: str) -> Primitive[..., Any]:
    """The primitive of a name, for unpickling."""
    if name not in REGISTRY:
        raise LookupError(f"no primitive {name!r} is registered: import the module that defines it first")
    return REGISTRY[name]


def as_operand(x: Any, beside: Iterable[Any] = ()) -> Any:
    """Convert an operand to what forwards and rules accept: an array, a Python number, or None.

    NumPy scalars become Python numbers, which promote no array: a float32 array times `np.float64(2)` stays float32.
    A list takes the dtype of the arrays and tensors in `beside`, the operands of the same call; else it becomes
    float32, as in `Tensor`.
    """
    if x.__class__ is ndarray:
        return x if x.dtype.isnative else from_data(x)
    if x is None:
        return x
    if isinstance(x, np.generic):
        return x.item()
    return x if isinstance(x, (int, float)) else from_data(x, beside=beside)


def from_data(data: Any, dtype: Any = None, beside: Iterable[Any] = ()) -> np.ndarray:
    """Convert data to an array, in the byte order of this machine.

    What has a dtype (arrays of any library, buffers, lists of arrays) keeps it. Python numbers and lists of them are
    converted to `dtype` at once, without rounding in between. Without `dtype`, booleans stay bool, and other numbers
    take the floating dtype of the operands `beside`; integers beside integers take theirs; else they become float32.

    Raises:
        TypeError: the data are not real numbers, or are masked.
    """
    parts = data if isinstance(data, (list, tuple)) else [data]
    if any(isinstance(x, np.ma.MaskedArray) for x in parts):
        raise TypeError(
            "a masked array would lose its mask: use data.filled(value), or tg.ops.where(mask, value, data.data)"
        )
    array = as_array(data)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, got dtype {array.dtype} from {type(data).__name__}")
    keeps_dtype = has_dtype(data)
    if dtype is not None:
        dtype = as_dtype(dtype)
    elif keeps_dtype or array.dtype.kind == "b":
        dtype = array.dtype.newbyteorder("=")
    else:
        dtype = dtype_beside(beside, array.dtype)
    # From the list itself: large integers and Python floats go to the dtype in one rounding.
    return array.astype(dtype, copy=False) if keeps_dtype else np.asarray(data, dtype)


def has_dtype(data: Any) -> bool:
    """Whether `data` states a dtype: an array, a scalar of NumPy, a buffer, or a list that holds an array."""
    if isinstance(data, (list, tuple)):
        return any(
            has_dtype(x) if isinstance(x, (list, tuple)) else hasattr(x, "__array__") and not isinstance(x, np.generic)
            for x in data
        )
    if hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
        return True
    try:
        memoryview(data)
    except TypeError:
        return False
    return True


def dtype_beside(operands: Iterable[Any], own: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a list of numbers of dtype `own` beside other operands; see `from_data`."""
    others = [np.dtype(x.dtype) for x in operands if isinstance(x, ndarray) or hasattr(x, "__apply_primitive__")]
    floating = [dtype for dtype in others if dtype.kind == "f"]
    integers = [dtype for dtype in others if dtype.kind in "iu"]
    if floating:
        return np.result_type(*floating).newbyteorder("=")
    if integers:
        return np.result_type(*integers).newbyteorder("=") if own.kind in "iu" else own
    return np.dtype(np.float32)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype of real numbers or booleans, in the byte order of this machine; TypeError for others."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "fiub":
        raise TypeError(f"expected a dtype of real numbers or booleans, got {dtype}")
    return dtype.newbyteorder("=")


@overload
def primitive(forward: Callable[Concatenate[Any, P], R_co]) -> Primitive[P, R_co]: ...


@overload
def primitive(
    *,
    kind: Kind = ...,
    roles: Sequence[Role] = ...,
    label: str = ...,
    formula: FormulaWriter = ...,
    sentence: Callable[[Call], str] = ...,
    arrange: Callable[..., Any] = ...,
) -> Callable[[Callable[Concatenate[Any, P], R_co]], Primitive[P, R_co]]: ...


def primitive(forward: Any = None, **facts: Any) -> Any:
    """Make a primitive of a function of arrays and enter it into the registry.

    Array arguments are positional (an optional one has the default None), everything else is keyword-only.

    Args:
        facts: `kind`, `roles`, `label`, `formula` and `sentence`, see `Primitive`: how pictures show it. `arrange`
            accepts other ways to call it: `arrange(inputs, keywords) -> (inputs, keywords)`.

    Example:
        >>> @primitive
        ... def cube(x):
        ...     return x * x * x
        >>> cube.vjps(lambda g, y, x: 3 * g * x * x)
        <primitive cube(x)>
    """
    if forward is None:
        return lambda function: primitive(function, **facts)
    op: Primitive[..., Any] = Primitive(forward, **facts)
    known = REGISTRY.get(op.name)
    if known is not None and known.forward.__module__ != forward.__module__:
        raise ValueError(
            f"a primitive {op.name!r} exists already, from {known.forward.__module__}; choose another name"
        )
    REGISTRY[op.name] = op
    return op
