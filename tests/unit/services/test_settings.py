from pathlib import Path

import pytest
from pydantic import Field

from services.errors import InvalidArgumentError, NotFoundError
from services.settings import Addresses, Names, ServiceSettings, load_settings


class Sample(ServiceSettings):
    listen_address: str = Field("unix:here", description="where")
    max_model_len: int | None = Field(None, ge=1, description="tokens")
    enable_prefix_caching: bool = Field(True, description="reuse")
    api_key: Names = Field((), description="keys")


def load(*argv: str) -> Sample:
    return load_settings(Sample, argv, prog="sample")


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("max-model-len: 7\nlog_level: debug\napi_key: [y]\n")
    return path


def test_flag_beats_environment_beats_yaml_beats_default(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().max_model_len is None
    config = ("--config", str(yaml_file))
    assert load(*config).max_model_len == 7
    monkeypatch.setenv("SEAMLINE_MAX_MODEL_LEN", "8")
    assert load(*config).max_model_len == 8
    assert load(*config, "--max-model-len", "9").max_model_len == 9
    assert load(*config).log_level == "debug"


@pytest.mark.parametrize(
    "argv", [("--api-key", "a", "--api-key", "b"), ("--api-key", "a,b"), ("--api-key=a b",)]
)
def test_lists_repeat_or_separate(argv: tuple[str, ...]) -> None:
    assert load(*argv).api_key == ("a", "b")


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("unix:/a b/☃/x.sock", ("unix:/a b/☃/x.sock",)),
        ("unix:/a b,host:1, host:2 ,", ("unix:/a b", "host:1", "host:2")),
    ],
)
def test_an_address_may_have_spaces(text: str, addresses: tuple[str, ...]) -> None:
    class Caller(ServiceSettings):
        listen_address: str = ""
        peer: Addresses

    assert load_settings(Caller, ["--peer", text], prog="x").peer == addresses


def test_lists_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMLINE_API_KEY", "a,b")
    assert load().api_key == ("a", "b")


def test_booleans_have_a_no_form() -> None:
    assert load("--no-enable-prefix-caching").enable_prefix_caching is False


def test_every_fault_names_its_flag() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--log-level: .*; --max-model-len: "):
        load("--max-model-len", "0", "--log-level", "loud")


def test_an_unknown_flag_exits_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--no-such-flag")
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_missing_or_wrong_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.yaml"):
        load("--config", "nowhere.yaml")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("- a list")
    with pytest.raises(InvalidArgumentError, match=r"wrong\.yaml"):
        load("--config", str(wrong))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().max_model_len = 3
