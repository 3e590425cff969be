import socket
from pathlib import Path

import pytest

from services.stack import launcher
from services.stack.launcher import serve


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch leaves this process's logging alone."""
    monkeypatch.setattr(launcher, "configure_logging", lambda *_, **__: None)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Named, so that no launch looks for the embedded model."""
    return str(tmp_path / "model.gguf")


def test_a_second_stack_on_a_port_is_one_clear_failure(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would take the first one's readiness for its own, and restart a gateway for ever."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert serve(["--model", model, "--port", str(port)]) == 1
    captured = capfd.readouterr()
    assert captured.err.splitlines() == [
        f"seamline: cannot listen on 127.0.0.1:{port}: Address already in use"
    ]
    assert captured.out == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "File exists"),
        ("file/below", "Not a directory"),
        ("x" * 120, "too long"),
        ("a,b", "comma"),
    ],
)
def test_a_folder_for_sockets_that_cannot_be_is_one_clear_failure(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / name
    assert serve(["--model", model, "--port", "0", "--run-dir", str(folder)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "--run-dir" in lines[0]
    assert reason in lines[0]
