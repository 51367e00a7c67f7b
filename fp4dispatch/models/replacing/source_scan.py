"""Find, in the source of a module's functions, how they use other modules. Follows names, loops and helpers."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

Path = tuple[str, ...]
"""Attributes from a module down to another; ``*`` is any child, and ``**`` the module with all below it."""

FOREIGN = ("torch.nn.", "transformers.modeling_utils", "transformers.generation.")
"""Modules whose classes are not scanned: they name no child of a model. ``replaceable.py`` lists the exceptions."""

_READS = frozenset({"weight", "_parameters", "parameters", "named_parameters", "state_dict"})
_HARMLESS_OF_WEIGHT = frozenset({"device", "is_cuda", "is_cpu", "is_meta"})
_HARMLESS_CALLS = frozenset({"hasattr", "callable", "id", "len", "print", "repr", "str", "bool", "checkpoint"})
_SAME = frozenset({"enumerate", "zip", "reversed", "list", "tuple", "iter", "values", "items", "children"})
"""Calls whose result contains the modules of their arguments, or of their object for a method."""
_PARAMETERS = frozenset({"parameters", "named_parameters", "state_dict"})
"""Methods that give the weights of all layers of a module."""
_HOLDERS = frozenset({"next", "dict", "sorted", "cat", "concat", "stack"}) | _SAME - {"children"}
"""Calls whose result holds what their arguments hold, or their object for a method."""
_STILL_VALUES = frozenset(
    (
        *("T", "mT", "H", "mH", "data", "t", "transpose", "permute", "view", "reshape", "flatten", "unflatten"),
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"),
        *("squeeze", "unsqueeze", "chunk", "split", "unbind", "get", "pop"),
    )
)
"""What code does to a weight before it multiplies. ``dtype``, ``device`` and ``numel`` are not among it."""
_PRODUCTS = frozenset(
    {"linear", "bilinear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "mul", "multiply"}
)
_MAX_PATH = 8
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Read:
    """A use of the module at ``path``, other than a call. ``path`` starts at the module whose code it is."""

    path: Path
    what: str
    where: str
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class Guard:
    """The condition of an ``if`` around a read, and its needed value. ``me`` is the function's name for ``self``."""

    test: ast.expr
    wanted: bool
    me: str

    def may_hold(self, module: nn.Module) -> bool:
        """Return whether the module's settings allow this branch. True if not known."""
        value = _value(self.test, module, self.me)
        return value is _UNKNOWN or bool(value) == self.wanted


_UNKNOWN = object()
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def _value(node: ast.expr, module: nn.Module, me: str) -> Any:
    """Return what an expression of constants and plain settings (``self.config.slow > 1``) is; _UNKNOWN for others."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        owner = module if isinstance(node.value, ast.Name) and node.value.id == me else _value(node.value, module, me)
        value = getattr(owner, "__dict__", {}).get(node.attr, _UNKNOWN)
        plain = value is None or isinstance(value, (bool, int, float, str)) or node.attr == "config"
        return value if plain and node.attr != "training" else _UNKNOWN  # train() and eval() change it
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, module, me)
        return _UNKNOWN if value is _UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(part, module, me) for part in node.values]
        decides = isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) == decides for value in values):
            return decides
        return _UNKNOWN if _UNKNOWN in values else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        left, right = _value(node.left, module, me), _value(node.comparators[0], module, me)
        if left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        try:
            return _COMPARE[type(node.ops[0])](left, right)
        except TypeError:
            return _UNKNOWN
    return _UNKNOWN


def functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the Python functions of a method or property, also those inside decorators."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod, MethodType)):
        member = member.__func__
    member = inspect.unwrap(member) if callable(member) else member
    if isinstance(member, FunctionType):
        yield member
        for cell in member.__closure__ or ():  # a decorator without __wrapped__
            inner = getattr(cell, "cell_contents", None) if _filled(cell) else None
            if isinstance(inner, FunctionType) and inner is not member:
                yield inspect.unwrap(inner)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def mentioned(code: CodeType) -> set[str]:
    """Return every name and string that a code object, or one inside it, mentions."""
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= mentioned(const)
    return names


def reads_of(cls: type, functions: Iterable[FunctionType]) -> tuple[Read, ...]:
    """Return how the functions of a class use modules, other than by calling them."""
    scan = _Scan(cls)
    for function in functions:
        scan.run(function, {}, 0)
    return tuple(dict.fromkeys(scan.reads))


@lru_cache(maxsize=512)
def _file(name: str) -> Mapping[tuple[str, int], ast.FunctionDef]:
    """Return the functions of a source file by name and first line (of the first decorator, as byte code has it)."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {(f.name, min([f.lineno, *(d.lineno for d in f.decorator_list)])): f for f in functions}


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a function, with the lines of its file; None without source. Shared: copy to change."""
    code = function.__code__
    return _file(code.co_filename).get((code.co_name, code.co_firstlineno))


@dataclass
class _Scan:
    """All functions of one class."""

    cls: type
    reads: list[Read] = field(default_factory=list)
    results: dict[Any, frozenset[Path]] = field(default_factory=dict)

    def run(self, function: FunctionType, bound: Mapping[str, frozenset[Path]], depth: int) -> frozenset[Path]:
        """Scan a function whose parameters hold modules; returns the modules that it may return."""
        key = (function, frozenset(bound.items()))
        if key in self.results:
            return self.results[key]
        self.results[key] = frozenset()  # for recursion
        code = function.__code__
        node = definition_of(function)
        parameters = dict(bound)
        if code.co_argcount and not bound:
            parameters = {code.co_varnames[0]: frozenset({()})}
        if node is None:
            self._scan_without_source(function, parameters)
            return frozenset()
        body = _Body(self, function, parameters, depth)
        for _ in range(2):  # twice: a loop can set a name after its first use
            for statement in node.body:
                body.visit(statement)
        self.results[key] = frozenset(body.returned)
        return self.results[key]

    def _scan_without_source(self, function: FunctionType, bound: Mapping[str, frozenset[Path]]) -> None:
        """No source: assume a read of each module that the code names, if it also names ``weight``."""
        names = mentioned(function.__code__)
        if names & _READS:
            why = "names weight in code without source"
            for path in {p for paths in bound.values() for p in paths}:
                self.reads += [Read((*path, name), why, self._label(function)) for name in sorted(names)]
                self.reads.append(Read(path, why, self._label(function)))

    def method(self, name: str) -> FunctionType | None:
        return next(functions_of(inspect.getattr_static(self.cls, name, None)), None)

    def is_property(self, name: str) -> bool:
        return isinstance(inspect.getattr_static(self.cls, name, None), property)

    def _label(self, function: FunctionType) -> str:
        return function.__qualname__.replace(".<locals>", "")


class _Body(ast.NodeVisitor):
    """One function: ``known`` holds the modules that local names may be."""

    def __init__(self, scan: _Scan, function: FunctionType, known: dict[str, frozenset[Path]], depth: int) -> None:
        self.scan, self.function, self.known, self.depth = scan, function, known, depth
        self.held: dict[str, frozenset[Path]] = {}
        """The modules whose parameters local names may hold."""
        self.returned: set[Path] = set()
        self.harmless: set[ast.AST] = set()
        self.whole: dict[ast.AST, str] = {}
        self.guards: list[Guard] = []
        self.me = next((name for name, paths in known.items() if paths == frozenset({()})), "")

    # ------------------------------------------------------------------------------------------- which modules it is

    def modules(self, node: ast.expr | None) -> frozenset[Path]:
        """Return the modules that an expression may be (or hold, where it is a container)."""
        found: set[Path] = set()
        if isinstance(node, ast.Name):
            found |= self.known.get(node.id, frozenset())
        elif isinstance(node, ast.Attribute):
            for path in self.modules(node.value):
                found |= self._attribute(path, node.attr)
        elif isinstance(node, ast.Subscript):
            found |= {p if isinstance(node.slice, ast.Slice) else (*p, "*") for p in self.modules(node.value)}
        elif isinstance(node, ast.IfExp):
            found |= self.modules(node.body) | self.modules(node.orelse)
        elif isinstance(node, (ast.BoolOp, ast.Tuple, ast.List)):
            for value in node.values if isinstance(node, ast.BoolOp) else node.elts:
                found |= self.modules(value)
        elif isinstance(node, (ast.NamedExpr, ast.Starred)):
            found |= self.modules(node.value)
        elif isinstance(node, ast.Call):
            found |= self._result(node)
        return frozenset(p for p in found if len(p) <= _MAX_PATH)

    def _attribute(self, path: Path, name: str) -> frozenset[Path]:
        if not path and self.scan.is_property(name):
            method = self.scan.method(name)
            return frozenset() if method is None else self.scan.run(method, {}, self.depth + 1)
        return frozenset({(*path, name)})

    def _result(self, call: ast.Call) -> frozenset[Path]:
        name = _called(call.func)
        if name == "getattr" and len(call.args) > 1:
            key = call.args[1]
            child = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "*"
            return frozenset((*p, child) for p in self.modules(call.args[0]))
        if name in _SAME:
            holders = call.args if isinstance(call.func, ast.Name) else [*call.args, getattr(call.func, "value", None)]
            return frozenset(p for holder in holders for p in self.modules(holder))
        if name in ("get", "get_submodule", "__getitem__") and isinstance(call.func, ast.Attribute):
            return frozenset((*p, "*") for p in self.modules(call.func.value))
        return self._enter(call, record=False)

    def values(self, node: ast.expr | None) -> frozenset[Path]:
        """Return the modules whose parameters an expression may be, or hold where it is a container."""
        parts: Iterable[ast.expr | None] = ()
        if isinstance(node, ast.Name):
            return self.held.get(node.id, frozenset())
        if isinstance(node, ast.Call):
            name, owner = _called(node.func), getattr(node.func, "value", None)
            if name in _PARAMETERS and owner is not None:
                return self.modules(owner)
            if name in _STILL_VALUES:
                parts = (owner,)
            elif name in _HOLDERS:
                parts = (owner, *node.args)
        elif isinstance(node, ast.Attribute):
            parts = (node.value,) if node.attr in _STILL_VALUES else ()
        elif isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            parts = (node.value,)
        elif isinstance(node, ast.IfExp):
            parts = (node.body, node.orelse)
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, (ast.Tuple, ast.List)):
            parts = node.elts
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            parts = (node.elt,)
        elif isinstance(node, ast.DictComp):
            parts = (node.value,)
        return frozenset(path for part in parts for path in self.values(part))

    # ------------------------------------------------------------------------------------------------------ statements

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._bind(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.returned |= self.modules(node.value)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        for wanted, statements in ((True, node.body), (False, node.orelse)):
            self.guards.append(Guard(node.test, wanted, self.me))
            for statement in statements:
                self.visit(statement)
            self.guards.pop()

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind_each(node.target, node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self._bind_each(node.target, node.iter)
        for condition in node.ifs:
            self.visit(condition)

    def _comprehension(self, node: Any) -> None:
        for generator in node.generators:  # before the element, which uses its names
            self.visit(generator)
        for part in ("key", "value", "elt"):
            if hasattr(node, part):
                self.visit(getattr(node, part))

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            self._comprehension(node)
        else:
            super().generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
            return
        self._add_names(target, self.modules(value))
        self._add_names(target, self.values(value), self.held)

    def _bind_each(self, target: ast.expr, holder: ast.expr) -> None:
        literal = isinstance(holder, (ast.Tuple, ast.List))
        self._add_names(target, frozenset(p if literal else (*p, "*") for p in self.modules(holder)))
        self._add_names(target, self.values(holder), self.held)

    def _add_names(
        self, target: ast.expr, paths: frozenset[Path], names: dict[str, frozenset[Path]] | None = None
    ) -> None:
        names = self.known if names is None else names
        if paths:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    names[name.id] = names.get(name.id, frozenset()) | paths

    # ------------------------------------------------------------------------------------------------------------ uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _HARMLESS_OF_WEIGHT:
            self.harmless.add(node.value)
        self.whole[node.value] = ast.unparse(node)
        if node.attr in _READS and isinstance(node.ctx, ast.Load) and node not in self.harmless:
            self._read(self.modules(node.value), f"reads {self.whole.get(node, ast.unparse(node))}")
        self.modules(node)  # a property is entered
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.Mult, ast.MatMult)):
            self._multiply(node, (node.left, node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, (ast.Mult, ast.MatMult)):
            self._multiply(node, (node.value,))
        self.generic_visit(node)

    def _multiply(self, node: ast.AST, factors: Iterable[ast.expr | None]) -> None:
        """Note a product of parameters that the code got from ``named_parameters()`` or the like of a module."""
        paths = {path for factor in factors for path in self.values(factor)}
        self._read(frozenset((*path, "**") for path in paths), f"computes {ast.unparse(node)}")

    def visit_Compare(self, node: ast.Compare) -> None:
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.harmless |= {node.left, *node.comparators}
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node.func)
        if name in _PRODUCTS:
            keywords = (keyword.value for keyword in node.keywords)
            self._multiply(node, (getattr(node.func, "value", None), *node.args, *keywords))
        if name == "isinstance" and len(node.args) == 2:
            self.harmless.add(node.args[0])
            if "Linear" in ast.unparse(node.args[1]):
                self._read(self.modules(node.args[0]), f"asks {ast.unparse(node)}")
        elif name == "type":
            self._read(self.modules(node.args[0]) if node.args else frozenset(), f"asks {ast.unparse(node)}")
        elif name == "getattr" and len(node.args) > 1:
            key = node.args[1]
            if isinstance(key, ast.Constant) and key.value in _READS:
                self._read(self.modules(node.args[0]), f"reads {ast.unparse(node)}")
        elif name not in _SAME and name not in _HARMLESS_CALLS:
            self._enter(node, record=True)
        self.generic_visit(node)

    def _enter(self, call: ast.Call, *, record: bool) -> frozenset[Path]:
        """Follow a call of a method of this class, or of a function that gets modules as arguments."""
        arguments = [(str(i), self.modules(a)) for i, a in enumerate(call.args)]
        arguments += [(k.arg or "", self.modules(k.value)) for k in call.keywords]
        target = call.func
        mine = isinstance(target, ast.Attribute) and self.modules(target.value) == frozenset({()})
        function = self.scan.method(target.attr) if mine and isinstance(target, ast.Attribute) else None
        own = function is not None
        bound: dict[str, frozenset[Path]] = {}
        if function is None:
            if not any(paths for _, paths in arguments):
                return frozenset()
            function = next(functions_of(self._global(target)), None)
        where = f"{function.__module__}." if function is not None else ""
        foreign = own and where.startswith(FOREIGN)
        if function is None or where.startswith("torch.") or self.depth >= _MAX_DEPTH or (foreign and record):
            if record:
                for _, paths in arguments:
                    self._read(paths, f"hands it to {ast.unparse(target)}")
            return frozenset()
        names = list(inspect.signature(function, follow_wrapped=False).parameters)
        static = own and isinstance(inspect.getattr_static(self.scan.cls, _called(target), None), staticmethod)
        first = 1 if own and not static else 0
        if first and names:
            bound[names[0]] = frozenset({()})
        for key, paths in arguments:
            name = names[int(key) + first] if key.isdigit() and int(key) + first < len(names) else key
            if paths:
                bound[name] = bound.get(name, frozenset()) | paths
        # A static method without a module: ``run`` would take its first parameter for the module.
        if not bound:
            return frozenset()
        # Of methods of Transformers only the result counts, as that of ``get_output_embeddings``.
        scan = _Scan(self.scan.cls) if foreign else self.scan
        return scan.run(function, bound, self.depth + 1)

    def _global(self, node: ast.expr) -> Any:
        """Return what a dotted name means in the function's module, None where that is not known."""
        if isinstance(node, ast.Name):
            return self.function.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            owner = self._global(node.value)
            return None if owner is None else inspect.getattr_static(owner, node.attr, None)
        return None

    def _read(self, paths: frozenset[Path], what: str) -> None:
        where = self.function.__qualname__.replace(".<locals>", "")
        guards = tuple(self.guards) if self.me else ()
        self.scan.reads += [Read(path, what, where, guards) for path in sorted(paths)]


def _called(func: ast.expr) -> str:
    """Return the last name of what is called."""
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
