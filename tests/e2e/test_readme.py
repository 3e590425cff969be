"""The README's examples, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launched_stack import LaunchedStack
from tests.conftest import ROOT

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
EXAMPLES = [
    (language, code)
    for language, code in BLOCKS
    if "127.0.0.1" in code and "make serve" not in code
]
ANSWERS = {"curl": "Paris", "from": " ", "grpcurl": " Paris"}


def test_there_are_three_examples() -> None:
    assert {code.split()[0] for _, code in EXAMPLES} == set(ANSWERS)


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[e[1].split()[0] for e in EXAMPLES])
def test_an_example_runs(language: str, code: str, stack: LaunchedStack) -> None:
    here = code.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}")
    here = here.replace("127.0.0.1:50051", stack.grpc_address)
    command = [sys.executable, "-c", here] if language == "python" else ["bash", "-ec", here]
    bin_dir = str(Path(sys.executable).parent)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert ANSWERS[code.split()[0]] in done.stdout
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())))
)
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
