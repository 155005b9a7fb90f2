"""Tensor: an array that remembers how it was made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinygrad_mha import engine, ops
from tinygrad_mha.engine import Node, WriteTime
from tinygrad_mha.modes import STATE
from tinygrad_mha.primitives import Primitive, as_operand, from_data


class Tensor:
    """A NumPy array, the gradient that reached it, and the operation that made it.

    Args:
        data: an array (copied, dtype kept), or numbers and nested lists of them (float32; booleans stay boolean).
        requires_grad: whether `backward` shall leave a gradient here; floating dtypes only.
        dtype: the dtype to convert to.
        name: what to call it in graphs and messages.

    Attributes:
        data: the values. Of a leaf: the array itself; assigning copies into it, and writing through it element by
            element is seen by nobody, so use `assign_`. Of an intermediate: a read-only view.
        grad: None, or an array of the tensor's own shape and dtype, shared with nothing.
        node: None for a leaf, else how it was made: `.op`, `.inputs`, `.kwargs`, `.scope`.

    Example:
        >>> x = Tensor([1.0, 2.0], requires_grad=True, name="x")
        >>> (x * x).sum().backward()
        >>> x.grad
        array([2., 4.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_data", "_needs_grad", "_written", "grad", "name", "node")

    _data: np.ndarray
    _needs_grad: bool
    _written: WriteTime | None
    grad: np.ndarray | None
    name: str | None
    node: Node | None

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None, name: str | None = None) -> None:
        if isinstance(data, Tensor):
            if data.requires_grad:
                raise TypeError(
                    "a Tensor from a Tensor that needs a gradient would cut the graph: use x.detach() or x.astype()"
                )
            data = data._data
        elif isinstance(data, (list, tuple)) and _holds_tensors(data):
            raise TypeError(
                "a list of Tensors is not data: join them with tg.ops.stack(...), which keeps their gradients"
            )
        array = from_data(data)
        self._data = np.array(array, dtype=array.dtype if dtype is None else dtype, order="C", subok=False)
        self.grad = None
        self.node = None
        self.name = name
        self._written = None
        self._needs_grad = False
        self.requires_grad = requires_grad

    # ---------------------------------------------------------------------------------------------------- attributes

    @property
    def data(self) -> np.ndarray:
        return self._data if self.node is None else _read_only(self._data)

    @data.setter
    def data(self, array: Any) -> None:
        self.assign_(array)

    @property
    def requires_grad(self) -> bool:
        return self._needs_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if wanted and self._data.dtype.kind != "f":
            raise TypeError(f"only floating tensors have gradients, got {self._data.dtype}: use x.astype(np.float32)")
        if self.node is not None and wanted != self._needs_grad:
            raise ValueError("this tensor was computed, its inputs decide whether it needs a gradient: use .detach()")
        self._needs_grad = bool(wanted)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._data.dtype

    @property
    def T(self) -> Tensor:  # noqa: N802 (NumPy's name)
        """All axes reversed."""
        return ops.transpose(self)

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The last two axes exchanged."""
        if self.ndim < 2:
            raise ValueError(f"mT wants two or more axes, got shape {self.shape}")
        axes = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        return apply(ops.transpose, (self,), {"axes": axes})

    # ----------------------------------------------------------------------------------------------------- gradients

    def backward(self, grad: Any = None, leaves_only: bool = False) -> None:
        """Send a gradient back to everything that this tensor was made from.

        Leaves add it to their `.grad`; intermediates overwrite theirs, which stays readable, unless `leaves_only`. The
        graph lives as long as this tensor: a second call is legal and adds the same once more.

        Args:
            grad: the gradient of this tensor, in its shape; 1 when it has a single element.

        Raises:
            ValueError: nothing to differentiate, no `grad` for several elements, or a `grad` of another shape.
            TypeError: a `grad` that is not made of real numbers, or an operation without a derivative rule.
            RuntimeError: an operand was written to after it had been used.
        """
        if not self._needs_grad:
            raise ValueError(
                f"backward from {self._label()}, which does not require grad: no tensor that it was made from has "
                f"requires_grad=True, or it was made under no_grad"
            )
        engine.backward(self, self._seed(grad), leaves_only)

    def _seed(self, grad: Any) -> np.ndarray:
        if grad is None:
            if self.size != 1:
                raise ValueError(
                    f"backward from shape {self.shape} needs to know the gradient of each of its {self.size} elements: "
                    f"pass grad=, an array of that shape, or make a scalar first"
                )
            return np.ones_like(self._data)
        array = np.asarray(grad._data if isinstance(grad, Tensor) else grad)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"grad must be made of real numbers, got {array.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"grad must have the shape of the tensor, {self.shape}, got {array.shape}")
        return array.astype(self.dtype)

    def zero_grad(self) -> None:
        """Forget the gradient: `.grad` is None again."""
        self.grad = None

    def detach(self) -> Tensor:
        """The same values (and the same memory, read-only if computed) as a leaf that needs no gradient."""
        out = _wrap(self.data)
        out._written = self._written_cell()
        out.name = self.name
        return out

    def assign_(self, array: Any) -> Tensor:
        """Copy new values into a leaf, in its own shape and dtype; graphs that have used the old ones will say so."""
        if self.node is not None:
            raise ValueError(f"{self._label()} was computed; only leaves can be assigned to")
        new = np.asarray(plain(array))
        if new.shape != self.shape:
            raise ValueError(f"assign_ keeps the shape: expected {self.shape}, got {new.shape}")
        if not np.can_cast(new.dtype, self.dtype, "same_kind"):
            raise TypeError(f"assign_ keeps the dtype: {new.dtype} does not fit into {self.dtype}")
        if not self._data.flags.writeable:
            raise ValueError("this tensor is a read-only view (of a broadcast, say): copy it first, Tensor(t.numpy())")
        np.copyto(self._data, new, casting="same_kind")
        self._written_cell().touch()
        return self

    def _written_cell(self) -> WriteTime:
        if self._written is None:
            self._written = WriteTime()
        return self._written

    def named(self, name: str) -> Tensor:
        """Give it a name, for graphs and messages, and return it."""
        self.name = name
        return self

    # ----------------------------------------------------------------------------------------------- out of the graph

    def numpy(self) -> np.ndarray:
        """The values as a read-only array that shares memory with the tensor; `.numpy().copy()` is yours."""
        return _read_only(self._data)

    def item(self) -> float | int | bool:
        """The single element as a Python number."""
        if self.size != 1:
            raise ValueError(f"item() wants one element, got shape {self.shape}")
        return self._data.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._needs_grad:
            raise TypeError(
                "turning a tensor that needs a gradient into an array would cut the graph: use .numpy() or .detach()"
            )
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"only an integer tensor can be an index, got {self.dtype}")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth of {self.size} elements is ambiguous: use .numpy().any() or .all()")
        return bool(self.item())

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def _label(self) -> str:
        made = "leaf" if self.node is None else f"made by {self.node.op.name}"
        return (
            f"a tensor of shape {self.shape} ({self.name!r}, {made})"
            if self.name
            else f"a tensor of shape {self.shape} ({made})"
        )

    def __repr__(self) -> str:
        values = np.array2string(self._data, separator=", ", prefix="Tensor(", threshold=200, precision=4)
        made = f"made by {self.node.op.name}" if self.node else "leaf" if self._needs_grad else "constant"
        name = f", name={self.name!r}" if self.name else ""
        return f"Tensor({values}, shape={self.shape}, {self.dtype}{name}, {made})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self._refuse_to_copy()
        out = Tensor(self._data, requires_grad=self._needs_grad, name=self.name)
        out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse_to_copy()
        return _rebuilt, (self._data, self._needs_grad, self.name, self.grad)

    def _refuse_to_copy(self) -> None:
        if self.node is not None:
            raise TypeError(f"{self._label()} belongs to a graph; copy x.detach() instead")

    # ----------------------------------------------------------------------------------------------------- operators

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Tensor:
        return apply(ops.add, (self, other if other.__class__ is Tensor else self._like(other)))

    def __radd__(self, other: Any) -> Tensor:
        return apply(ops.add, (self._like(other), self))

    def __sub__(self, other: Any) -> Tensor:
        return apply(ops.sub, (self, self._like(other)))

    def __rsub__(self, other: Any) -> Tensor:
        return apply(ops.sub, (self._like(other), self))

    def __mul__(self, other: Any) -> Tensor:
        other = self._like(other)
        return (
            apply(ops.scale, (self,), {"by": other})
            if isinstance(other, (int, float))
            else apply(ops.mul, (self, other))
        )

    def __rmul__(self, other: Any) -> Tensor:
        other = self._like(other)
        return (
            apply(ops.scale, (self,), {"by": other})
            if isinstance(other, (int, float))
            else apply(ops.mul, (other, self))
        )

    def __truediv__(self, other: Any) -> Tensor:
        return apply(ops.div, (self, self._like(other)))

    def __rtruediv__(self, other: Any) -> Tensor:
        return apply(ops.div, (self._like(other), self))

    def __pow__(self, other: Any) -> Tensor:
        return apply(ops.pow, (self, self._like(other)))

    def __rpow__(self, other: Any) -> Tensor:
        return apply(ops.pow, (self._like(other), self))

    def __matmul__(self, other: Any) -> Tensor:
        if other.__class__ is Tensor and self._data.ndim > 1 and other._data.ndim > 1:
            return apply(ops.matmul, (self, other))
        return matmul(self, self._like(other))

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(self._like(other), self)

    def __neg__(self) -> Tensor:
        return apply(ops.neg, (self,))

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index=index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "tensors have no item assignment: use tg.ops.where(mask, new, x), or x.assign_(array) for a leaf"
        )

    # Comparisons have no derivative, so they give plain boolean arrays.

    def __eq__(self, other: Any) -> Any:
        return np.asarray(self._data == plain(other))

    def __ne__(self, other: Any) -> Any:
        return np.asarray(self._data != plain(other))

    def __lt__(self, other: Any) -> Any:
        return np.asarray(self._data < plain(other))

    def __le__(self, other: Any) -> Any:
        return np.asarray(self._data <= plain(other))

    def __gt__(self, other: Any) -> Any:
        return np.asarray(self._data > plain(other))

    def __ge__(self, other: Any) -> Any:
        return np.asarray(self._data >= plain(other))

    def _like(self, other: Any) -> Any:
        """The other operand. Integers and booleans beside a floating tensor take its dtype."""
        if isinstance(other, Tensor):
            return other if other.dtype.kind == "f" or self.dtype.kind != "f" else other.astype(self.dtype)
        other = as_operand(other)
        if isinstance(other, np.ndarray) and other.dtype.kind != "f" and self._data.dtype.kind == "f":
            return from_data(other).astype(self._data.dtype)
        return other

    # ------------------------------------------------------------------------------------------------------- methods

    def astype(self, dtype: Any) -> Tensor:
        """In another dtype. Between floating dtypes the gradient passes; to integers or booleans it ends."""
        if np.dtype(dtype).kind != "f":
            return _wrap(self._data.astype(dtype))
        return self if self.dtype == dtype else ops.cast(self, dtype=np.dtype(dtype))

    def exp(self) -> Tensor:
        return ops.exp(self)

    def log(self) -> Tensor:
        return ops.log(self)

    def sqrt(self) -> Tensor:
        return ops.sqrt(self)

    def tanh(self) -> Tensor:
        return apply(ops.tanh, (self,))

    def sigmoid(self) -> Tensor:
        return ops.sigmoid(self)

    def relu(self) -> Tensor:
        return ops.relu(self)

    def gelu(self, tanh: bool = False) -> Tensor:
        return ops.gelu(self, tanh=tanh)

    def abs(self) -> Tensor:
        return ops.abs(self)

    def clip(self, min: float | None = None, max: float | None = None) -> Tensor:
        return ops.clip(self, min=min, max=max)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return ops.sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return ops.mean(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        return ops.var(self, axis=axis, ddof=ddof, keepdims=keepdims)

    def std(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        return ops.std(self, axis=axis, ddof=ddof, keepdims=keepdims)

    def norm(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return ops.norm(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return ops.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return ops.min(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis: Any = None) -> Any:
        """Where the largest element stands: a plain integer array, it has no derivative."""
        return np.argmax(self._data, axis=axis)

    def argmin(self, axis: Any = None) -> Any:
        """Where the smallest element stands: a plain integer array, it has no derivative."""
        return np.argmin(self._data, axis=axis)

    def softmax(self, axis: int = -1) -> Tensor:
        return apply(ops.softmax, (self,), {"axis": axis})

    def log_softmax(self, axis: int = -1) -> Tensor:
        return ops.log_softmax(self, axis=axis)

    def reshape(self, *shape: Any) -> Tensor:
        return ops.reshape(self, shape=_one_or_many(shape))

    def transpose(self, *axes: Any) -> Tensor:
        return ops.transpose(self, axes=_one_or_many(axes) or None)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        return ops.swapaxes(self, axis1, axis2)

    def broadcast_to(self, *shape: Any) -> Tensor:
        return ops.broadcast_to(self, shape=_one_or_many(shape))

    # --------------------------------------------------------------------------------------------------------- NumPy

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            how = (
                f"np.{ufunc.__name__}.{method}"
                if method != "__call__"
                else f"np.{ufunc.__name__} with {', '.join(kwargs)}="
            )
            raise TypeError(f"{how} does not take tensors: use the methods of Tensor, or .numpy() for plain values")
        if ufunc in COMPARISONS:
            return np.asarray(ufunc(*map(plain, inputs)))
        if ufunc not in UFUNCS:
            raise TypeError(_unmapped(ufunc.__name__, UFUNCS))
        return UFUNCS[ufunc](*inputs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if function not in FUNCTIONS:
            raise TypeError(_unmapped(function.__name__, FUNCTIONS))
        return FUNCTIONS[function](*args, **kwargs)

    @staticmethod
    def __apply_primitive__(op: Primitive, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return apply(op, inputs, kwargs)


# --------------------------------------------------------------------------------------------------------------------
# How an operation becomes a tensor

NOTHING: dict[str, Any] = {}


def apply(op: Primitive, inputs: tuple[Any, ...], kwargs: dict[str, Any] = NOTHING) -> Tensor:
    """Compute `op` on tensors and constants; remember it if gradients are on and one of them needs one."""
    grad_on, recording, scope = STATE.get()
    arrays: list[Any] = []
    bit, bits = 1, 0  # bit i of `bits`: input i needs a gradient
    for x in inputs:
        if isinstance(x, Tensor):
            arrays.append(x._data)
            if x._needs_grad:
                bits |= bit
        else:
            arrays.append(as_operand(x))
        bit += bit
    if kwargs:
        kwargs = _plain_keywords(op, kwargs)
    needed = POSITIONS[bits] if grad_on else ()
    if (needed or recording) and bits + 1 != bit:
        _own_constants(inputs, arrays)
    try:
        value = op.forward(*arrays, **kwargs)
    except Primitive.EXPLAINED as error:
        raise op.explain(error, arrays, kwargs) from error
    residuals: tuple[Any, ...] = ()
    if value.__class__ is not np.ndarray:
        value, residuals = op.value_and_residuals(value)
    out = new_tensor(Tensor)  # what _wrap does, without the call: every operation comes by here
    out._data = value
    out.grad = out.node = out.name = out._written = None
    out._needs_grad = False
    if needed and value.dtype.kind == "f":
        out._needs_grad = True
        if op.underivable:
            _refuse_underivable(op, needed)
        out.node = Node(op, inputs, needed, tuple(arrays), kwargs, residuals, scope)
    elif needed and value.dtype.kind == "c":
        raise TypeError(f"{op.name!r} has a complex result, and gradients are real here: take real and imaginary parts")
    elif recording:
        out.node = Node(op, inputs, (), tuple(arrays), kwargs, residuals, scope)
    if value.base is not None:
        _share_written(out, inputs)
    return out


class _Positions(dict[int, tuple[int, ...]]):
    """The positions of the ones in a number, remembered: most nodes share a handful of these tuples."""

    def __missing__(self, bits: int) -> tuple[int, ...]:
        positions = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
        self[bits] = positions
        return positions


POSITIONS = _Positions()


def _own_constants(inputs: tuple[Any, ...], arrays: list[Any]) -> None:
    """Copy the plain arrays: what their owner does to them later must not reach the backward."""
    for i, array in enumerate(arrays):
        if array.__class__ is np.ndarray and not isinstance(inputs[i], Tensor):
            arrays[i] = array.copy()


def _refuse_underivable(op: Primitive, needed: tuple[int, ...]) -> None:
    for i in needed:
        if i in op.underivable:
            raise TypeError(
                f"argument {op.argument(i)!r} of {op.name!r} has no derivative, so it takes no tensor that needs a "
                f"gradient: use .detach()"
            )


new_tensor = Tensor.__new__


def _wrap(value: np.ndarray) -> Tensor:
    out = new_tensor(Tensor)
    out._data = value
    out.grad = out.node = out.name = out._written = None
    out._needs_grad = False
    return out


def _share_written(out: Tensor, inputs: tuple[Any, ...]) -> None:
    """A result that is a view of an input is written to whenever that input is."""
    owner = out._data.base
    for x in inputs:
        if isinstance(x, Tensor) and (owner is x._data or owner is x._data.base):
            out._written = x._written_cell()
            if x.node is not None:
                out._data.flags.writeable = False  # what was computed is not to be written to, by no alias either


def _plain_keywords(op: Primitive, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords are constants: tensors among them give their arrays, NumPy's scalars become Python numbers."""
    for name, value in kwargs.items():
        if isinstance(value, (Tensor, np.generic)):
            if isinstance(value, Tensor) and value._needs_grad:
                raise TypeError(
                    f"{op.name!r} takes {name}= as a constant, got a tensor that needs a gradient: use .detach()"
                )
            kwargs = {**kwargs, name: as_operand(plain(value))}
    return kwargs


def plain(x: Any) -> Any:
    """The array of a tensor; anything else as it is."""
    return x._data if isinstance(x, Tensor) else x


def as_tensor(x: Any) -> Tensor:
    """A tensor as it is, anything else as a constant tensor."""
    return x if isinstance(x, Tensor) else Tensor(x)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _one_or_many(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """f(2, 3) and f((2, 3)) mean the same."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def _holds_tensors(data: Any) -> bool:
    stack = list(data)
    while stack:
        x = stack.pop()
        if isinstance(x, Tensor):
            return True
        if isinstance(x, (list, tuple)):
            stack.extend(x)
    return False


def _rebuilt(data: np.ndarray, requires_grad: bool, name: str | None, grad: np.ndarray | None) -> Tensor:
    out = Tensor(data, requires_grad=requires_grad, name=name)
    out.grad = grad
    return out


# --------------------------------------------------------------------------------------------------------------------
# NumPy's functions, sent to ours


def matmul(a: Any, b: Any) -> Any:
    """a @ b for vectors, matrices and stacks of them: a vector is a row on the left and a column on the right."""
    n, m = np.ndim(plain(a)), np.ndim(plain(b))
    if n >= 2 and m >= 2:
        return ops.matmul(a, b)
    if n == 0 or m == 0:
        raise ValueError(
            f"@ wants at least one axis on both sides, got shapes {np.shape(plain(a))} and {np.shape(plain(b))}"
        )
    left = ops.reshape(a, shape=(1, a.shape[0])) if n == 1 else a
    right = ops.reshape(b, shape=(b.shape[0], 1)) if m == 1 else b
    product = ops.matmul(left, right)
    shape = product.shape[: -2 + (n > 1)] if m == 1 else (*product.shape[:-2], product.shape[-1])
    return ops.reshape(product, shape=shape)


def _operator(name: str, reflected: str) -> Callable[[Any, Any], Any]:
    def call(a: Any, b: Any) -> Any:
        return getattr(a, name)(b) if isinstance(a, Tensor) else getattr(b, reflected)(a)

    return call


def _in_one_dtype(op: Primitive) -> Callable[[Any, Any], Any]:
    return lambda a, b: op(a, a._like(b)) if isinstance(a, Tensor) else op(b._like(a), b)


def _shape_first(op: Primitive) -> Callable[..., Any]:
    return lambda x, shape, **kwargs: op(
        x, shape=tuple(shape) if isinstance(shape, (tuple, list)) else (shape,), **kwargs
    )


def _joined(op: Primitive) -> Callable[..., Any]:
    return lambda xs, axis=0: op(*xs, axis=axis)


def _reduction(op: Any) -> Callable[..., Any]:
    return lambda x, axis=None, **kwargs: op(x, axis=axis, **kwargs)


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if ord is not None:
        raise TypeError(f"np.linalg.norm of a tensor is the Euclidean one: leave out ord, got {ord!r}")
    return ops.norm(x, axis=axis, keepdims=keepdims)


def _dot(a: Any, b: Any) -> Any:
    if max(np.ndim(plain(a)), np.ndim(plain(b))) > 2:
        raise ValueError("np.dot of more than two axes is no stack of products: use @ for that, else np.einsum")
    return UFUNCS[np.matmul](a, b)


COMPARISONS: tuple[Any, ...] = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
COMPARISONS += (np.isfinite, np.isnan, np.isinf, np.sign)

UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: _operator("__add__", "__radd__"),
    np.subtract: _operator("__sub__", "__rsub__"),
    np.multiply: _operator("__mul__", "__rmul__"),
    np.true_divide: _operator("__truediv__", "__rtruediv__"),
    np.power: _operator("__pow__", "__rpow__"),
    np.float_power: _operator("__pow__", "__rpow__"),
    np.matmul: _operator("__matmul__", "__rmatmul__"),
    np.negative: ops.neg,
    np.positive: lambda x: x,
    np.absolute: ops.abs,
    np.fabs: ops.abs,
    np.exp: ops.exp,
    np.log: ops.log,
    np.sqrt: ops.sqrt,
    np.square: lambda x: x * x,
    np.tanh: ops.tanh,
    np.maximum: _in_one_dtype(ops.maximum),
    np.minimum: _in_one_dtype(ops.minimum),
}

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _reduction(ops.sum),
    np.mean: _reduction(ops.mean),
    np.var: _reduction(ops.var),
    np.std: _reduction(ops.std),
    np.max: _reduction(ops.max),
    np.min: _reduction(ops.min),
    np.linalg.norm: _norm,
    np.argmax: lambda x, axis=None: x.argmax(axis=axis),
    np.argmin: lambda x, axis=None: x.argmin(axis=axis),
    np.where: ops.where,
    np.clip: lambda x, a_min=None, a_max=None, **kwargs: ops.clip(x, **{"min": a_min, "max": a_max, **kwargs}),
    np.reshape: _shape_first(ops.reshape),
    np.broadcast_to: _shape_first(ops.broadcast_to),
    np.transpose: lambda x, axes=None: ops.transpose(x, axes=axes),
    np.matrix_transpose: lambda x: x.mT,
    np.swapaxes: ops.swapaxes,
    np.concatenate: _joined(ops.concat),
    np.stack: _joined(ops.stack),
    np.split: ops.split,
    np.einsum: ops.einsum,
    np.dot: _dot,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
}


def _unmapped(name: str, mapped: dict[Any, Any]) -> str:
    known = ", ".join(sorted(f.__name__ for f in mapped))
    return (
        f"np.{name} is not differentiable here. NumPy functions that take tensors: {known}. "
        f"For plain values use x.numpy(), for a new rule tg.ops.primitive"
    )
