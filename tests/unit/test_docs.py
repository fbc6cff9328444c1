"""Links of pages lead somewhere, and their Python has names and options that ssdtrain has."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import ssdtrain
from checkout import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def anchors_of(page: str) -> set[str]:
    """Return the anchors that headings have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(link: str, path: Path, page: str) -> bool:
    """Whether a link of a page leads to a file, or a heading of it, that is there."""
    name, _, anchor = link.partition("#")
    target = path.parent / name
    if "://" in name or not (anchor and target.exists()):
        return "://" in name or target.exists()
    return anchor in anchors_of(target.read_text() if name else page)


def broken_links(path: Path, page: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCED.sub("", page)))
    return [link for link in links if not leads_somewhere(link, path, page)]


def refuse_unknown(code: str) -> None:
    """Raise for code that does not parse, or calls ssdtrain by an unknown name or option."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("ssdtrain"), name), _, options):
                known = inspect.signature(getattr(ssdtrain, name)).parameters
                assert {option.arg for option in options} <= set(known), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_python(path: Path) -> None:
    page = path.read_text()
    assert not broken_links(path, page)
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        refuse_unknown(code)
