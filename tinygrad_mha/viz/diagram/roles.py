"""What each value is: input, parameter, attention weights, output, gradient.

A leaf that a module owns is a parameter. For other leaves `requires_grad` decides, and the roles that primitives
declare for their arguments: in `x @ w`, x is the data and w the weight, but in `softmax(q @ k.mT) @ v` all three are
data, and so they are if the scores are distances or the softmax is written out. Whether a slice has a name matters
(W_Q1 is a parameter, `w[0]` is not); what the name is does not.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from tinygrad_mha.viz.diagram.frames import Frame
from tinygrad_mha.viz.diagram.picture import Kind
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value

__all__ = ["ELEMENTWISE", "decide_kind", "find_dependents", "is_attention_weights", "weight_role"]

ELEMENTWISE = ("elementwise", "addition")


def decide_kind(run: Run, value: Value, owned: Container[Value], frame_of: dict[Value, Frame]) -> Kind:
    """What a value is. `owned` are the leaves that a module of the run holds."""
    if value.backward and value.gradient_of:
        return "gradient"
    leaf = value
    while leaf.has_kind(*RESHAPING) and leaf.name and len(leaf.sources) == 1:
        leaf = leaf.sources[0]  # a named slice of a parameter, such as W_Q1, is a parameter
    if not value.backward and (leaf in owned or is_parameter(run, leaf, frame_of)):
        return "parameter"
    if value.op is None:
        return "input"
    if value in run.roots:
        return "output"
    return "attention" if is_attention_weights(value, frame_of) else "op"


def is_parameter(run: Run, leaf: Value, frame_of: dict[Value, Frame]) -> bool:
    """Whether a leaf is a parameter, as far as its uses tell.

    It must require grad. A key or value of an attention is an input. A leaf that a primitive takes as its weight or
    bias is a parameter. A leaf that is the data of a product is an input, and so is one that was handed to a living
    module. Of the others, those are parameters that are combined element by element with a value that does not depend
    on them.
    """
    if leaf.op is not None or not leaf.requires_grad:
        return False
    uses = find_uses(run, leaf)
    if any(is_step_of_attention(run, user) for _, user in uses):
        return False
    if any(used is leaf and weight_role(used, user) for used, user in uses):
        return True
    if any(user.has_kind("product", "attention") and user.inputs[0] is used for used, user in uses):
        return False
    if any(weight_role(used, user) for used, user in uses):
        return True
    if all(any(frame.module for frame in frame_of[user].enclosing) for user in run.users[leaf]):
        return False
    dependents = find_dependents(run, leaf)
    return any(user.has_kind(*ELEMENTWISE) and not dependents.issuperset(user.sources) for _, user in uses)


def is_step_of_attention(run: Run, step: Value) -> bool:
    """Whether a step is the scores or the result of softmax(q @ k.mT) @ v, with scales and masks between.

    Scores may be something else than products, such as distances, and weights any numbers that sum to 1.
    """
    is_product = step.has_kind("product")
    if is_product and is_distribution(step.sources[0]):
        return True
    if not is_product and not compares_leaves(step):
        return False
    stack = [step]
    while stack:
        for user in run.users[stack.pop()]:
            if is_distribution(user):
                return any(next_user.has_kind("product") for next_user in run.users[user])
            if not user.has_kind("product") and (not is_product or user.array.shape == step.array.shape):
                stack.append(user)
    return False


def is_distribution(value: Value) -> bool:
    """Whether a value is a softmax, or made element by element and not negative with rows that sum to 1."""
    if value.has_kind("distribution"):
        return True
    x = value.array
    if not value.has_kind(*ELEMENTWISE) or x.ndim < 2 or x.shape[-1] < 2 or not x.size or not x.min() >= 0:
        return False
    return bool(np.allclose(x.sum(axis=-1), 1.0, rtol=0, atol=1e-5))


def compares_leaves(value: Value) -> bool:
    """Whether a value combines two different leaves, which may be reshaped, element by element."""
    return value.has_kind(*ELEMENTWISE) and len({find_leaf(x) for x in value.sources} - {None}) > 1


def find_leaf(value: Value) -> Value | None:
    """The leaf that the value is, or that it rearranges; None if it is computed."""
    while value.has_kind(*RESHAPING) and len(value.sources) == 1:
        value = value.sources[0]
    return value if value.op is None else None


def find_dependents(run: Run, leaf: Value) -> set[Value]:
    """The leaf and all values that depend on it."""
    found, stack = {leaf}, [leaf]
    while stack:
        fresh = set(run.users[stack.pop()]) - found
        found |= fresh
        stack += fresh
    return found


def find_uses(run: Run, leaf: Value) -> list[tuple[Value, Value]]:
    """Pairs (what is used, what is made from it): the leaf or, where that is transposed or sliced, the result."""
    uses, stack = [], [leaf]
    while stack:
        used = stack.pop()
        for user in run.users[used]:
            if user.has_kind(*RESHAPING):
                stack.append(user)
            else:
                uses.append((used, user))
    return uses


def weight_role(used: Value, user: Value) -> str:
    """How an operation takes `used` as a parameter: as "weight" or "bias"; "" if it does not.

    Primitives declare it. Of a product of any arrays, such as `x @ w`, the operands after the first are weights.
    """
    assert user.op is not None
    for i, x in enumerate(user.inputs):
        role = user.op.role(i)
        if x is used and role in ("weight", "bias"):
            return role
        if x is used and i and user.has_kind("product"):
            return "weight"
    return ""


def is_attention_weights(value: Value, frame_of: dict[Value, Frame]) -> bool:
    """Whether a value is the softmax of a module, or of a primitive, that says that it computes attention."""
    if not value.has_kind("distribution"):
        return False
    if value.rule_of is not None and value.rule_of.kind == "attention":
        return True
    if value not in frame_of:  # a step of the backward pass
        return False
    frames = (frame for frame in frame_of[value].enclosing if frame.class_name or frame.scope.is_attention)
    return next((frame.scope.is_attention for frame in frames), False)
