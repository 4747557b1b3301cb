"""Uses of names in a source tree, for code that coverage.py cannot trace.

A kernel runs as machine code, and a constant is read on import: coverage.py sees no test reach them, but it
sees tests reach the functions that mention them. Names are compared as text: two definitions with the same
name count as one. This adds a few tests or kernels, and misses none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_KERNEL_MARKS = {"kernel", "long_kernel", "compiled"}
"""Decorators of functions that are compiled; ``compiled`` is that of a policy."""


class Definition(NamedTuple):
    """A function, or a statement of a module or a class.

    Attributes:
        path: path of its file, relative to the root.
        names: defined names; for a statement of a class also the name of the class.
        lines: first and last line.
        body: first and last line of a function's body; None for a statement.
        mentions: every name that it reads, and every attribute's name.
        is_kernel, is_inline: compiled by `structures.jit` as a kernel, or inlined into kernels.
    """

    path: str
    names: tuple[str, ...]
    lines: tuple[int, int]
    body: tuple[int, int] | None
    mentions: frozenset[str]
    is_kernel: bool = False
    is_inline: bool = False

    @property
    def is_traced(self) -> bool:
        """True if coverage.py can trace it."""
        return self.body is not None and not self.is_kernel and not self.is_inline


def definitions(root: Path) -> list[Definition]:
    """Return the definitions of all files."""
    result: list[Definition] = []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text())
        real = {
            alias.asname: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        result += _of_block(str(file.relative_to(root)), tree.body, (), real)
    return result


def _of_block(
    path: str, block: list[ast.stmt], owner: tuple[str, ...], real: dict[str, str]
) -> Iterator[Definition]:
    for node in block:
        first, last = node.lineno, node.end_lineno or node.lineno
        mentions = frozenset(real.get(name, name) for name in _mentioned(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = {name for mark in node.decorator_list for name in _mentioned(mark)}
            first = min([first, *(mark.lineno for mark in node.decorator_list)])
            yield Definition(
                path, (node.name,), (first, last), (node.body[0].lineno, last), mentions,
                not _KERNEL_MARKS.isdisjoint(marks), "inline" in marks,
            )  # fmt: skip
        elif isinstance(node, ast.ClassDef):
            yield from _of_block(path, node.body, (node.name,), real)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            yield Definition(path, (*sorted(names), *owner), (first, last), None, mentions)


def _mentioned(tree: ast.AST) -> Iterator[str]:
    """Yield names that are read, and names of attributes. A plain assignment does not read its target."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def imports(file: Path) -> frozenset[str]:
    """Return the names that a file imports from other modules, without aliases."""
    nodes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
    return frozenset(alias.name for node in nodes for alias in node.names)


def at(known: Iterable[Definition], path: str, line: int) -> Definition | None:
    """Find the definition that contains a line; None for an import, or the first line of a class."""
    for definition in known:
        if definition.path == path and definition.lines[0] <= line <= definition.lines[1]:
            return definition
    return None


def users(known: Iterable[Definition], used: Definition) -> list[Definition]:
    """Find direct and indirect users of a definition, up to functions that coverage.py can trace."""
    result: list[Definition] = []
    names, candidates = set(used.names), [definition for definition in known if definition is not used]
    while True:
        new = [definition for definition in candidates if definition.mentions & names]
        if not new:
            return result
        result += new
        candidates = [definition for definition in candidates if definition not in new]
        names.update(*(definition.names for definition in new if not definition.is_traced))
