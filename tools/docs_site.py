"""Build of the documentation site: adds pages from outside docs/, and checks the result.

    python tools/docs_site.py        # make docs

mkdocs calls the functions ``on_...`` (`mkdocs.yml`): the README becomes the first page; other documents of
the root, and linked source files, become pages. The script builds the site in strict mode, checks that every
public name has an entry, and adds the example plan that `docs/plan-page.md` embeds. Knows nothing about the
content of pages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from os.path import normpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PLAN = ROOT / "build" / "plan.html"
"""Output of `make report`."""
EXAMPLE = "example-plan.html"
"""Its name in the site; `docs/plan-page.md` embeds it."""
OUTSIDE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh", ".toml": "toml"}


def uri_of(name: str) -> str:
    """Map a file of the repository to the source of its page in the site."""
    if name == "README.md":
        return "index.md"
    if name in OUTSIDE:
        return name
    return name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name}.md"


def name_of(uri: str) -> str:
    """Map a page of the site to its file in the repository."""
    if uri == "index.md":
        return "README.md"
    return uri if uri in OUTSIDE else f"docs/{uri}"


def linked(name: str) -> set[str]:
    """List the link targets of a document, as paths in the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return {normpath(Path(name).parent / target) for target in _LINK.findall(text)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    documents = [
        *OUTSIDE,
        *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")),
    ]
    for name in OUTSIDE:
        files.append(File.generated(config, uri_of(name), content=(ROOT / name).read_text(encoding="utf-8")))
    for name in sorted(set().union(*map(linked, documents))):
        path = ROOT / name
        if path.is_file() and uri_of(name).startswith("source/"):
            language = _LANGUAGES.get(path.suffix, "")
            text = f"# {name}\n\n````{language}\n{path.read_text(encoding='utf-8')}\n````\n"
            files.append(File.generated(config, uri_of(name), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links from files of the repository to pages of the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    folder = Path(name_of(uri)).parent

    def moved(match: re.Match[str]) -> str:
        return relpath(uri_of(normpath(folder / match[1])), Path(uri).parent)

    return _LINK.sub(moved, markdown).replace("<details>", '<details markdown="1">')


def main() -> None:
    import kvoffload

    # Not --quiet: `strict` counts only warnings that mkdocs prints.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"docs: {done.stdout}{done.stderr}")
    pages = "".join(path.read_text(encoding="utf-8") for path in (SITE / "reference").glob("*.html"))
    missing = [name for name in kvoffload.__all__ if f'id="kvoffload.{name}"' not in pages]
    if missing:
        raise SystemExit(f"docs: no entry in the reference: {', '.join(missing)}")
    if f'src="{EXAMPLE}"' not in (SITE / "plan-page.html").read_text(encoding="utf-8"):
        raise SystemExit(f"docs: docs/plan-page.md does not show {EXAMPLE}")
    shutil.copy(PLAN, SITE / EXAMPLE)
    count = len(list(SITE.rglob("*.html")))
    print(f"docs: {count} pages in {SITE.relative_to(ROOT)}/, no broken link or anchor,", end=" ")
    print(f"all {len(kvoffload.__all__)} public names have an entry")


if __name__ == "__main__":
    main()
