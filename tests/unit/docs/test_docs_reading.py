"""docs/reading.md: every name that it tells a reader to look at exists where it says."""

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
# In the story's table, the names are in the cell after the file's.
LINK = re.compile(r"\]\((?P<file>\.\./[\w./]+\.(?:py|sol))\)(?: \|)?(?P<after>[^|\]]*)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
NAMED = [
    pytest.param(link["file"], name, id=f"{Path(link['file']).name}-{name}")
    for link in LINK.finditer((DOCS / "reading.md").read_text())
    for name in NAME.findall(link["after"].split("[")[0]) or [""]
]
FILE_LINK = re.compile(r"\[(?P<text>[\w./-]+\.(?:py|sol|md))\]\((?P<file>[\w./-]+)")
TEXTS = sorted(set(FILE_LINK.findall((DOCS / "reading.md").read_text())))
FOLDERS = ["app", "client", "core", "docs", "lab", "orchestrator", "tests", "tools", "trainer"]
FOLDERS += [f"contracts/{name}" for name in ("script", "src", "test")]
FILES = [path for folder in FOLDERS for path in (DOCS.parent / folder).rglob("*.*")]
FILES += DOCS.parent.glob("*.md")


def names_of(path: Path) -> set[str]:
    """Return what a module or a contract defines: functions, structs, classes, methods, fields,
    constants.
    """
    if path.suffix == ".sol":
        return {"", *re.findall(r"\b(?:function|struct|constant) (\w+)", path.read_text())}
    found = {""}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                found.add(name)
            case ast.ClassDef(name, body=body):
                inside = [_name_of(each) for each in body]
                found |= {name, *(f"{name}.{each}" for each in inside if each)}
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                found.add(name)
    return found


def _name_of(member: ast.stmt) -> str | None:
    match member:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
            return name
        case ast.AnnAssign(target=ast.Name(name)):
            return name
    return None


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_a_reader_shall_look_at_exists(file: str, name: str) -> None:
    assert name in names_of(DOCS / file)


@pytest.mark.parametrize(("text", "file"), TEXTS)
def test_a_link_says_which_of_the_files_of_a_name_it_means(text: str, file: str) -> None:
    assert [path for path in FILES if str(path).endswith(f"/{text}")] == [(DOCS / file).resolve()]


def test_the_page_names_as_many_files_as_a_reader_can_take() -> None:
    story = (DOCS / "reading.md").read_text().split("## To add")[0]
    files = {link["file"] for link in LINK.finditer(story)}
    assert 20 <= sum("/tests/" not in file for file in files) <= 30
