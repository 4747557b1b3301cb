"""Mutants of a source tree: all that there are, which of them can matter, and some drawn by a seed.

cosmic-ray makes them. Owns the choice, and one operator that cosmic-ray lacks. Runs nothing.
"""

from __future__ import annotations

import ast
import difflib
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso.python.tree import Keyword

_NOT_USED = ("VariableReplacer", "VariableInserter", "RemoveDecorator", "_Is", "_IsNot", "_Delete_UAdd")
"""Ends of names. The first two draw by chance; what the third makes does not import; ``is`` for ``==`` is a
question to the interpreter, not to us."""
_TURNED = ("Is_IsNot", "IsNot_Is")
REMOVE_STATEMENT = "RemoveStatement"

Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) of the first character, and behind the last one; lines from 1, columns from 0."""


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        path: of the file, below the root of the tree.
        line: the first one that it changes.
        operator, occurrence: what cosmic-ray calls it: the `occurrence`-th place of the file for `operator`.
        source: the whole file, changed.
        diff: from what it was.
    """

    path: str
    line: int
    operator: str
    occurrence: int
    source: str
    diff: str


class RemoveStatement(Operator):  # type: ignore[misc]
    """Puts ``pass`` for a call, an assignment to what outlives the function, or a ``raise``."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Where the statement is."""
        if node.parent is not None and node.parent.type == "simple_stmt" and _has_effect(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The statement's place taken by ``pass``."""
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Sequence[Any]:
        """None: they are in our tests."""
        return ()


def _has_effect(node: Any) -> bool:
    if node.type == "expr_stmt":
        target, sign = node.children[:2]
        return target.type in ("atom_expr", "power") or getattr(sign, "value", "") in _AUGMENTED
    if node.type in ("atom_expr", "power"):
        return bool(node.children[-1].type == "trailer" and node.children[-1].children[0] == "(")
    return bool(node.type == "raise_stmt")


_AUGMENTED = {sign + "=" for sign in ("+", "-", "*", "/", "//", "%", "**", ">>", "<<", "&", "|", "^")}


@functools.cache
def operators() -> dict[str, Any]:
    """Name -> operator, in one order always."""
    found = {}
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if not name.endswith(_NOT_USED) or name.endswith(_TURNED):
            found[name] = cosmic_ray.plugins.get_operator(name)()
    found[REMOVE_STATEMENT] = RemoveStatement()
    return found


def places(source: str) -> dict[Span, list[tuple[str, int]]]:
    """Where a change of a source may matter; each place with the operators and occurrences for it."""
    nodes = list(ast_nodes(get_ast(source)))
    cannot_matter = left_out(ast.parse(source))
    found: dict[Span, list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        spans = (span for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (first, last) in enumerate(spans):
            if not any(begin <= first and last <= end for begin, end in cannot_matter):
                found.setdefault((first, last), []).append((name, occurrence))
    return found


def left_out(tree: ast.AST) -> list[Span]:
    """Parts of a source in which a change cannot matter to who uses it.

    Annotations; texts and what is put into them; the arguments of an exception or a warning; ``__repr__``;
    what only type checkers read; and asking for memory before it is needed, without which everything is only
    slower.
    """
    found: list[Span] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            is_alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
            found.append(_span(node if is_alias else node.annotation))
        elif isinstance(node, ast.JoinedStr):
            found.append(_span(node))
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            if called.endswith("Error") or called == "warn":
                found.append((_span(node.func)[1], _span(node)[1]))
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            found.append(_span(node))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _name(node.value.func).strip("_") == "prefetch":
                found.append(_span(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.returns is not None:
                found.append(_span(node.returns))
            if node.name in ("__repr__", "_prefetch", "populate"):
                found.append(_span(node))
    return found


def _span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def make(root: Path, path: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    """This mutant; None if it is no Python, or no other program."""
    before = (root / path).read_text()
    source = mutate_code(before, operators()[operator], occurrence)
    if source is None:
        return None
    try:
        if ast.dump(ast.parse(source)) == ast.dump(ast.parse(before)):
            return None
    except SyntaxError:
        return None
    lines = difflib.unified_diff(before.splitlines(True), source.splitlines(True), path, path, n=2)
    return Mutant(path, line, operator, occurrence, source, "".join(lines))


def choose(root: Path, paths: Sequence[str], number: int, seed: int) -> Iterator[Mutant]:
    """Draw mutants of these files: first a place, each as likely as any other, then what happens there.

    The first `n` are the same for every `number`. No place is drawn twice.
    """
    drawn = random.Random(seed)
    everywhere = []
    for path in sorted(paths):
        found = places((root / path).read_text())
        everywhere += [(path, span[0][0], found[span]) for span in sorted(found)]
    drawn.shuffle(everywhere)
    for path, line, ways in everywhere:
        mutant = make(root, path, line, *drawn.choice(ways))
        if mutant is not None:
            yield mutant
            number -= 1
        if number == 0:
            return
