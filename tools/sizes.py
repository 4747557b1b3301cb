"""Size of the package: lines by room, longest files and functions. CI prints it; nothing depends on it.

python tools/sizes.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "kvoffload"
LONGEST = 8


def main() -> None:
    rooms, files, functions = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(PACKAGE))
        files[name] = len(text.splitlines())
        rooms[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += files[name]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                functions[f"{name}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    print(f"{sum(files.values()):,} lines in {len(files)} files")
    print(", ".join(f"{room} {lines:,}" for room, lines in rooms.most_common()))
    for title, sizes in (("longest files", files), ("longest functions", functions)):
        print(f"{title}: " + ", ".join(f"{name} {lines}" for name, lines in sizes.most_common(LONGEST)))


if __name__ == "__main__":
    main()
