"""What the README and the docs say works: code runs, commands parse, targets and links exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.M | re.S)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str) -> list[tuple[str, str]]:
    """All fenced blocks of a language: the page's name and the block."""
    return [(name(page), code) for page in PAGES for kind, code in FENCE.findall(page.read_text()) if kind == language]


def commands(program: str) -> list[tuple[str, str]]:
    """All lines of a program in console blocks, what is piped into it left out."""
    found = []
    for page, block in blocks("console"):
        for line in re.findall(r"^\$ (.*)$", block, re.M):
            command = line.split(" | ")[-1]
            if command.split()[0] == program:
                found.append((page, command))
    return found


RUNNABLE_BLOCKS = [
    pytest.param(code, id=f"{name(page)}-{index}")
    for page in PAGES
    for index, code in enumerate(RUNNABLE.findall(page.read_text()))
]
LINKS = [
    pytest.param(page, link, id=f"{name(page)}:{link}")
    for page in PAGES
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    if not re.match(r"\w+:", link)
]


@pytest.mark.parametrize("code", RUNNABLE_BLOCKS)
def test_examples_in_the_docs_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    if "from_pretrained(path" in code:
        from tests.small_llm import save_folder

        names["path"] = str(save_folder(tmp_path / "model"))
    exec(compile(code, "example", "exec"), names)


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_all_python_in_the_docs_is_python(page: str, code: str) -> None:
    compile(code, page, "exec")


def test_the_readme_has_a_library_example_that_runs() -> None:
    assert RUNNABLE.search((ROOT / "README.md").read_text())


@pytest.mark.parametrize(("page", "command"), commands("kvpager"))
def test_commands_are_understood(page: str, command: str) -> None:
    from kvpager.cli.main import build_parser

    build_parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize(("page", "command"), commands("make"))
def test_make_targets_exist(page: str, command: str) -> None:
    target = shlex.split(command, comments=True)[1]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{page}: make has no target {target}"


def test_the_readme_has_exactly_two_setup_commands() -> None:
    setup = [command for page, command in commands("make") if page == "README.md"]
    assert [shlex.split(command, comments=True) for command in setup] == [["make", "demo"], ["make", "test"]]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_inside_the_project_resolve(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    assert target.exists(), f"{name(page)} links to {link}"
    if anchor:
        assert anchor in anchors(target), f"{name(page)} links to {link}"


def test_the_docs_name_every_package_and_layer() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    source = ROOT / "src" / "kvpager"
    present = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == present - {"__init__", "__main__"}
