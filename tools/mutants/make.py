"""Mutants of a source tree: all places where a change can matter, and a random choice by seed.

cosmic-ray makes the mutants. Owns the choice, and an operator that cosmic-ray lacks. Runs nothing.
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
"""Suffixes of unused operators. The first two are random; mutants of the third cannot be imported; ``is`` for
``==`` depends on the interpreter."""
_TURNED = ("Is_IsNot", "IsNot_Is")
REMOVE_STATEMENT = "RemoveStatement"

Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) of the first character, and behind the last character; lines from 1, columns from 0."""


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
        path: path of the file, relative to the root of the tree.
        line: the first changed line.
        operator, occurrence: cosmic-ray's identity: the `occurrence`-th place of `operator` in the file.
        source: the whole changed file.
        diff: difference from the original file.
    """

    path: str
    line: int
    operator: str
    occurrence: int
    source: str
    diff: str


class RemoveStatement(Operator):  # type: ignore[misc]
    """Replaces a call, an assignment that outlives the function, or a ``raise`` with ``pass``."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Yield the span of the statement."""
        if node.parent is not None and node.parent.type == "simple_stmt" and _has_effect(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return ``pass`` for the statement."""
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Sequence[Any]:
        """Return none: our tests have them."""
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
    """Return name -> operator, in constant order."""
    by_name = {}
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if not name.endswith(_NOT_USED) or name.endswith(_TURNED):
            by_name[name] = cosmic_ray.plugins.get_operator(name)()
    by_name[REMOVE_STATEMENT] = RemoveStatement()
    return by_name


def places(source: str) -> dict[Span, list[tuple[str, int]]]:
    """Find the places where a change can matter; returns the operators and occurrences of each."""
    nodes = list(ast_nodes(get_ast(source)))
    cannot_matter = left_out(ast.parse(source))
    by_span: dict[Span, list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        spans = (span for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (first, last) in enumerate(spans):
            if not any(begin <= first and last <= end for begin, end in cannot_matter):
                by_span.setdefault((first, last), []).append((name, occurrence))
    return by_span


def left_out(tree: ast.AST) -> list[Span]:
    """Find the parts of a source in which a change cannot matter to users.

    Annotations; f-strings; the arguments of an exception or a warning; ``__repr__``; code for type checkers;
    and prefetching of memory, which affects only speed.
    """
    spans: list[Span] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            is_alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
            spans.append(_span(node if is_alias else node.annotation))
        elif isinstance(node, ast.JoinedStr):
            spans.append(_span(node))
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            if called.endswith("Error") or called == "warn":
                spans.append((_span(node.func)[1], _span(node)[1]))
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            spans.append(_span(node))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _is_prefetch(_name(node.value.func)):
                spans.append(_span(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.returns is not None:
                spans.append(_span(node.returns))
            if node.name in ("__repr__", "populate") or _is_prefetch(node.name):
                spans.append(_span(node))
    return spans


def _span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_prefetch(function: str) -> bool:
    """Return True for ``prefetch`` and functions such as ``_prefetch_used``."""
    return function.lstrip("_").startswith("prefetch")


def make(root: Path, path: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    """Make a mutant; None if it is not valid Python, or not a different program."""
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
    """Draw mutants of these files: first a place, all equally likely, then a change at this place.

    The first `n` mutants do not depend on `number`. No place is drawn twice.
    """
    drawn = random.Random(seed)
    everywhere = []
    for path in sorted(paths):
        by_span = places((root / path).read_text())
        everywhere += [(path, span[0][0], by_span[span]) for span in sorted(by_span)]
    drawn.shuffle(everywhere)
    for path, line, ways in everywhere:
        mutant = make(root, path, line, *drawn.choice(ways))
        if mutant is not None:
            yield mutant
            number -= 1
        if number == 0:
            return
