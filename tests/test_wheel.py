"""A wheel, installed where nothing but NumPy is, runs the example."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "kvpager").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {file for file in inside if ".dist-info/" not in file} == wanted
    assert "kvpager/py.typed" in inside
    assert any(file.endswith("licenses/LICENSE") for file in inside)


@pytest.mark.slow
def test_the_wheel_runs_the_example_with_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pins = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", pins, wheel, cwd=tmp_path)
    look = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'rich') if u.find_spec(n)])"
    assert run(python, "-c", look, cwd=tmp_path).strip() == "[]"
    output = run(python, "-I", ROOT / "examples" / "paged_cache.py", cwd=tmp_path)
    assert "recall" in output
    assert run(tmp_path / "venv" / "bin" / "kvpager", "--version", cwd=tmp_path).startswith("kvpager ")
    assert run(tmp_path / "venv" / "bin" / "kvpager", "--help", cwd=tmp_path)
