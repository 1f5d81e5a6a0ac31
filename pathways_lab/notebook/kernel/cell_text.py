"""A cell's text as code: what it reads, what it means, how it is run.

Problem: a captured cell must be told the values of the names that it reads, and
only of those, because each of them that holds an array becomes an input; and
its line numbers must be those that the editor shows.

Rule for maintainers: knows Python's grammar and nothing of IPython, JAX or a
lab.  When in doubt a name counts as read: an input too many costs little, a
missing one is a NameError.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

VALUE = "_pathways_value"
"""Name to which the value of the last expression is assigned."""

_AWAITING = (ast.Await, ast.AsyncFor, ast.AsyncWith)


class CellRefused(Exception):
    """The cell's text cannot be a program.  line: number in the cell."""

    def __init__(self, message: str, remedy: str, line: int) -> None:
        super().__init__(message)
        self.message, self.remedy, self.line = message, remedy, line


@dataclass(frozen=True)
class Cell:
    """A cell, compiled.

    reads: names whose values it may need.
    """

    code: CodeType
    reads: frozenset[str]

    def run(self, names: dict[str, Any]) -> None:
        """Execute in *names*, which also receives what is assigned."""
        names.setdefault("__builtins__", builtins)
        names.setdefault("__name__", "__main__")
        exec(self.code, names)


def parse(source: str, file: str) -> Cell:
    """Compile a cell.

    Raises SyntaxError, and CellRefused for an ``await`` outside of a function.
    """
    tree = ast.parse(source, filename=file)
    for node in _outside_functions(tree):
        if isinstance(node, _AWAITING):
            raise CellRefused(
                "a program cannot wait for a value: await needs the result of the run",
                "await the handle in another cell",
                node.lineno,
            )
    flow = _Flow()
    assigned = flow.walk(tree.body, frozenset())
    referred = _loads_at_top(tree, frozenset()) | _changed(tree)
    for scope in symtable.symtable(source, file, "exec").get_children():
        referred |= _global_loads(scope)
    # A name that is always assigned first is not read, unless something may be quicker.
    reads = frozenset(referred - (assigned - flow.read))
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        target = ast.copy_location(ast.Name(VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    return Cell(compile(ast.fix_missing_locations(tree), file, "exec"), reads)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the cell runs, not when a function of it is called."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def _loads_at_top(node: ast.AST, hidden: frozenset[str]) -> set[str]:
    """Names that are read outside of functions; *hidden*: those of comprehensions around.

    Not asked of a symbol table: since Python 3.12 it lists the names of a
    comprehension among those of the code around it.
    """
    if isinstance(node, ast.Name):
        return {node.id} - hidden if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        body = node.body if isinstance(node.body, list) else [node.body]
        around = (child for child in ast.iter_child_nodes(node) if child not in body)
        return set().union(*(_loads_at_top(child, hidden) for child in around))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        first = node.generators[0].iter
        inner = hidden.union(*(_stores(each.target) for each in node.generators))
        found = _loads_at_top(first, hidden)
        children = [*node.generators, *_results(node)]
        parts = (p for child in children for p in _parts(child) if p is not first)
        return found.union(*(_loads_at_top(part, inner) for part in parts))
    return set().union(*(_loads_at_top(child, hidden) for child in ast.iter_child_nodes(node)))


def _results(
    node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
) -> tuple[ast.expr, ...]:
    return (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)


def _parts(node: ast.AST) -> list[ast.AST]:
    return list(ast.iter_child_nodes(node)) if isinstance(node, ast.comprehension) else [node]


def _global_loads(table: symtable.SymbolTable) -> frozenset[str]:
    """Names of the notebook that a function of the cell, or one in it, refers to."""
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    for child in table.get_children():
        found |= _global_loads(child)
    return frozenset(found)


def _changed(tree: ast.Module) -> set[str]:
    """Names that ``x += 1`` and ``del x`` read, which a symbol table calls assignments."""
    out = set()
    for node in _outside_functions(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            out.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            out.add(node.id)
    return out


class _Flow:
    """Walks statements in the order in which they run.

    read: names that were, or may have been, read before they were assigned.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()

    def walk(self, statements: list[ast.stmt], known: frozenset[str]) -> frozenset[str]:
        """Names that are certainly assigned after *statements*; *known*: before them."""
        for statement in statements:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: ast.stmt, known: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.For):
            self._loads(known, node.iter)
            # After a loop over nothing the name would be an old one; nobody means that.
            known |= _stores(node.target)
            self.walk(node.body + node.orelse, known)
        elif isinstance(node, ast.While):
            self._loads(known, node.test)
            self.walk(node.body + node.orelse, known)
        elif isinstance(node, ast.If):
            self._loads(known, node.test)
            known = self.walk(node.body, known) & self.walk(node.orelse, known)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._loads(known, item.context_expr)
                known |= _stores(item.optional_vars) if item.optional_vars else frozenset()
            known = self.walk(node.body, known)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            self._loads(known, node)
            known |= self._assigned(node)
        return known

    @staticmethod
    def _assigned(node: ast.stmt) -> frozenset[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return frozenset((node.name,))
        if isinstance(node, ast.Assign):
            return frozenset().union(*map(_stores, node.targets))
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return _stores(node.target)
        return frozenset()

    def _loads(self, known: frozenset[str], node: ast.AST) -> None:
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        self.read |= {name.id for name in names if not isinstance(name.ctx, ast.Store)} - known
        self.read |= (
            _changed(ast.Module([node], [])) - known if isinstance(node, ast.stmt) else set()
        )


def _stores(node: ast.AST) -> frozenset[str]:
    return frozenset(
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    )


def at_home(value: Any, home: dict[str, Any], away: dict[str, Any]) -> Any:
    """A function that the cell defined, with the notebook's names instead of the capture's.

    During the capture its globals were a copy with stand-ins; other values are
    returned as they are.
    """
    if not isinstance(value, FunctionType) or value.__globals__ is not away:
        return value
    moved = FunctionType(
        value.__code__, home, value.__name__, value.__defaults__, value.__closure__
    )
    moved.__kwdefaults__ = value.__kwdefaults__
    moved.__annotations__ = value.__annotations__
    moved.__qualname__ = value.__qualname__
    moved.__doc__ = value.__doc__
    moved.__dict__.update(value.__dict__)
    return moved
