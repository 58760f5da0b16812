"""What the README and the docs say works: code runs, commands parse, targets and links exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import LiveServer, real_server

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.M | re.S)
WITH_SERVER = re.compile(r"^<!-- runnable with a server -->\n```python\n(.*?)^```$", re.M | re.S)
SERVER = "http://127.0.0.1:8000"  # where the docs have it


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


def curls() -> list[tuple[str, str]]:
    """All calls of curl in console blocks, over as many lines as they have."""
    call = re.compile(r"^\$ (curl (?:[^\n]*\\\n)*[^\n]*)$", re.M)
    return [(page, command) for page, block in blocks("console") for command in call.findall(block)]


def examples(kind: re.Pattern[str]) -> list[object]:
    """The blocks of Python that a mark before them says to run."""
    return [
        pytest.param(code, id=f"{name(page)}-{index}")
        for page in PAGES
        for index, code in enumerate(kind.findall(page.read_text()))
    ]


LINKS = [
    pytest.param(page, link, id=f"{name(page)}:{link}")
    for page in PAGES
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    if not re.match(r"\w+:", link)
]


@pytest.mark.parametrize("code", examples(RUNNABLE))
def test_examples_in_the_docs_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    if "from_pretrained(path" in code:
        from tests.small_llm import save_folder

        names["path"] = str(save_folder(tmp_path / "model"))
    exec(compile(code, "example", "exec"), names)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    from tests.small_llm import save_folder

    folder = str(save_folder(tmp_path_factory.mktemp("model")))
    store = tmp_path_factory.mktemp("store") / "store.db"
    with real_server(folder, store=store, names=("smollm2-135m",)) as live:
        yield live


@pytest.mark.parametrize("code", examples(WITH_SERVER))
def test_examples_of_clients_run(code: str, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert SERVER in code
    exec(compile(code.replace(SERVER, server.url), "example", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out


@pytest.mark.parametrize(("page", "command"), curls())
def test_calls_of_curl_are_answered(page: str, command: str, server: LiveServer) -> None:
    assert SERVER in command
    here = command.replace(SERVER, server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"


def test_the_servers_page_has_calls_and_clients() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    assert len(WITH_SERVER.findall(page)) >= 2
    assert len([page for page, _ in curls() if page == "docs/server.md"]) >= 5


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
