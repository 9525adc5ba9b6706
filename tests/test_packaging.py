"""What is installed is what is in the tree, and roles load only what they need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
HEAVY = {"torch", "transformers", "nixl_cu12", "gguf"}


def test_the_list_of_packages_is_the_tree() -> None:
    found = set()
    for package, folder in MAPPED.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_python_folder_is_a_package() -> None:
    for folder in MAPPED.values():
        for source in (ROOT / folder).rglob("*.py"):
            assert (source.parent / "__init__.py").exists(), source


def test_init_files_hold_one_docstring() -> None:
    for folder in MAPPED.values():
        for init in (ROOT / folder).rglob("__init__.py"):
            text = init.read_text().strip()
            assert text.startswith('"""') and text.endswith('"""') and text.count('"""') == 2, init


def test_links_for_the_static_tools_lead_to_the_roots() -> None:
    links = ROOT / "infra" / "namespace" / "kvass"
    for package, folder in MAPPED.items():
        link = links / package.removeprefix("kvass.")
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == (ROOT / folder).resolve()
        assert (ROOT / folder / "py.typed").exists()


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in wanted:
        plain = requirement.split(";")[0].split("[")[0]
        package = plain.split(">")[0].split("=")[0].split("<")[0].strip().lower()
        assert package.replace("_", "-") in pinned, requirement
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize(
    "module",
    [
        "kvass.launch.cli",
        "kvass.launch.member",
        "kvass.gateway.app",
        "kvass.common.member",
        "kvass.common.model.identity",
        "kvass.common.model.tokenizer",
    ],
)
def test_no_torch_where_none_is_needed(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_a_store_node_loads_no_torch() -> None:
    code = "import sys, kvass.kvstore.node.service; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def set_up(tmp_path: Path, **stubs: str) -> str:
    """Run `infra/setup` where some programs are not what they should be; return what it says."""
    (tmp_path / "infra").mkdir()
    script = tmp_path / "infra" / "setup"
    script.write_text((ROOT / "infra" / "setup").read_text())
    for program, text in stubs.items():
        stub = tmp_path / program.replace("_", ".")
        stub.write_text(f"#!/bin/sh\n{text}\n")
        stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), ".venv"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
    return done.stderr


def test_set_up_says_that_python_is_too_old(tmp_path: Path) -> None:
    old = 'test "$1" = --version && echo Python 3.9.2'
    said = set_up(tmp_path, python3=old, python3_11=old, python3_12=old, python3_13=old)
    assert "no Python 3.11 or newer was found (python3 is: Python 3.9.2)" in said


def test_set_up_says_that_venv_is_missing(tmp_path: Path) -> None:
    said = set_up(tmp_path, python3='case "$2" in *ensurepip*) exit 1 ;; esac')
    assert "python3-venv" in said


def test_set_up_says_that_space_is_missing(tmp_path: Path) -> None:
    said = set_up(tmp_path, python3="exit 0", df="printf 'head\\n/dev/x 9 9 2097152 9%% /\\n'")
    assert "2 GB are free here; installing needs 5" in said


def test_a_wheel_has_the_library_and_serves_every_python(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path)]
    command += ["bdist_wheel", "--bdist-dir", str(tmp_path / "made"), "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    files = zipfile.ZipFile(wheel).namelist()
    assert "kvass/common/native/libkvass.so" in files
    assert not [name for name in files if name.endswith((".cpp", ".h"))]
