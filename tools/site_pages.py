"""Generates the site's pages that are not files of docs/; mkdocs.yml names this as its hook.

These are the pages of the Python API, of the contracts (from their natspec), of the HTTP API (from
docs/reference/openapi.json), and of files at the top of the tree. Files outside docs/ that pages
link to are copied beside them.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()((?!https?:|#|mailto:)[^)#\s]+)")

PROJECT = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "conduct": "CODE_OF_CONDUCT.md",
}
"""Pages of the project, and their files at the top of the tree."""

PACKAGES = ("api", "chain", "deploy", "inference", "shardcast", "tasks", "toploc")
"""Packages that programs may use: their API is what they export."""

MODULES = ("protocol.messages", "protocol.ids", "protocol.reasons", "protocol.errors", "wallet")
"""Further modules, whose whole content is API."""

SCRIPTS = {
    "mermaid.tiny.js": "@mermaid-js/tiny/dist/mermaid.tiny.js",
    "iframe-worker.js": "iframe-worker/shim/index.js",
}
"""Scripts of the site (diagrams, search without a server), and their places under npm."""

SOLC_TIMEOUT_S = 60


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the scripts, and the files outside docs/ that pages link to."""
    for name, script in SCRIPTS.items():
        source = str(ROOT / "node_modules" / script)
        files.append(File.generated(config, f"assets/{name}", abs_src_path=source))
    for path, text in made_pages():
        files.append(File.generated(config, path, content=text))
    for path in sorted(linked_outside()):
        files.append(File.generated(config, _place_of(path), abs_src_path=str(path)))
    config.nav = _expanded(config.nav, _named(config.nav), sorted(_paths_of(files)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links that leave docs/ changed to the copies."""
    if page.file.generated_by:
        return markdown
    uri = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        path = (DOCS / uri).parent.joinpath(match[2]).resolve()
        if path.is_dir():
            return f"{match[1]}{match[2]}index.md"
        if path.is_relative_to(DOCS) or not path.is_file():
            return match[0]
        return match[1] + "../" * uri.count("/") + _place_of(path)

    return LINK.sub(led, markdown)


def made_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of every generated page."""
    for name, source in PROJECT.items():
        text = (ROOT / source).read_text()
        yield f"project/{name}.md", LINK.sub(_from_project, text)
    yield "decisions/index.md", decisions_page()
    document = json.loads((DOCS / "reference" / "openapi.json").read_text())
    yield "reference/http-api.md", http_page(document)
    for package in PACKAGES:
        names = exported(ROOT / "core" / "muster" / package / "__init__.py")
        yield f"reference/python/{package}.md", python_page(f"muster.{package}", names)
    for module in MODULES:
        yield f"reference/python/{module}.md", python_page(f"muster.{module}", [])
    for name, text in contract_pages():
        yield f"reference/contracts/{name}.md", text


def linked_outside() -> set[Path]:
    """Return the files outside docs/ that its pages link to and that have no page."""
    found = {
        (page.parent / link).resolve()
        for page in DOCS.rglob("*.md")
        for _, link in LINK.findall(page.read_text())
    }
    own = {*(ROOT / source for source in PROJECT.values())}
    return {path for path in found - own if path.is_file() and not path.is_relative_to(DOCS)}


def _place_of(path: Path) -> str:
    """Return where a file outside docs/ is on the site."""
    name = path.relative_to(ROOT).as_posix()
    pages = {source: f"project/{page}.md" for page, source in PROJECT.items()}
    return pages.get(name, f"files/{name}")


def _from_project(match: re.Match[str]) -> str:
    """Return a link of a file at the top of the tree, changed for its page in project/."""
    path = (ROOT / match[2]).resolve()
    inside = path.is_relative_to(DOCS)
    return f"{match[1]}../{path.relative_to(DOCS).as_posix() if inside else _place_of(path)}"


def decisions_page() -> str:
    """Return the list of decisions."""
    heads = {
        page.name: page.read_text().splitlines()[0].removeprefix("# ")
        for page in sorted((DOCS / "decisions").glob("*.md"))
    }
    lines = [f"* [{title}]({name})" for name, title in heads.items()]
    return "\n".join(["# Decisions", "", "Why things are as they are.", "", *lines]) + "\n"


def exported(init: Path) -> list[str]:
    """Return the names that a package exports: imported as themselves, or assigned."""
    names: list[str] = []
    for node in ast.parse(init.read_text()).body:
        match node:
            case ast.ImportFrom(names=imported):
                names += [each.name for each in imported if each.asname == each.name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.append(name)
    if not names:
        raise ValueError(f"{init} exports nothing: it imports no name as itself")
    return sorted(names)


def python_page(module: str, names: list[str]) -> str:
    """Return the page of a module: what it exports, or all of it."""
    members = f"\n    options:\n      members: {json.dumps(names)}\n" if names else "\n"
    return f"# {module}\n\n::: {module}{members}"


def http_page(document: dict[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    parts = [
        "# HTTP API",
        "What an orchestrator answers, as it says itself under `/openapi.json`; the same document "
        "is [openapi.json](openapi.json). How requests are signed is in "
        "[the protocol](../protocol.md).",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(f"{method.upper()} {path}", operation)
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"## {name}", schema.get("description", ""), _fields(schema)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _operation(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"## `{title}`"
    yield operation.get("description") or operation.get("summary", "")
    given = [
        f"| `{p['name']}` | {p['in']} | {_kind(p['schema'])} | {_cell(p.get('description', ''))} |"
        for p in operation.get("parameters", ())
    ]
    if given:
        yield "\n".join(["| parameter | in | type | |", "|---|---|---|---|", *given])
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body `{media}`: {_kind(content.get('schema', {}))}."
    rows = [
        f"| {status} | {_cell(answer.get('description', ''))} | {_answered(answer)} |"
        for status, answer in operation["responses"].items()
    ]
    yield "\n".join(["| status | when | answer |", "|---|---|---|", *rows])


def _answered(answer: dict[str, Any]) -> str:
    kinds = answer.get("content", {}).items()
    return ", ".join(f"{_kind(content.get('schema', {}))} (`{media}`)" for media, content in kinds)


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(_kind, schema[several]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type") or "anything")


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_kind(field)}{'' if name in required else ', optional'} | "
        f"{_cell(field.get('description', ''))} |"
        for name, field in schema.get("properties", {}).items()
    ]
    return "\n".join(["| field | type | |", "|---|---|---|", *rows]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;")


def contract_pages() -> Iterator[tuple[str, str]]:
    """Yield name and page of each interface, from the syntax trees of solc."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted((ROOT / "contracts/src/interfaces").glob("I*.sol"))
    }
    document = {
        "language": "Solidity",
        "sources": {name: {"content": text} for name, text in sources.items()},
        "settings": {"stopAfter": "parsing", "outputSelection": {"*": {"": ["ast"]}}},
    }
    done = subprocess.run(
        [str(ROOT / "tools" / "solc"), "--standard-json"],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=SOLC_TIMEOUT_S,
        check=True,
    )
    for name, parsed in json.loads(done.stdout)["sources"].items():
        yield Path(name).stem.removeprefix("I"), contract_page(name, parsed["ast"], sources[name])


def contract_page(name: str, tree: dict[str, Any], source: str) -> str:
    """Return the page of a file of interfaces: what it declares and the natspec above it."""
    parts = [f"# {Path(name).stem.removeprefix('I')}", f"Natspec of `{name}`."]
    contracts = [n for n in tree["nodes"] if n["nodeType"] == "ContractDefinition"]
    for contract in reversed(contracts):
        title, notes = natspec(contract)
        parts += [f"## {title or contract['name']}", f"`{contract['name']}`", *notes]
        for node in contract["nodes"]:
            if node["nodeType"] in KINDS:
                parts += _declared(node, source)
    return "\n\n".join(parts) + "\n"


KINDS = {
    "FunctionDefinition": "function",
    "EventDefinition": "event",
    "ErrorDefinition": "error",
    "StructDefinition": "struct",
    "EnumDefinition": "enum",
}
"""Kinds of declarations that pages show, by their node in solc's tree."""


def _declared(node: dict[str, Any], source: str) -> Iterator[str]:
    _, notes = natspec(node)
    start, size, _ = map(int, node["src"].split(":"))
    # solc's offsets count bytes.
    text = source.encode()[start : start + size].decode()
    yield f"### {KINDS[node['nodeType']]} `{node['name']}`"
    yield f"```solidity\n{re.sub(r'^    ', '', text, flags=re.M)}\n```"
    yield from notes


def natspec(node: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the title and the paragraphs of the comment above a node."""
    text = (node.get("documentation") or {}).get("text", "")
    title, notes = "", []
    for tag, words in re.findall(r"@(\w+)\s+(.*?)(?=\n?\s*@\w+\s|\Z)", text, re.S):
        words = " ".join(words.split())
        if tag == "title":
            title = words
        elif tag == "param":
            parameter, _, meaning = words.partition(" ")
            notes.append(f"* `{parameter}`: {meaning}")
        elif tag == "return":
            notes.append(f"* returns {words}")
        else:
            notes.append(words)
    return title, notes


def _paths_of(files: Files) -> Iterator[str]:
    return (file.src_uri for file in files.documentation_pages())


def _named(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    entries = nav.values() if isinstance(nav, dict) else nav
    return {path for entry in entries for path in _named(entry)}


def _expanded(nav: list[Any], named: set[str], paths: list[str]) -> list[Any]:
    """Return the navigation with each `folder/*` replaced by pages that no other entry names."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, str):
                inner = _below(inner, named, paths) if inner.endswith("*") else inner
            else:
                inner = _expanded(inner, named, paths)
            entries.append({title: inner})
        else:
            entries += _below(entry, named, paths) if entry.endswith("*") else [entry]
    return entries


def _below(pattern: str, named: set[str], paths: list[str]) -> list[str]:
    folder = pattern.removesuffix("*")
    found = [
        path
        for path in paths
        if path.startswith(folder) and "/" not in path.removeprefix(folder) and path not in named
    ]
    return sorted(found, key=lambda path: not path.endswith("index.md"))
