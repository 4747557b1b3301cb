"""The documents as a site: brings in what stands outside docs/, and checks what was built.

Two things that belong together. mkdocs calls the functions ``on_...`` (`mkdocs.yml`): the README is the first
page, the other documents of the root are pages, and a source file that a document links to becomes one. As a
script it builds the site, strictly, looks for every public name in it, and puts the page of an example plan
beside `docs/plan-page.md`, which shows it. Knows nothing of what pages say.

    python tools/docs_site.py        # make docs
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
"""What `make report` makes."""
EXAMPLE = "example-plan.html"
"""The same in the site, where `docs/plan-page.md` shows it."""
OUTSIDE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh", ".toml": "toml"}


def uri_of(name: str) -> str:
    """Where a file of the repository is in the site: the source of its page."""
    if name == "README.md":
        return "index.md"
    if name in OUTSIDE:
        return name
    return name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name}.md"


def name_of(uri: str) -> str:
    """The file of the repository that a page was made of."""
    if uri == "index.md":
        return "README.md"
    return uri if uri in OUTSIDE else f"docs/{uri}"


def linked(name: str) -> set[str]:
    """What a document links to, as names in the repository."""
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
    """Links lead to pages of the site, not to files of the repository."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    folder = Path(name_of(uri)).parent

    def moved(found: re.Match[str]) -> str:
        return relpath(uri_of(normpath(folder / found[1])), Path(uri).parent)

    return _LINK.sub(moved, markdown).replace("<details>", '<details markdown="1">')


def main() -> None:
    import kvoffload

    # Not --quiet: what mkdocs does not say it does not count, and `strict` counts.
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
    print(f"docs: {count} pages in {SITE.relative_to(ROOT)}/, no link or anchor leads nowhere,", end=" ")
    print(f"all {len(kvoffload.__all__)} public names have an entry")


if __name__ == "__main__":
    main()
