"""A GGUF file is converted once, whole or not at all, whoever else is at it."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvferry.cache.errors import ConfigError
from kvferry.transfer.engines.conversion import converted_copy, model_cache_dir
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import SamplingParams
from tests.engines.gguf_files import write_tiny_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def folders(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir() if entry.is_dir())


def test_gguf_file_is_converted_once_and_loads_the_same_afterwards(source: Path, tmp_path: Path) -> None:
    cache, lines = tmp_path / "cache", list[str]()
    first = load_model(str(source), cache_dir=cache, report=lines.append)
    assert len(lines) == 2
    assert "converting tiny.gguf once" in lines[0]
    second = load_model(str(source), cache_dir=cache, report=lines.append)
    assert len(lines) == 2
    assert first.digest == second.digest
    assert first.tokenizer.eos_token_ids == {1}
    prompt = first.tokenizer.encode("the cat sat", chat=False)
    assert first.tokenizer.decode(prompt) == "the cat sat"
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    results = {generate_in_one_process(model, prompt, sampling, 64) for model in (first, second)}
    assert len(results) == 1
    assert next(first.network.parameters()).dtype == torch.float32


def test_two_conversions_at_once_make_one_copy(source: Path, tmp_path: Path) -> None:
    cache, lines = tmp_path / "cache", list[str]()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(converted_copy, source, cache, report=lines.append) for _ in range(2)]
        targets = {future.result(timeout=60) for future in both}
    assert folders(cache) == [target.name for target in targets]
    assert sum("converting" in line and "once" in line for line in lines) == 1


def test_changed_file_is_converted_anew(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = converted_copy(source, cache, report=lambda line: None)
    write_tiny_gguf(source, seed=1)
    after = converted_copy(source, cache, report=lambda line: None)
    assert before != after
    assert len(folders(cache)) == 2


def test_what_a_killed_conversion_left_is_removed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    target = converted_copy(source, cache, report=lambda line: None)
    abandoned = cache / f".{target.name}.partial-abc"
    target.rename(abandoned)
    assert converted_copy(source, cache, report=lambda line: None) == target
    assert folders(cache) == [target.name]


def test_conversion_that_fails_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    source, cache = tmp_path / "broken.gguf", tmp_path / "cache"
    source.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        load_model(str(source), cache_dir=cache, report=lambda line: None)
    assert folders(cache) == []


def test_lock_held_too_long_raises_within_the_deadline(source: Path, tmp_path: Path) -> None:
    cache, lines = tmp_path / "cache", list[str]()
    target = converted_copy(source, cache, report=lambda line: None)
    target.rename(target.with_name("elsewhere"))
    with (cache / f"{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"kept .* locked"):
            converted_copy(source, cache, report=lines.append, timeout_seconds=0.05)
    assert lines == ["another process is converting this model: waiting for it"]


def test_cache_folder_that_cannot_be_made_raises(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot convert"):
        converted_copy(source, tmp_path / "file" / "cache", report=lambda line: None)


def test_cache_folder_follows_the_environment() -> None:
    assert model_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvferry/models")
    assert model_cache_dir({"XDG_CACHE_HOME": ""}) == model_cache_dir({}) == Path.home() / ".cache/kvferry/models"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_smollm2_converts_and_answers(tmp_path: Path) -> None:
    model = load_model("smollm2", cache_dir=tmp_path)
    assert (len(model.spec.layers), model.max_seq_len_tokens) == (30, 8192)
    prompt = model.tokenizer.encode("What is the capital of France? Answer in one sentence.", chat=True)
    answer = generate_in_one_process(model, prompt, SamplingParams(max_new_tokens=24), 512)
    assert "Paris" in model.tokenizer.decode(answer.token_ids)
    assert answer.token_ids[-1] in model.tokenizer.eos_token_ids
