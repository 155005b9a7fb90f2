"""What is being recorded: no_grad, enable_grad, record and scopes, per thread and per task."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast, overload

__all__ = ["SCOPE", "STATE", "State", "enable_grad", "enter", "is_grad_enabled", "leave", "no_grad", "record", "scope"]


F = TypeVar("F", bound=Callable[..., Any])


class State(NamedTuple):
    """Whether gradients are on, and whether nodes are recorded even if nothing needs a gradient.

    `observer` is None, or has `.applied(op, inputs, out)`, called after each operation on tensors, `.backward(root)`
    and `.returned(root)`, called before and after each backward pass. `evaluating` holds the ids of the modules that
    are in eval mode here, whatever mode they have elsewhere.
    """

    grad: bool = True
    record: bool = False
    observer: Any = None
    evaluating: frozenset[int] = frozenset()
    entered: tuple[tuple[int, State], ...] = ()  # the context managers that are open, and the state before each

    @property
    def is_silent(self) -> bool:
        """Whether operations leave no trace but their results: no node is made, and nobody observes them."""
        return not (self.grad or self.record or self.observer is not None)


STATE: ContextVar[State] = ContextVar("tinygrad_mha", default=State())  # noqa: B039 (a State is immutable)
SCOPE: ContextVar[tuple[Any, ...]] = ContextVar("scope", default=())  # of the nodes that are made now


def enter(owner: object, **change: Any) -> None:
    """Change the state until `leave(owner)`. Both act on this thread and task only, so `owner` may be shared."""
    before = STATE.get()
    STATE.set(before._replace(**change, entered=(*before.entered, (id(owner), before))))


def leave(owner: object, *fields: str) -> None:
    """Restore these fields, and no others: a mode that was opened inside may still be open."""
    state = STATE.get()
    i = max((i for i, (opened, _) in enumerate(state.entered) if opened == id(owner)), default=None)
    if i is not None:  # None: a generator that was opened in one task is closed in another
        before = state.entered[i][1]
        entered = state.entered[:i] + state.entered[i + 1 :]
        STATE.set(state._replace(entered=entered, **{field: getattr(before, field) for field in fields}))


class Mode:
    """A change of `State`, as a context manager and as a decorator of functions, coroutines and generators.

    A decorated generator is in the mode while it runs; between two of its steps the caller keeps its own mode.
    """

    change: ClassVar[dict[str, Any]]

    @overload
    def __new__(cls) -> Self: ...

    @overload
    def __new__(cls, function: F) -> F: ...  # type: ignore[misc]  # as a decorator

    def __new__(cls, function: Any = None) -> Any:
        mode = super().__new__(cls)
        return mode if function is None else mode(function)

    def __enter__(self) -> None:
        enter(self, **self.change)

    def __exit__(self, *exception: object) -> None:
        leave(self, *self.change)

    def __call__(self, function: F) -> F:
        mode = type(self)
        if inspect.isclass(function) or not callable(function):
            raise TypeError(f"{mode.__name__} decorates functions, got {function!r}")
        if inspect.isasyncgenfunction(function):
            raise TypeError(f"{mode.__name__} does not decorate asynchronous generators: use `with` inside of them")

        def call(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return function(*args, **kwargs)

        def run_steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return (yield from _Stepped(call(*args, **kwargs), mode))

        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return await function(*args, **kwargs)

        is_generator, is_coroutine = inspect.isgeneratorfunction(function), inspect.iscoroutinefunction(function)
        wrapper: Any = run_steps if is_generator else run_coroutine if is_coroutine else call
        return cast(F, functools.wraps(function)(wrapper))


class _Stepped:
    """A generator that is resumed inside a mode; `yield from` forwards send, throw and close to it."""

    def __init__(self, generator: Any, mode: type[Mode]) -> None:
        self.generator = generator
        self.mode = mode

    def __iter__(self) -> _Stepped:
        return self

    def __next__(self) -> Any:
        with self.mode():
            return next(self.generator)

    def send(self, value: Any) -> Any:
        with self.mode():
            return self.generator.send(value)

    def throw(self, *error: Any) -> Any:
        with self.mode():
            return self.generator.throw(*error)

    def close(self) -> None:
        with self.mode():
            self.generator.close()


class no_grad(Mode):  # noqa: N801 (used like a function)
    """Results computed inside need no gradient: `with no_grad():` or `@no_grad`."""

    change: ClassVar = {"grad": False}


class enable_grad(Mode):  # noqa: N801
    """Gradients are on inside, also within `no_grad`: `with enable_grad():` or `@enable_grad`."""

    change: ClassVar = {"grad": True}


class record(Mode):  # noqa: N801
    """Nodes are recorded even if nothing needs a gradient, so that inference can be drawn: `with record():`."""

    change: ClassVar = {"record": True}


def is_grad_enabled() -> bool:
    """Whether operations on values that need a gradient are being recorded, in this thread and task."""
    return STATE.get().grad


class scope:  # noqa: N801 (used like a function)
    """Nodes made inside have `entry` as the last part of their scope: `with scope(entry):`."""

    __slots__ = ("before", "entry")

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        self.before = SCOPE.get()
        SCOPE.set((*self.before, self.entry))

    def __exit__(self, *exception: object) -> None:
        SCOPE.set(self.before)
