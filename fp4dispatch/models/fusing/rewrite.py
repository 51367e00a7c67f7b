"""Rewrite a ``forward`` so that it calls one fused layer where it called several layers on one input.

``self.q_proj(x)``, ``self.k_proj(x)`` and ``self.v_proj(x)`` become the parts of one ``self.qkv_proj(x)``::

    (qkv := self.qkv_proj(x).split(self._fused_rows["qkv_proj"], -1))[0]    # then qkv[1], and qkv[2]

In an MLP, ``self.down_proj(self.act_fn(gate) * up)`` around both parts becomes a method of the subclass, which gives
the fused result to the down projection where that is SwiGLU (``parents.FusedProjections._fused_down``)::

    self._fused_down(self.down_proj, self.act_fn, self.gate_up_proj(x), self._fused_rows["gate_up_proj"])

The rewritten function is a method of a subclass. The class of the model is not changed. Why this way: the code holds no
state. So ``torch.compile`` traces it like any other code, without graph breaks; CUDA graphs, other inputs, threads
and exceptions between two calls need no thought; and it follows the ``forward`` of the installed library. The other
way, modules ``q_proj`` and ``k_proj`` that share the result of a call through an attribute, would need all of that.

A ``forward`` is rewritten only if its source shows that the results are the same: each layer is called once, in
one block of statements, on one local name, and no statement between the first call and the last one may change what
the name holds. Writes in place to any name are refused there: it may be of the same memory. All else is refused too,
with :class:`CannotFuse`. Rewritten code keeps file and line numbers, so tracebacks point to the library's source.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from fp4dispatch.models.projections import GATE_UP
from fp4dispatch.models.replacing.source_scan import FOREIGN, definition_of, functions_of, mentioned
from fp4dispatch.models.replacing.weight_reads import NEVER

ROWS = "_fused_rows"
"""Attribute of the module: rows of the shards of each fused layer, by its name."""
DOWN = "_fused_down"
"""Method of the module that computes ``down(act(gate) * up)``."""
_BRANCHES = (
    *(ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Await, ast.Yield, ast.YieldFrom),
)
"""Expressions that may evaluate an operand never, later or several times."""
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
_FUTURE = functools.reduce(
    lambda bits, name: bits | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


class Gated(NamedTuple):
    """Names of a down projection and of the activation of the gate before it."""

    down: str
    act: str


class CannotFuse(Exception):
    """Layers that stay as they are; the text is the reason."""


def fused_forward(
    cls: type[nn.Module], groups: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[FunctionType, tuple[Gated, ...]]:
    """Return the ``forward`` of a class with fused layers, and its layers that may take ``gate_up``.

    Parameters
    ----------
    cls
        The class.
    groups
        Name of each fused layer, and the names of the layers that it replaces, in the order of its rows.

    Raises
    ------
    CannotFuse
        If the source does not show that the results stay the same.
    """
    function, node = _source(cls)
    body = copy.deepcopy(node)
    downs = [_replace_calls(body, cls, fused, shards) for fused, shards in groups]
    ast.fix_missing_locations(body)
    flags = function.__code__.co_flags & _FUTURE
    code = compile(ast.Module([body], []), function.__code__.co_filename, "exec", flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    result: FunctionType = made[node.name]
    inner = inspect.unwrap(result)
    inner.__qualname__ = function.__qualname__
    return result, tuple(gated for gated in downs if gated is not None)


def uses_outside_forward(cls: type[nn.Module], names: Collection[str]) -> str:
    """Return which other method of a class uses its layers of these names; empty if none does."""
    for key, label, function in _methods(cls):
        if key != "forward" and (found := sorted(mentioned(function.__code__).intersection(names))):
            return f"{label} uses {found[0]} too"
    return ""


def uses_of_others(cls: type[nn.Module], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (method, name) where a class uses a layer of another module: ``self.attention.q_proj``."""
    for _, label, function in _methods(cls):
        if mentioned(function.__code__).isdisjoint(names):
            continue
        node = definition_of(function)
        if node is None:
            continue
        me = node.args.args[0].arg if node.args.args else ""
        for part in ast.walk(node):
            mine = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == me
            if isinstance(part, ast.Attribute) and part.attr in names and not mine:
                yield label, part.attr


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, str, FunctionType]]:
    """Yield the methods and properties of a class that may run in a forward: name, label and function."""
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(FOREIGN) or base is object:
            continue
        for key, member in vars(base).items():
            if key not in NEVER:
                for function in functions_of(member):
                    yield key, f"{base.__name__}.{key}", function


def _source(cls: type[nn.Module]) -> tuple[FunctionType, ast.FunctionDef]:
    """Return the function behind ``forward``, and its source."""
    member = inspect.getattr_static(cls, "forward", None)
    function = inspect.unwrap(member) if callable(member) else None
    label = f"{cls.__name__}.forward"
    if not isinstance(function, FunctionType):
        raise CannotFuse(f"{label} is not a Python function")
    node = definition_of(function)
    if node is None:
        raise CannotFuse(f"the source of {label} is not known")
    if function is not member and not node.decorator_list:
        raise CannotFuse(f"{label} was wrapped by other code")
    if function.__closure__ or not node.args.args:
        raise CannotFuse(f"{label} uses names of an enclosing function, or super()")
    return function, node


def _replace_calls(function: ast.FunctionDef, cls: type, fused: str, shards: Sequence[str]) -> Gated | None:
    """Replace the calls of the shards in place. Return the layer around them that may take ``gate_up``, if any."""
    me, label = function.args.args[0].arg, f"{cls.__name__}.forward"
    calls = _calls(function, me, shards, label)
    blocks = {id(block) for block, _, _ in calls.values()}
    arguments = {call.args[0].id for _, _, call in calls.values() if isinstance(call.args[0], ast.Name)}
    if len(blocks) != 1 or len(arguments) != 1:
        raise CannotFuse(f"{label} does not call {', '.join(shards)} on one input, in one block of statements")
    (argument,) = arguments
    block = next(iter(calls.values()))[0]
    steps = [step for _, step, _ in calls.values()]
    between = block[min(steps) : max(steps) + 1]
    why = _may_change(between, argument, {id(call) for _, _, call in calls.values()})
    if why:
        raise CannotFuse(f"{label} {why} between its calls of {', '.join(shards)}")
    whole = f"{me}.{fused}({argument})"
    rows = f"{me}.{ROWS}[{fused!r}]"
    gated = _gated(function, me, [calls[shard][2] for shard in shards]) if tuple(shards) == GATE_UP else None
    if gated is not None:
        call, names = gated
        _put_text(function, call, f"{me}.{DOWN}({me}.{names.down}, {me}.{names.act}, {whole}, {rows})")
        return names
    first = min(calls, key=lambda name: (calls[name][2].lineno, calls[name][2].col_offset))
    parts = f"_{fused}_parts"
    for index, shard in enumerate(shards):
        call = calls[shard][2]
        text = f"{parts}[{index}]"
        if shard == first:
            text = f"({parts} := {whole}.split({rows}, -1))[{index}]"
        _put_text(function, call, text)
    return None


def _gated(function: ast.FunctionDef, me: str, calls: Sequence[ast.Call]) -> tuple[ast.Call, Gated] | None:
    """Find ``self.down(self.act(gate) * up)`` around two calls. Return the node, and the names in it."""
    gate, up = calls
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
            continue
        product, down = node.args[0], _mine(node.func, me)
        if not (down and isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult) and product.right is up):
            continue
        left = product.left
        if isinstance(left, ast.Call) and len(left.args) == 1 and left.args[0] is gate and not left.keywords:
            act = _mine(left.func, me)
            if act:
                return node, Gated(down, act)
    return None


def _mine(node: ast.expr, me: str) -> str:
    """Return the name of an attribute of the module, ``self.name``; empty for other expressions."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return node.attr
    return ""


_Found = tuple[list[ast.stmt], int, ast.Call]
"""A call, with its block of statements and the index of its statement there."""


def _calls(function: ast.FunctionDef, me: str, shards: Sequence[str], label: str) -> dict[str, _Found]:
    """Return the one call of each shard."""
    found: dict[str, _Found] = {}
    for block in _blocks(function):
        for index, statement in enumerate(block):
            for node, conditional in _expressions(statement):
                shard = _called(node, me, shards)
                if shard is None:
                    continue
                assert isinstance(node, ast.Call)
                if conditional or not isinstance(statement, _STATEMENTS):
                    raise CannotFuse(f"{label} calls {shard} under a condition, or in a loop of its own")
                if shard in found:
                    raise CannotFuse(f"{label} calls {shard} more than once")
                found[shard] = (block, index, node)
    missing = [shard for shard in shards if shard not in found]
    if missing:
        raise CannotFuse(f"{label} does not call {missing[0]} with one input")
    nodes = list(ast.walk(function))
    uses = sum(isinstance(node, ast.Attribute) and node.attr in shards for node in nodes)
    if uses != len(shards) or any(isinstance(node, ast.Constant) and node.value in shards for node in nodes):
        raise CannotFuse(f"{label} uses {', '.join(shards)} in other ways than one call of each")
    return found


def _called(node: ast.AST, me: str, shards: Sequence[str]) -> str | None:
    """Return the shard that an expression calls with one local name, ``self.q_proj(x)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in shards):
        return None
    plain = len(node.args) == 1 and not node.keywords and isinstance(node.args[0], ast.Name)
    mine = isinstance(node.func.value, ast.Name) and node.func.value.id == me
    return node.func.attr if plain and mine else None


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements, outer ones first. Not those of functions inside."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.expr)):
                yield from _blocks(child)


def _expressions(node: ast.AST, conditional: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every expression of a statement, with whether it is conditional; not those of statements inside."""
    conditional = conditional or isinstance(node, _BRANCHES)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child, conditional
            yield from _expressions(child, conditional)


def _may_change(statements: Sequence[ast.stmt], name: str, calls: set[int]) -> str:
    """Return what may change the value of a local name, or the tensor that it holds; empty if nothing can."""
    allowed = {id(node) for s in statements for node in _harmless_uses(s, name, calls)}
    last = statements[-1]
    if isinstance(last, ast.Assign):  # assigned when all calls are done
        allowed |= {id(target) for target in last.targets if isinstance(target, ast.Name)}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == name and id(node) not in allowed:
                return f"uses {name} in another way"
            if isinstance(node, (ast.AugAssign, ast.Delete, ast.Global, ast.Nonlocal)):
                return f"has `{ast.unparse(node)}`"
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                return f"writes to {ast.unparse(node)}"
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called.endswith("_") and not called.endswith("__"):
                    return f"calls {called}, which writes in place"
                flags = [arg for arg in node.args if isinstance(arg, ast.Constant) and arg.value is True]
                if flags or any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
                    return f"calls {called}, which may write in place,"
    return ""


def _harmless_uses(statement: ast.stmt, name: str, calls: set[int]) -> Iterator[ast.Name]:
    """Yield uses of a name that cannot change its value: in the calls, and of its shape, dtype or device."""
    for node in ast.walk(statement):
        used: ast.AST | None = None
        if isinstance(node, ast.Call) and id(node) in calls:
            used = node.args[0]
        elif isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "device", "ndim"):
            used = node.value
        if isinstance(used, ast.Name) and used.id == name:
            yield used


def _put_text(root: ast.AST, old: ast.expr, text: str) -> None:
    """Replace an expression of a tree by another one, at the same line."""
    new = ast.parse(text, mode="eval").body
    for inner in ast.walk(new):
        ast.copy_location(inner, old)
    _put(root, old, new)


def _put(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Replace a node of a tree."""
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
                return
            if isinstance(value, list) and any(each is old for each in value):
                value[next(i for i, each in enumerate(value) if each is old)] = new
                return
