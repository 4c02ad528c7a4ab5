"""Imports point one way: stability -> probes, stability -> theory; the command line's help loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    return {line.split(".")[0] for line in done.stdout.split()}


def test_import_contracts() -> None:
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_theory_runs_without_torch_and_without_the_other_packages() -> None:
    loaded = modules_after("import theory\ntheory.comparison\ntheory.heavy_hitter.input_stability.expression")
    assert "theory" in loaded
    assert not loaded & {"torch", "probes", "stability"}


def test_probes_runs_without_theory_and_stability() -> None:
    loaded = modules_after("import probes\nprobes.measure, probes.watch, probes.TopK(5)")
    assert "torch" in loaded
    assert not loaded & {"theory", "stability"}


def test_command_line_help_loads_nothing_heavy() -> None:
    loaded = modules_after(
        "import contextlib, io\nfrom stability.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    app(['--help'])"
    )
    assert "stability" in loaded
    heavy = {"torch", "pandas", "numpy", "sympy", "scipy", "matplotlib", "pyarrow", "transformers", "probes"}
    assert not loaded & heavy
