"""Build the documentation site: `make site` writes build/site, and fails at a dead link.

The pages are the Markdown files of the repository, copied to build/site-pages with README.md as the start
page. A link from one page to another is rewritten to its new place. A link to any other file of the
repository becomes plain text, so that the site needs no network. A link to a file that does not exist is an
error, and so is a link to a heading that does not exist (mkdocs reports it in strict mode).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

START_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "ROADMAP.md": "roadmap.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages outside docs/, and their places on the site."""

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and build the site; return the exit status."""
    parser = argparse.ArgumentParser(description="build the documentation site")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--check", action="store_true", help="only check the links and paths of all pages")
    chosen = parser.parse_args(arguments)
    root: Path = chosen.root
    pages = collect_pages(root)
    texts, problems = {}, find_dead_paths(root, pages)
    for source, target in pages.items():
        texts[target], dead = rewrite_links(root, source, pages)
        problems += dead
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    if chosen.check:
        return 0
    folder = root / "build" / "site-pages"
    shutil.rmtree(folder, ignore_errors=True)
    for target, text in texts.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(text, "utf-8")
    for file in (root / "docs").rglob("*.json"):
        shutil.copy(file, folder / file.relative_to(root / "docs"))
    environ = dict(os.environ, NO_MKDOCS_2_WARNING="true")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"]
    return subprocess.run(command, cwd=root, env=environ, check=False).returncode


def collect_pages(root: Path) -> dict[str, str]:
    """Return the place on the site of every page, by its path in the repository."""
    pages = {source: target for source, target in START_PAGES.items() if (root / source).exists()}
    for file in sorted((root / "docs").rglob("*.md")):
        pages[file.relative_to(root).as_posix()] = file.relative_to(root / "docs").as_posix()
    return pages


def rewrite_links(root: Path, source: str, pages: dict[str, str]) -> tuple[str, list[str]]:
    """Return the text of a page with its links rewritten for the site, and the dead links."""
    text = (root / source).read_text("utf-8")
    dead: list[str] = []
    here = (root / source).parent

    def rewrite(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match.group(0)
        place = Path(os.path.normpath(here / path))
        if not place.exists():
            dead.append(f"{source}: the link to {link} is dead")
            return match.group(0)
        name = place.relative_to(root).as_posix() if place.is_relative_to(root) else ""
        if name in pages:
            return f"[{label}]({os.path.relpath(pages[name], Path(pages[source]).parent)}{mark}{anchor})"
        if name.startswith("docs/") and place.is_file():
            return match.group(0)
        return label

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts), dead


_PATH = re.compile(r"`((?:src/paceline/)?(?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|md|toml|json|txt|c))(?::\d+)?`")


def find_dead_paths(root: Path, pages: dict[str, str]) -> list[str]:
    """Return the paths in backticks that name no file of the repository, by page.

    A path is looked for from the root, in src/paceline and in docs.
    """
    problems = []
    for source in pages:
        for number, line in enumerate((root / source).read_text("utf-8").splitlines(), 1):
            for path in _PATH.findall(line):
                places = (root, root / "src" / "paceline", root / "docs", (root / source).parent)
                if not any((place / path).exists() for place in places):
                    problems.append(f"{source}:{number}: there is no file {path}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
