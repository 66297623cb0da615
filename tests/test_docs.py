"""The pages say what is there."""

from __future__ import annotations

import re

from tests.module_table import PAGE, ROOT, page

PAGES = (
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "training/README.md"),
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)


def test_the_module_table_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.module_table`"


def test_every_link_to_a_file_leads_somewhere() -> None:
    for name in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in ("demo", "generate", "inspect", "verify", "serve", "drift"):
        assert f"`routebook {command}" in readme
