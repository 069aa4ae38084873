"""A hook of mkdocs: files outside docs/ that pages link to become part of the site.

Links in the pages are those of the repository (`../results/recall.md`), so that they work there too. On the site such a
file stands under `repository/`; a folder stands for its README, or for the list of its files.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")


def outside(page: str) -> dict[str, Path]:
    """The links of a page that lead out of docs/, and where to."""
    source = ROOT / "docs" / page
    targets = {link: (source.parent / link).resolve() for link in LINK.findall(source.read_text(encoding="utf-8"))}
    return {link: path for link, path in targets.items() if not path.is_relative_to(ROOT / "docs")}


def place(path: Path) -> str:
    """Where a file or folder of the repository stands on the site."""
    inside = "repository" / path.relative_to(ROOT)
    return f"{inside}/index.md" if path.is_dir() else f"{inside}.md" if path.suffix == ".py" else str(inside)


def text(path: Path) -> str | bytes:
    """What stands there: Python as a listing, a folder as its README or a list, anything else as it is."""
    if path.is_dir():
        names = "".join(f"- `{one.name}`\n" for one in sorted(path.iterdir()) if not one.name.startswith((".", "__")))
        readme = path / "README.md"
        return readme.read_text(encoding="utf-8") if readme.exists() else f"# {path.relative_to(ROOT)}\n\n{names}"
    if path.suffix == ".py":
        return f"# {path.relative_to(ROOT)}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
    return path.read_bytes()


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to."""
    pages = [file.src_uri for file in files.documentation_pages()]
    for path in {path for page in pages for path in outside(page).values()}:
        files.append(File.generated(config, place(path), content=text(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where those files stand."""
    source = page.file.src_uri
    if source.startswith("repository/"):
        return re.sub(r"!?\[([^]]*)\]\((?!http)[^)]*\)", r"\1", markdown)  # their own links are the repository's
    found = {link: os.path.relpath(place(path), Path(source).parent) for link, path in outside(source).items()}
    return LINK.sub(lambda match: found.get(match[1], match[1]), markdown)
