"""Every program in `benchmarks/` says what it measures and takes what all of them take."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROGRAMS = sorted(path for path in BENCHMARKS.glob("*.py") if not path.name.startswith("rig"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_help_names_the_common_options(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--quick" in said and "--json FILE" in said
    question = runpy.run_path(str(program))["__doc__"].split("?")[0].split()
    assert " ".join(question[:6]) in " ".join(said.split()), "the help says what is asked"
