"""Finds models by name: directories, models of the hub, and presets, which are pairs of a target and its draft.

A preset is a JSON file in `presets/`; adding one needs no change of code.
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
"""The preset that comes with the package."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Preset:
    """A target and its draft, by name.

    `target` and `draft` are names on the hub, or directories of the package.
    """

    name: str
    target: str
    draft: str
    summary: str
    published: tuple[dict[str, int], ...]
    """Settings published with the model: dicts of `gpus`, and of `budget`, `chunk_size`, `block_length`, ... for that
    number of GPUs."""
    raw_configs: tuple[dict[str, Any], ...]
    """The contents of the two `config.json`, target's and draft's; empty for directories of the package."""

    @classmethod
    def load(cls, path: Path) -> Preset:
        """Reads `NAME.json` of the package."""
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
        """The configurations of target and draft; downloads nothing. Imports PyTorch.

        Raises:
            ModelError: see `ModelConfig.load`.
        """
        from ..model.config import ModelConfig

        target, draft = Path(self.target), Path(self.draft)
        if not self.raw_configs:
            return ModelConfig.load(target), ModelConfig.load(draft)
        return ModelConfig.from_json(self.raw_configs[0], target), ModelConfig.from_json(self.raw_configs[1], draft)

    def directories(self) -> tuple[Path | None, Path | None]:
        """The directories of target and draft on this machine; `None` for one that is not downloaded yet."""
        target, draft = (Path(n) if Path(n).is_dir() else find_cached(n) for n in (self.target, self.draft))
        return target, draft


LOOKUP = "lookup"
"""The draft that is looked up in the text itself."""

MTP = "mtp"
"""The draft that is the target's own multi-token-prediction head."""

PRESETS = {
    path.stem: Preset.load(path) for path in sorted((_PACKAGE / "presets").rglob("*.json"), key=lambda path: path.stem)
}


def find_pair(
    model: str | Path, draft: str | Path | None = None, note: Callable[[str], None] | None = None
) -> tuple[Path, Path | None]:
    """The directories of a target and its draft, which are downloaded from the hub if necessary.

    Args:
        model: the name of a preset, a directory or a name on the hub (`owner/name`), tried in this order.
        draft: the same, where a preset means its draft; `"none"` for no draft, and `"mtp"` for the target's own head,
            which has no directory; `None` for that of the preset, if `model` is one; see also `parse_draft`.
        note: called with one line of text before a download begins.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
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
    """The draft model of what was given as draft, as `find_pair` takes it, and whether tokens are looked up in the text
    too: of `lookup`, no model; of `D,lookup`, `D`."""
    if str(draft) == LOOKUP:
        return "none", True
    if isinstance(draft, str) and draft.endswith(f",{LOOKUP}"):
        return draft.removesuffix(f",{LOOKUP}"), True
    return draft, False


def find_preset(model: str | Path) -> Preset | None:
    """The preset of this name, if there is one."""
    return PRESETS.get(str(model))


def published_settings(model: str | Path, gpus: int) -> dict[str, int]:
    """The settings published for a preset on `gpus` GPUs, or on the largest smaller number; by the engine's names."""
    preset = find_preset(model)
    fitting = [entry for entry in preset.published if entry["gpus"] <= gpus] if preset else []
    best = max(fitting, key=lambda entry: entry["gpus"], default={})
    return {name: value for name, value in best.items() if name != "gpus"}


def published_cache(model: str | Path, gpus: int) -> dict[str, int]:
    """Those of the `published_settings` that are used unless others are asked for: the retrieval cache's. Lengths are
    chosen by what passes take."""
    return {name: value for name, value in published_settings(model, gpus).items() if not name.endswith("_length")}


def find_model(model: str | Path, note: Callable[[str], None] | None = None) -> Path:
    """The directory of a model: `model` itself, that of a GGUF file (see `gguf_model`), or that of a hub model, which
    is downloaded if necessary.

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
    """As `find_model`, of a hub model that is whole in the hub's cache; `None` for one that is not."""
    name, _, form = model.partition(":")
    if not form:
        return find_cached(name)
    path = cached_gguf(name, form)
    return path and _directory_of_gguf(path)


def _directory_of_gguf(path: Path) -> Path:
    from .gguf_model import gguf_directory  # imports PyTorch

    return gguf_directory(path)
