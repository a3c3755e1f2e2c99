"""Files for a hosting service and a release: workflow, templates, versions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[3]
FORMS = sorted(p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config")
SECTIONS = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def workflow_commands() -> str:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_workflow_runs_what_must_be_green_with_the_readmes_prerequisites_only() -> None:
    commands = workflow_commands()
    (asked,) = re.findall(r"`apt-get install ([^`]+)`", (ROOT / "README.md").read_text())
    assert commands.splitlines()[-1] == ".ci/run"
    installed = re.findall(r"apt-get install -y --no-install-recommends (.+)", commands)
    assert installed == ["ca-certificates", asked]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_is_one_that_the_service_takes(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in asked]
    assert len(ids) == len(set(ids)) > 1
    assert all(part["attributes"]["label"] for part in asked)
    assert {part["type"] for part in asked} <= {"input", "textarea"}


def test_sections_of_the_changelog_are_dated_versions_in_order() -> None:
    parsed = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((.+)\)", title) for title in SECTIONS]
    versions = [tuple(map(int, match.groups()[:3])) for match in parsed if match]
    assert len(versions) == len(SECTIONS)
    assert versions == sorted(versions, reverse=True)
    dates = [match[4] for match in parsed if match]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates[1:])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", dates[0])


def test_version_of_the_package_is_that_of_the_newest_section() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    suffix = ".dev0" if "unreleased" in SECTIONS[0] else ""
    assert project["version"] == SECTIONS[0].split()[0] + suffix


def test_security_policy_names_the_newest_version_and_the_next() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| ([^|]*\d[^|]*) \|", text, re.M)
    for title in SECTIONS[:2]:
        minor = ".".join(title.split(".")[:2])
        assert any(minor in row for row in rows), minor
