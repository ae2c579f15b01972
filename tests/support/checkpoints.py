"""Changes to model directories that transformers wrote: other configurations, formats and numbers of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


def change_config(directory: Path, **changes: Any) -> None:
    """Changes keys of `config.json`; the value `"absent"` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def to_bin(directory: Path, **options: Any) -> None:
    """Replaces safetensors, single or sharded, by files of `torch.save`, which gets `options`."""
    for path in list(directory.glob("model*.safetensors")):
        name = path.name.replace("model", "pytorch_model", 1).replace("safetensors", "bin")
        torch.save(load_file(path), directory / name, **options)
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (directory / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


def in_shards(directory: Path, model: PreTrainedModel, most: str = "180KB") -> None:
    """Rewrites a model's weights as three shards, by transformers."""
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size=most)
    assert len(list(directory.glob("model-0000?-of-00003.safetensors"))) == 3


def wrap_text_model(directory: Path) -> None:
    """Has the model in `directory` be the text model of a `Gemma3ForConditionalGeneration`, without the other ones."""
    path = directory / "config.json"
    text = json.loads(path.read_text())
    outer = {name: text.pop(name) for name in ("quantization_config", "dtype") if name in text}
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    path.write_text(json.dumps(wrapped | outer))
    path = directory / "model.safetensors"
    save_file({f"language_model.{name}": tensor.clone() for name, tensor in load_file(path).items()}, path)


def stack_experts(directory: Path) -> None:
    """Has the file hold the experts of each layer, which transformers writes one by one, in two tensors, as published
    files of Qwen3.5 do: `gate_up_proj` `[experts, 2 * width, hidden]` and `down_proj` `[experts, hidden, width]`."""
    path = directory / "model.safetensors"
    stored = load_file(path)
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in stored if ".mlp.experts." in name]:
        stem, number, kind, _ = name.rsplit(".", 3)
        by_name.setdefault(f"{stem}.{kind}", {})[int(number)] = stored.pop(name)
    together = {name: torch.stack([of[number] for number in range(len(of))]) for name, of in by_name.items()}
    for name in [name for name in together if name.endswith("gate_proj")]:
        gates, ups = together.pop(name), together.pop(name.replace("gate_proj", "up_proj"))
        together[name.replace("gate_proj", "gate_up_proj")] = torch.cat((gates, ups), dim=1)
    save_file(stored | together, path)
