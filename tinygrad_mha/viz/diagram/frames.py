"""The tree of frames of a run, one for each module, and for other entries that were pushed with `modes.scope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tinygrad_mha.nn.module import Module, Scope

__all__ = ["Frame", "FrameTree", "Pattern", "entry_key", "list_inside", "matches"]

Pattern = str | Callable[[str], bool]


@dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """A module of the run, or another entry that was pushed with `modes.scope`."""

    scope: Scope
    parent: Frame | None
    forward: Frame | None = None  # in the backward pass: the frame whose gradients are in here

    @property
    def name(self) -> str:
        """The name of the module in its parent; "" for the outermost module."""
        return self.scope.name

    @property
    def class_name(self) -> str:
        """The class of a module; "" for other entries."""
        return self.scope.class_name

    @property
    def module(self) -> Module | None:
        """The module; None if it was freed or the entry is not a module."""
        return self.scope.module()

    @property
    def path(self) -> str:
        """The names of the enclosing modules and its own: h.0.attn."""
        return ".".join(frame.name for frame in reversed(self.enclosing) if frame.name)

    @property
    def enclosing(self) -> list[Frame]:
        """This frame and all frames around it, inner ones first."""
        frames = [self]
        while frames[-1].parent is not None:
            frames.append(frames[-1].parent)
        return frames


class FrameTree:
    """The frames that were entered so far."""

    def __init__(self) -> None:
        self.root = Frame(Scope(""), None)
        self.children: dict[Frame, list[Frame]] = {self.root: []}
        self._known: dict[Any, Frame] = {}

    def enter(self, parent: Frame, entry: Any, forward: Frame | None = None) -> Frame:
        """The frame of a scope entry, which is added if it is new."""
        key = parent, entry_key(entry)
        if key not in self._known:
            scope = entry if isinstance(entry, Scope) else Scope(str(entry))
            frame = self._known[key] = Frame(scope, parent, forward)
            self.children[parent].append(frame)
            self.children[frame] = []
        return self._known[key]

    def enter_all(self, scope: Sequence[Any]) -> Frame:
        """The frame of a whole scope."""
        frame = self.root
        for entry in scope:
            frame = self.enter(frame, entry)
        return frame


def entry_key(entry: Any) -> tuple[str, int]:
    """What makes two scope entries the same frame: name and module.

    A module has one weak reference as long as that is alive, and it outlives the module. Entries without a module share
    the default of `Scope`.
    """
    return str(getattr(entry, "name", entry)), id(getattr(entry, "module", None))


def list_inside(children: dict[Frame, list[Frame]], frame: Frame) -> list[Frame]:
    """A frame and all frames in it, outer ones first."""
    found, stack = [], [frame]
    while stack:
        found.append(stack.pop())
        stack.extend(reversed(children[found[-1]]))
    return found


def matches(frame: Frame, patterns: Sequence[Pattern]) -> bool:
    """Whether a pattern means this frame: its path from any enclosing module down, its class, or a predicate."""
    if frame.parent is None or not patterns:
        return False
    path = frame.path
    paths = [path, *(path[len(outer.path) + 1 :] for outer in frame.enclosing[1:-1] if outer.path)]
    return any(
        pattern(path)
        if callable(pattern)
        else pattern == frame.class_name or any(fnmatchcase(p, pattern) for p in paths)
        for pattern in patterns
    )
