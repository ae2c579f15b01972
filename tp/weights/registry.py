"""Finds models by name: directories, models on the hub, and presets, which are pairs of a target and its draft.

A preset is a JSON file in `presets/`; adding a preset needs no change of code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .hub import cached_gguf, fetch, fetch_gguf, find_cached, is_hub_name

if TYPE_CHECKING:
    from ..model.config import ModelConfig

EMBEDDED = "embedded"
"""The name of the preset that is installed with the package."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Preset:
    """A pair of a target and its draft that has a name."""

    name: str
    target: str
    """The name of the target on the hub, or its directory in the package."""
    draft: str
    """The name of the draft on the hub, or its directory in the package."""
    summary: str
    """A short description of the pair."""
    published: tuple[dict[str, int], ...]
    """Settings that were published with the model. Each dict has a number of GPUs (`gpus`), and the settings for this
    number: `budget`, `chunk_size`, `block_length`, ..."""
    raw_configs: tuple[dict[str, Any], ...]
    """The contents of `config.json` of the target and of the draft; empty for directories in the package."""

    @classmethod
    def load(cls, path: Path) -> Preset:
        """Reads a preset from its JSON file; its name is that of the file without `.json`."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        within = _PACKAGE if raw.get("in_package") else Path()
        return cls(
            name=path.stem,
            target=str(within / raw["target"]),
            draft=str(within / raw["draft"]),
            summary=raw["summary"],
            published=tuple(raw.get("published", ())),
            raw_configs=() if raw.get("in_package") else (raw["config"], raw["draft_config"]),
        )

    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """The configurations of target and draft. Downloads nothing, and imports PyTorch.

        Raises:
            ModelError: see `ModelConfig.load`.
        """
        from ..model.config import ModelConfig

        target, draft = Path(self.target), Path(self.draft)
        if not self.raw_configs:
            return ModelConfig.load(target), ModelConfig.load(draft)
        return ModelConfig.from_json(self.raw_configs[0], target), ModelConfig.from_json(self.raw_configs[1], draft)

    def directories(self) -> tuple[Path | None, Path | None]:
        """The directories of target and draft on this machine; `None` for a model that is not downloaded yet."""
        target, draft = (Path(n) if Path(n).is_dir() else find_cached(n) for n in (self.target, self.draft))
        return target, draft


LOOKUP = "lookup"
"""The name for drafting by lookup: draft tokens are copied from the text itself."""

MTP = "mtp"
"""The name for drafting with the target's own multi-token-prediction head."""

PRESETS = {
    path.stem: Preset.load(path) for path in sorted((_PACKAGE / "presets").rglob("*.json"), key=lambda path: path.stem)
}
"""All presets by name, sorted by name."""


def find_pair(
    model: str | Path, draft: str | Path | None = None, note: Callable[[str], None] | None = None
) -> tuple[Path, Path | None]:
    """Finds the directories of a target and its draft. Downloads them from the hub if necessary.

    Args:
        model: the name of a preset; otherwise see `find_model`.
        draft: a model, as for `model`; the name of a preset means its draft. `"none"`: no draft model. `"mtp"`: the
            target's own multi-token-prediction head, which has no directory. `None`: the draft of the preset, if
            `model` is a preset. `parse_draft` describes drafting by lookup.
        note: called with one line of text before a download begins.

    Returns:
        The directory of the target, and that of the draft or `None`.

    Raises:
        ModelError: a model does not exist, or cannot be downloaded.
    """
    draft, _ = parse_draft(draft)
    preset = find_preset(model)
    target = find_model(preset.target if preset else model, note)
    if draft is None:
        return target, find_model(preset.draft, note) if preset else None
    if str(draft) in ("none", MTP):
        return target, None
    draft_preset = find_preset(draft)
    return target, find_model(draft_preset.draft if draft_preset else draft, note)


def parse_draft(draft: str | Path | None) -> tuple[str | Path | None, bool]:
    """Splits a value that was given as draft into the draft model for `find_pair`, and whether lookup drafts too.

    `lookup` has no draft model (`"none"`); `D,lookup` has the draft model `D`.
    """
    if str(draft) == LOOKUP:
        return "none", True
    if isinstance(draft, str) and draft.endswith(f",{LOOKUP}"):
        return draft.removesuffix(f",{LOOKUP}"), True
    return draft, False


def find_preset(model: str | Path) -> Preset | None:
    """The preset of this name; `None` if there is none."""
    return PRESETS.get(str(model))


def published_settings(model: str | Path, gpus: int) -> dict[str, int]:
    """The settings that were published for a preset on `gpus` GPUs, or else on the largest smaller number of GPUs.

    Their names are those of the engine. Empty if nothing fits.
    """
    preset = find_preset(model)
    fitting = [entry for entry in preset.published if entry["gpus"] <= gpus] if preset else []
    best = max(fitting, key=lambda entry: entry["gpus"], default={})
    return {name: value for name, value in best.items() if name != "gpus"}


def published_cache(model: str | Path, gpus: int) -> dict[str, int]:
    """The `published_settings` of the retrieval cache, which are used by default. Numbers of draft tokens are left out:
    they are chosen by the time that passes take."""
    return {name: value for name, value in published_settings(model, gpus).items() if not name.endswith("_length")}


def find_model(model: str | Path, note: Callable[[str], None] | None = None) -> Path:
    """Finds the directory of a model. Downloads the model from the hub if necessary.

    Args:
        model: tried in this order: a directory, a GGUF file (see `gguf_model`), a name on the hub (`owner/name`, or
            `owner/name:FORMAT` for a GGUF file).
        note: called with one line of text before a download begins.

    Raises:
        ModelError: `model` is another file, does not exist, or cannot be downloaded.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _directory_of_gguf(path)
    if path.exists():
        raise ModelError(f"{model} is a file; a model is a directory with config.json and its weights, or a GGUF file")
    name, _, form = str(model).partition(":")
    if is_hub_name(name):
        return _directory_of_gguf(fetch_gguf(name, form, note)) if form else fetch(name, note)
    raise ModelError(
        f"no model {str(model)!r}: neither a directory, nor one of the presets ({', '.join(PRESETS)}), "
        "nor a GGUF file, nor a name on the hub (owner/name, or owner/name:Q4_K_M for a GGUF file)"
    )


def find_downloaded(model: str) -> Path | None:
    """The directory of a hub model, as `find_model` returns it; `None` if the model is not complete in the hub's
    cache."""
    name, _, form = model.partition(":")
    if not form:
        return find_cached(name)
    path = cached_gguf(name, form)
    return path and _directory_of_gguf(path)


def _directory_of_gguf(path: Path) -> Path:
    from .gguf_model import gguf_directory  # imports PyTorch

    return gguf_directory(path)
