"""Models that the engine tests share, built once."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig

from kvferry.cache.spec import from_transformers_config
from kvferry.transfer.engines.loaded_model import LoadedModel, config_digest
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.text import ByteTokenizer

_SIZES = {"vocab_size": 384, "hidden_size": 48, "intermediate_size": 64, "max_position_embeddings": 4096}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=24, **_SIZES)


def _mistral() -> PreTrainedConfig:
    """Every layer has a window, none has full attention."""
    return MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=12, sliding_window=64, **_SIZES
    )


def _random_model(name: str, config: PreTrainedConfig) -> LoadedModel:
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    spec = from_transformers_config(config.to_dict(), name=name, dtype="float32")
    return LoadedModel(name, network, ByteTokenizer(), spec, config_digest(config.to_dict()))


_RANDOM: dict[str, Callable[[], PreTrainedConfig]] = {"llama": _llama, "mistral": _mistral}


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], LoadedModel]:
    """A model by name: one of the tiny models, or a random llama or mistral."""
    built: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in built:
            built[name] = _random_model(name, _RANDOM[name]()) if name in _RANDOM else load_model(name)
        return built[name]

    return get
