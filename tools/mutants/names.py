"""Who in a source tree uses what, by name: for what coverage.py cannot follow.

A kernel runs as machine code, a constant is read when a module is imported: no test is seen to reach them. It
is seen to reach the functions that mention them. Names are taken as they are written: two things of one name
count as one, which costs a few tests or kernels more, and misses none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Definition(NamedTuple):
    """A function, or a statement of a module or a class.

    Attributes:
        path: of its file, below the root.
        names: what it defines; a statement of a class also stands for the class.
        lines: first and last.
        body: first and last line of a function's body; None for a statement.
        mentions: every name in it.
        is_kernel, is_inline: how `structures.jit` compiles it.
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
        """Whether coverage.py sees it run."""
        return self.body is not None and not self.is_kernel and not self.is_inline


def definitions(root: Path) -> list[Definition]:
    """Of all files."""
    found: list[Definition] = []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text())
        real = {
            alias.asname: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        found += _of_block(str(file.relative_to(root)), tree.body, (), real)
    return found


def _of_block(
    path: str, block: list[ast.stmt], owner: tuple[str, ...], real: dict[str, str]
) -> Iterator[Definition]:
    for node in block:
        first, last = node.lineno, node.end_lineno or node.lineno
        mentions = frozenset(real.get(name, name) for name in _mentioned(node))
        if isinstance(node, ast.FunctionDef):
            marks = {name for mark in node.decorator_list for name in _mentioned(mark)}
            first = min([first, *(mark.lineno for mark in node.decorator_list)])
            yield Definition(
                path, (node.name,), (first, last), (node.body[0].lineno, last), mentions,
                "kernel" in marks, "inline" in marks,
            )  # fmt: skip
        elif isinstance(node, ast.ClassDef):
            yield from _of_block(path, node.body, (node.name,), real)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            yield Definition(path, (*sorted(names), *owner), (first, last), None, mentions)


def _mentioned(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def imports(file: Path) -> frozenset[str]:
    """What a file imports from others, by the names that they have there."""
    found = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
    return frozenset(alias.name for node in found for alias in node.names)


def at(known: Iterable[Definition], path: str, line: int) -> Definition | None:
    """The definition in which a line is; None for an import, or a class's own first line."""
    for one in known:
        if one.path == path and one.lines[0] <= line <= one.lines[1]:
            return one
    return None


def users(known: Iterable[Definition], used: Definition) -> list[Definition]:
    """What mentions a definition, or mentions what does: up to functions that coverage.py sees run."""
    found: list[Definition] = []
    names, left = set(used.names), [one for one in known if one is not used]
    while True:
        more = [one for one in left if one.mentions & names]
        if not more:
            return found
        found += more
        left = [one for one in left if one not in more]
        names.update(*(one.names for one in more if not one.is_traced))
