"""Module: something with parameters, found by looking at its attributes."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from tinygrad_mha import modes
from tinygrad_mha.files import CheckpointError, load_arrays, save_arrays
from tinygrad_mha.tensors import Tensor, mark_written

F = TypeVar("F", covariant=True)


class HasForward(Protocol[F]):
    """Anything with a `forward` of type F, so that type checkers know how a module is called."""

    @property
    def forward(self) -> F: ...


class Scope(NamedTuple):
    """The entry that a call of a module adds to the scope of the nodes made inside.

    Everything but `module` outlives the module, so that a picture drawn later still has it.
    """

    name: str  # the module's name in its parent, "" at the top
    kind: str  # its class
    module: weakref.ref[Module]
    notation: str | None = None  # see `Module.notation`
    is_attention: bool = False  # see `Module.is_attention`
    detail: str = ""  # see `Module.detail`


class Module:
    """Parameters, and a `forward` that uses them.

    Whatever an attribute holds is found: tensors, modules, and lists, tuples and dicts of them. A tensor that requires
    grad is a parameter. Tensors that do not (frozen ones, tables) belong to the state, but are not trained. Names are
    attribute paths, `h.0.attn.wq`; what is held twice has the first of its names.

    Example:
        >>> class Affine(Module):
        ...     def __init__(self):
        ...         self.a = Tensor([2.0], requires_grad=True)
        ...     def forward(self, x):
        ...         return self.a * x
        >>> f = Affine()
        >>> f(3.0).data
        array([6.], dtype=float32)
        >>> f
        Affine: 1 parameter
          a  (1,)  1
    """

    notation: ClassVar[str | None] = None
    """How a formula writes the module: "dropout" gives dropout(x)."""
    is_attention: ClassVar[bool] = False
    """Whether the module computes attention, and is drawn so."""
    detail: str = ""
    """What a picture adds to the name of the class: "4 heads"."""

    training: bool = True
    _name: str = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes; calling the module calls this."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    if TYPE_CHECKING:

        @property
        def __call__(self: HasForward[F]) -> F:
            """A module is called with the arguments of its `forward`, and returns what that returns."""

    else:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with self.scope():
                return self.forward(*args, **kwargs)

    def scope(self) -> modes.scope:
        """A context manager: nodes made inside belong to this module, as in a call of it."""
        around = modes.STATE.get().scope
        if not self._name and around:
            # Appended to a list after the list had become an attribute: ask the module that is calling.
            parent = around[-1].module() if isinstance(around[-1], Scope) else None
            found = [name for name, module in parent.named_modules() if module is self] if parent else []
            self._name = found[0] if found else ""
        kind = type(self).__name__
        return modes.scope(Scope(self._name, kind, weakref.ref(self), self.notation, self.is_attention, self.detail))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        for path, found in walk(value, name, enter_modules=False):
            if isinstance(found, Module):
                object.__setattr__(found, "_name", path)

    # ------------------------------------------------------------------------------------------------ what is in here

    def named_modules(self) -> list[tuple[str, Module]]:
        """This module (named "") and all inside, each once, a parent before its children."""
        return [(path, found) for path, found in walk(self) if isinstance(found, Module)]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The tensors to be trained, each once under the first of its names, in the order of their definition."""
        return [(name, tensor) for name, tensor in self._tensors().items() if tensor.requires_grad]

    def parameters(self) -> list[Tensor]:
        """The tensors to be trained, each once."""
        return [tensor for _, tensor in self.named_parameters()]

    def generators(self) -> dict[str, np.random.Generator]:
        """The random generators of dropout and the like, each once: their states belong into a checkpoint."""
        return first_names((path, found) for path, found in walk(self) if isinstance(found, np.random.Generator))

    def count(self) -> int:
        """How many numbers are trained; a tied tensor counts once."""
        return sum(tensor.size for tensor in self.parameters())

    def _tensors(self) -> dict[str, Tensor]:
        return first_names(self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every place where a leaf tensor is held, so a tied one comes several times. Results are no state."""
        return ((path, found) for path, found in walk(self) if isinstance(found, Tensor) and found.node is None)

    # ------------------------------------------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of every tensor, by name."""
        return {name: tensor.numpy().copy() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Copy arrays into the tensors of the same names, in the dtype that each tensor has.

        A tied tensor may be given under any of its names; under several, they must be equal. Nothing is changed when
        something is wrong.

        Returns:
            The names that were missing and those that were unexpected (both empty when `strict`).

        Raises:
            ValueError: names that are missing or unexpected (when `strict`), wrong shapes or kinds of numbers, or tied
                tensors given twice and differently: all of them, in one message.
        """
        tensors = self._tensors()
        first = {id(tensor): name for name, tensor in tensors.items()}
        names = {name: first[id(tensor)] for name, tensor in self._named_tensors()}
        unexpected = [name for name in state if name not in names]
        chosen: dict[str, np.ndarray] = {}
        wrong = []
        for name, owner in names.items():
            if name not in state:
                continue
            array = np.asarray(state[name])
            if owner not in chosen:
                chosen[owner] = array
                wrong += mismatch(name, array, tensors[owner])
            elif not np.array_equal(array, chosen[owner], equal_nan=True):
                wrong.append(f"{name} is tied to {owner}, but differs from it")
        missing = [name for name in tensors if name not in chosen]
        if strict:
            wrong = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected] + wrong
        if wrong:
            raise ValueError(f"this state does not fit {type(self).__name__}: " + "; ".join(wrong))
        for name, array in chosen.items():
            tensors[name].assign_(array)
        return missing, unexpected

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as one safetensors file: whole, or not at all."""
        save_arrays(path, {name: tensor.numpy() for name, tensor in self._tensors().items()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: a damaged file, or one of another module; it names the file and all that is wrong, and
                nothing has been changed.
        """
        arrays = load_arrays(path)
        try:
            self.load_state_dict(arrays)
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error

    # -------------------------------------------------------------------------------------------------------- changes

    def train(self, mode: bool = True) -> Self:
        """Dropout on, here and in everything inside."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Dropout off, here and in everything inside."""
        return self.train(False)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Self]:
        """Eval mode inside of `with model.evaluating():`; afterwards each module has the mode that it had before."""
        before = [(module, module.training) for _, module in self.named_modules()]
        self.eval()
        try:
            yield self
        finally:
            for module, training in before:
                module.training = training

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def astype(self, dtype: Any) -> Self:
        """Hold every floating tensor in another dtype. They stay the same objects; their gradients are forgotten.

        Do it before an optimizer is made, which keeps state in the dtype that it met.
        """
        if np.dtype(dtype).kind != "f":
            raise TypeError(f"a module is converted to a floating dtype, got {np.dtype(dtype)}")
        for tensor in self._tensors().values():
            if tensor.dtype.kind == "f" and tensor.dtype != dtype:
                # The one place where a leaf changes its dtype: ties and optimizers hold the object, so it must stay.
                tensor._data = tensor._data.astype(dtype)
                tensor.grad = None
                mark_written(tensor)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy in which what was tied is tied. Every module has its copy before any is filled: no deep recursion."""
        pairs = [(module, object.__new__(type(module))) for _, module in self.named_modules()]
        for module, twin in pairs:
            memo[id(module)] = twin
        for module, twin in pairs:
            twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(module).items()})
        return memo[id(self)]

    def __repr__(self) -> str:
        tensors = self._tensors()
        first = {id(tensor): name for name, tensor in tensors.items()}
        rows = []
        for name, tensor in self._named_tensors():
            owner = first[id(tensor)]
            note = f"{tensor.size:,}" if tensor.requires_grad else f"({tensor.size:,} constant)"
            rows.append((name, str(tensor.shape), note if owner == name else f"tied to {owner}"))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"  {name:{widths[0]}}  {shape:{widths[1]}}  {note}" for name, shape, note in rows]
        n = self.count()
        return "\n".join([f"{type(self).__name__}: {n:,} parameter{'' if n == 1 else 's'}", *lines])


def walk(root: Any, path: str = "", enter_modules: bool = True) -> Iterator[tuple[str, Any]]:
    """Every module, tensor and generator that `root` holds, with its path, in the order of definition.

    Tensors and generators come as often as they are held; modules and containers are entered once, so references back
    to a parent do no harm. Iterative, so a nest may be as deep as it likes.
    """
    entered: set[int] = set()
    stack = [(path, root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, (Tensor, np.random.Generator)):
            yield path, value
            continue
        if not isinstance(value, (Module, dict, list, tuple)) or id(value) in entered:
            continue
        entered.add(id(value))
        if isinstance(value, Module):
            yield path, value
            if not enter_modules:
                continue
            held: Any = vars(value).items()
        else:
            held = value.items() if isinstance(value, dict) else enumerate(value)
        stack.extend(reversed([(f"{path}.{key}" if path else str(key), inner) for key, inner in held]))


def first_names(pairs: Any) -> dict[str, Any]:
    """{name: object} with every object once, under the first of its names."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, thing in pairs:
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if name in found:
            raise ValueError(f"two different things are called {name!r}: rename the key of a dict or an attribute")
        found[name] = thing
    return found


def mismatch(name: str, array: np.ndarray, tensor: Tensor) -> list[str]:
    """Why `array` cannot become the value of `tensor`: one sentence, or none."""
    if array.shape != tensor.shape:
        turned = " (transposed? weights are stored (in, out))" if array.shape == tensor.shape[::-1] else ""
        return [f"{name} has shape {array.shape}, expected {tensor.shape}{turned}"]
    if array.dtype.kind not in "fiub" or not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
        return [f"{name} has dtype {array.dtype}, which does not fit into {tensor.dtype}"]
    return []
