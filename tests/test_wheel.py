"""What is handed out: the wheel with compiled kernels, the one made without a compiler, and the sources."""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
NATIVE = "kvpager/native/"
# What git ignores, but a copy of the working tree would take along.
MADE = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def build(kind: str, source: Path, to: Path, **environment: str) -> Path:
    """Build a wheel or an sdist with what is installed here."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", to, source, cwd=to, **environment)
    (built,) = to.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where the project is: what was compiled for installing it is used again, by one process at a time."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where the compiler fails at everything, as one that isn't there, and an old extension lies about."""
    folder = tmp_path_factory.mktemp("pure")
    shutil.copytree(ROOT, folder / "source", ignore=MADE)
    (folder / "source" / "src" / "kvpager" / "_native.abi3.so").write_bytes(b"")
    (folder / "out").mkdir()
    return build("wheel", folder / "source", folder / "out", CXX=str(shutil.which("false")))


def sources() -> set[str]:
    """The package's files, as a wheel names them, without what was built in its place."""
    source = ROOT / "src"
    return {
        str(path.relative_to(source))
        for path in (source / "kvpager").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def package(wheel: Path) -> set[str]:
    """A wheel's files, without what describes it."""
    return {file for file in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in file}


def program(wheel: Path, folder: Path, code: str) -> str:
    """What a program says that sees the wheel's package and NumPy, and nothing else that is installed."""
    zipfile.ZipFile(wheel).extractall(folder)
    paths = [str(folder), str(Path(np.__file__).parent.parent)]
    return run(sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths}\n{code}", cwd=folder)


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_data_and_the_extension_and_nothing_else(wheel: Path) -> None:
    inside = package(wheel)
    compiled = {file for file in inside if file.startswith("kvpager/_native.") and file.endswith(".so")}
    assert len(compiled) == 1
    assert inside - compiled == {file for file in sources() if not file.startswith(NATIVE)}
    assert {"kvpager/py.typed", "kvpager/_native.pyi"} <= inside
    assert any(file.endswith("licenses/LICENSE") for file in zipfile.ZipFile(wheel).namelist())
    assert "-none-any" not in wheel.name


@pytest.mark.slow
def test_the_wheel_runs_the_example_with_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pins = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", pins, wheel, cwd=tmp_path)
    look = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'rich') if u.find_spec(n)])"
    assert run(python, "-c", look, cwd=tmp_path).strip() == "[]"
    output = run(python, "-I", "-W", "error", ROOT / "examples" / "paged_cache.py", cwd=tmp_path)
    assert "recall" in output
    assert run(tmp_path / "venv" / "bin" / "kvpager", "--version", cwd=tmp_path).startswith("kvpager ")
    assert run(tmp_path / "venv" / "bin" / "kvpager", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(pure: Path) -> None:
    assert package(pure) == {file for file in sources() if not file.startswith(NATIVE)}
    assert pure.name.endswith("-py3-none-any.whl")


OPEN = """
from kvpager import KVShape, Pager, PagerConfig
from kvpager.kernels.choose import native_available
for pool in (16, 32, 64):
    with Pager(KVShape(layers=1, kv_heads=2, query_heads=4, head_dim=16), PagerConfig(pool=pool)):
        print("compiled" if native_available() else "reference")
"""


@pytest.mark.slow
def test_without_a_compiler_the_reference_serves_with_one_warning(pure: Path, tmp_path: Path) -> None:
    said = program(pure, tmp_path, OPEN)
    assert said.count("reference\n") == 3
    assert said.count("RuntimeWarning") == 1
    assert "the compiled kernels are not built" in said


@pytest.mark.slow
def test_with_a_compiler_the_compiled_kernel_serves_without_a_word(wheel: Path, tmp_path: Path) -> None:
    assert program(wheel, tmp_path, OPEN) == "compiled\n" * 3


@pytest.mark.slow
def test_the_sources_can_be_compiled_from(tmp_path: Path) -> None:
    built = build("sdist", ROOT, tmp_path)
    with tarfile.open(built) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE"} <= inside
    assert {f"src/{file}" for file in sources()} <= inside
    assert not [file for file in inside if file.startswith("build/") or file.endswith(".so")]
