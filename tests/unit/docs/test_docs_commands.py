"""Documentation stays true: every command it shows exists, every link leads somewhere."""

import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from muster.app.cli import COMMANDS, LAB, muster
from muster.chain.abi import artifact

ROOT = Path(__file__).parents[3]
PARTS = ("app", "client", "core", "lab", "orchestrator", "trainer")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _code_lines(page: Path) -> list[str]:
    blocks = re.findall(r"^ *```(?:sh|console|bash)\n(.*?)^ *```", page.read_text(), re.M | re.S)
    indented = re.findall(r"^    (make .*|muster .*)$", page.read_text(), re.M)
    joined = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [_without_prompt(line.strip()) for line in [*joined, *indented]]


def _without_prompt(line: str) -> str:
    command = re.sub(r"^(site\d)?\$ ", "", line)
    return command.split(" -- ")[-1] if command.startswith("torchrun") else command


MUSTER_LINES = [
    (page.name, line) for page in PAGES for line in _code_lines(page) if line.startswith("muster ")
]
MAKE_LINES = [
    (page.name, line) for page in PAGES for line in _code_lines(page) if line.startswith("make ")
]


@pytest.mark.parametrize(("page", "line"), MUSTER_LINES)
def test_a_documented_muster_command_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line.split(" #")[0].split("|")[0])[1:]
    command: click.Command = muster
    context = click.Context(muster)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None, f"{page}: {line}"
        command = found
    known = {option for p in command.get_params(context) for option in p.opts + p.secondary_opts}
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= known, f"{page}: {line}"


def test_examples_that_run_vllm_name_its_device() -> None:
    examples = [line for _, line in MUSTER_LINES]
    for name in ("doctor", "worker", "validator"):
        command = muster.get_command(click.Context(muster), name)
        group = command.commands.values() if isinstance(command, click.Group) else [command]
        examples += [line for each in group for line in (each.help or "").splitlines()]
    running = [line for line in examples if "--engine vllm" in line]
    # The default is the CPU, which vLLM's build for GPUs refuses.
    assert running
    assert [line for line in running if "--device" not in line] == []


def test_commands_to_install_are_in_the_package() -> None:
    page = (ROOT / "docs/guides/install.md").read_text()
    listed = re.findall(r"need no extra: (.*?)\.\s", page, re.S)
    purposes = re.findall(r"^\| (?:none|`[a-z0-9-]+`) \| (.*?) \|", page, re.M)
    texts = re.findall(r"`([a-z][a-z -]+)`", " ".join(listed + purposes))
    named = {text.split()[0] for text in texts} - {"make"}
    assert {"init", "worker", "orchestrator", "demo"} <= named
    assert named <= {name for name in COMMANDS if not COMMANDS[name].target.startswith(LAB)}


def test_a_worker_has_one_state_folder_for_each_run() -> None:
    code = [ROOT / "client/muster/client" / name for name in ("stake.py", "cli/network.py")]
    texts = [path.read_text() for path in [*code, *(ROOT / "docs/guides").glob("*.md")]]
    named = re.findall(r"(?:--state-dir |STATE=)~/\.muster/([a-z]+)", "\n".join(texts))
    assert set(named) == {"run", "juror"}


@pytest.mark.parametrize(("page", "line"), MAKE_LINES)
def test_a_documented_make_target_exists(page: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = shlex.split(line.split("#")[0])[1:]
    assert {w for w in words if "=" not in w} <= targets, f"{page}: {line}"


INDEX_NAME = re.compile(r"(?:pip install|dependencies =|hint).*muster-rl")
"""Words that have somebody install the package of an index, where anybody may own the name."""
SHOWN = [ROOT / "CHANGELOG.md", *PAGES, *sorted((ROOT / "examples").rglob("*.*"))]


def test_nobody_is_told_to_install_a_package_of_the_index() -> None:
    code = [path for part in PARTS for path in (ROOT / part / "muster").rglob("*.py")]
    told = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*SHOWN, *code]
        if path.suffix in (".py", ".md", ".toml", ".ipynb")
        for line in path.read_text().splitlines()
        if INDEX_NAME.search(line)
    ]
    assert told == []


def test_the_wheel_to_install_is_this_trees() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    page = (ROOT / "docs/guides/install.md").read_text()
    assert set(re.findall(r"muster_rl-([0-9][^-]*)-", page)) == {version}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


HEADINGS = set(re.findall(r"^##+ (\d+(?:\.\d+)?)", (ROOT / "docs/protocol.md").read_text(), re.M))
PARTED = {number.split(".")[0] for number in HEADINGS if "." in number}
CITATION = re.compile(
    r"protocol\.md\)?,?\s+sections?\s+(\d+(?:\.\d+)?)(?:\s+(?:and|to)\s+(\d+(?:\.\d+)?))?"
)


@pytest.mark.parametrize("part", ["docs", *PARTS])
def test_a_section_of_the_protocol_is_cited_by_its_smallest_part(part: str) -> None:
    pages = [path for kind in ("*.py", "*.md") for path in (ROOT / part).rglob(kind)]
    cited = [
        (path.name, number)
        for path in pages
        for found in CITATION.findall(path.read_text())
        for number in found
        if number
    ]
    assert [each for each in cited if each[1] not in HEADINGS - PARTED] == []


SOLIDITY = set(
    re.findall(r"\w+", "".join(p.read_text() for p in (ROOT / "contracts").rglob("*.sol")))
)


def missing_names(text: str) -> list[str]:
    """Return the modules, functions and contracts' names in backticks that do not exist."""
    # Entry points have groups that are no modules.
    python = re.findall(r"(?<!group )`(muster(?:\.\w+)+)`", text)
    members = re.findall(r"`([A-Z]\w+)\.([a-z]\w*)`", text)
    plain = re.findall(r"`([a-z]{2,}[A-Z][a-z]\w*)(?:\(\))?`", text)
    return [
        *(name for name in python if not _exists(name)),
        *(f"{owner}.{name}" for owner, name in members if not _has(owner, name)),
        *(name for name in plain if name not in SOLIDITY),
    ]


def _exists(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    try:
        return hasattr(import_module(parent), last) or find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _has(contract: str, name: str) -> bool:
    path = ROOT / "core" / "muster" / "chain" / "artifacts" / f"{contract}.json"
    return not path.exists() or name in {each.get("name") for each in artifact(contract)["abi"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_of_modules_and_contracts_exist(page: Path) -> None:
    # Decisions are history.
    assert "decisions" in page.parts or missing_names(page.read_text()) == []


def test_a_name_that_is_gone_is_found() -> None:
    there = "`muster.inference.sampling.replay_block`, `RunRegistry.termsAt`, `seatBitOf`"
    gone = ["muster.inference.replay", "muster.gone.replay", "RunRegistry.rotateValidator",
            "slashOverdue"]  # fmt: skip
    assert missing_names(there + "".join(f" `{name}`" for name in gone)) == gone


def test_every_glossary_word_is_defined_once() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| ", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(rows) == len(set(rows)) > 20
