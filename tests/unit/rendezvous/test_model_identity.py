"""What tells two copies of a model apart."""

from pathlib import Path

import pytest

from spmd_serve.rendezvous.model_identity import model_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(folder: Path, *, weights: bytes = b"w" * 300_000, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(weights)
    (folder / "training_args.bin").write_bytes(folder.name.encode())
    (folder / "README.md").write_text(folder.name)
    return folder


def identity(folder: Path) -> dict[str, str]:
    return {key.replace(str(folder), "DIR"): value for key, value in model_identity(str(folder)).items()}


def test_copies_are_equal(tmp_path: Path) -> None:
    items = identity(model(tmp_path / "a"))
    assert items == identity(model(tmp_path / "b"))
    assert items.keys() == {
        "model directory DIR",
        "model config.json",
        "model model.safetensors.index.json",
        "model weights model-1.safetensors",
    }


@pytest.mark.parametrize("place", [0, 65_535, 300_000 - 65_536, 299_999])
def test_a_byte_near_an_end_of_a_weight_file_matters(tmp_path: Path, place: int) -> None:
    other = bytearray(b"w" * 300_000)
    other[place] = 0
    changed = identity(model(tmp_path / "b", weights=bytes(other)))
    same = identity(model(tmp_path / "a"))
    assert {key for key in same if same[key] != changed[key]} == {"model weights model-1.safetensors"}


def test_size_and_config_matter(tmp_path: Path) -> None:
    same = identity(model(tmp_path / "a"))
    longer = identity(model(tmp_path / "b", weights=b"w" * 300_001))
    assert same["model weights model-1.safetensors"] != longer["model weights model-1.safetensors"]
    other = identity(model(tmp_path / "c", config='{"x": 1}'))
    assert same["model config.json"] != other["model config.json"]


def test_other_kinds_of_weights(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    (folder / "model-1.safetensors").rename(folder / "pytorch_model.bin")
    assert "model weights pytorch_model.bin" in identity(folder)
    assert "model weights training_args.bin" not in identity(folder)


def test_a_directory_without_weights_and_one_that_is_not_there(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    (folder / "model-1.safetensors").unlink()
    (folder / "training_args.bin").unlink()
    assert identity(folder)["model directory DIR"] == "without weight files"
    assert model_identity(str(tmp_path / "b")) == {f"model directory {tmp_path / 'b'}": "missing"}


def test_a_single_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    (value,) = model_identity(str(file)).values()
    assert value.startswith("1 bytes sha256:")


def test_a_hub_id_is_told_by_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_identity("owner/name") == {}
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert model_identity("owner/name") == {"model revision": COMMIT}
    assert model_identity("owner/name", "other-branch") == {}
    assert model_identity("not a / hub id") == {}
