"""Where models are found: directories, models of the hub, and presets, which pair a target with its draft.

A preset is a file in `presets/`; whoever adds one changes no code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .hub import fetch, find_cached, is_hub_name

if TYPE_CHECKING:
    from ..model.config import ModelConfig

EMBEDDED = "embedded"
"""The preset that comes with the package."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Preset:
    """A target and the draft that goes with it, by name.

    `target` and `draft` are names on the hub, or directories for what comes with the package.
    """

    name: str
    target: str
    draft: str
    summary: str
    published: tuple[dict[str, int], ...]
    """Settings that were published for it: `gpus`, and for so many `budget`, `chunk_size`, `block_length`, ..."""
    raw_configs: tuple[dict[str, Any], ...]
    """The facts of the two `config.json`, target's and draft's; none for directories, which have the files."""

    @classmethod
    def load(cls, path: Path) -> Preset:
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
        """The shapes of target and draft, without anything being downloaded. Imports PyTorch.

        Raises:
            ModelError: see `ModelConfig.load`.
        """
        from ..model.config import ModelConfig

        target, draft = Path(self.target), Path(self.draft)
        if not self.raw_configs:
            return ModelConfig.load(target), ModelConfig.load(draft)
        return ModelConfig.from_json(self.raw_configs[0], target), ModelConfig.from_json(self.raw_configs[1], draft)

    def directories(self) -> tuple[Path | None, Path | None]:
        """Where target and draft lie on this machine, `None` for one that is yet to be downloaded."""
        target, draft = (Path(n) if Path(n).is_dir() else find_cached(n) for n in (self.target, self.draft))
        return target, draft


PRESETS = {path.stem: Preset.load(path) for path in sorted((_PACKAGE / "presets").glob("*.json"))}


def find_pair(
    model: str | Path, draft: str | Path | None = None, note: Callable[[str], None] | None = None
) -> tuple[Path, Path | None]:
    """The directories of a target and its draft; what is on the hub and not in its cache is downloaded.

    Args:
        model: a preset's name, a directory or a model of the hub (`owner/name`), looked for in this order.
        draft: the same (a preset stands for its draft); `"none"` for no draft; `None` for the preset's own, if `model`
            is one.
        note: called with one line before a download begins.

    Raises:
        ModelError: there is no such model, or it cannot be had.
    """
    preset = find_preset(model)
    target = find_model(preset.target if preset else model, note)
    if draft is None:
        return target, find_model(preset.draft, note) if preset else None
    if str(draft) == "none":
        return target, None
    draft_preset = find_preset(draft)
    return target, find_model(draft_preset.draft if draft_preset else draft, note)


def find_preset(model: str | Path) -> Preset | None:
    """The preset of that name, if there is one."""
    return PRESETS.get(str(model))


def published_settings(model: str | Path, gpus: int) -> dict[str, int]:
    """Settings that were published for a preset on `gpus` or the next fewer, under the names of the engine's."""
    preset = find_preset(model)
    fitting = [entry for entry in preset.published if entry["gpus"] <= gpus] if preset else []
    best = max(fitting, key=lambda entry: entry["gpus"], default={})
    return {name: value for name, value in best.items() if name != "gpus"}


def find_model(model: str | Path, note: Callable[[str], None] | None = None) -> Path:
    """The directory of a model that is one, or is on the hub.

    Raises:
        ModelError: a file, not there, or not to be had.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model} is a file; a model is a directory with config.json and its weights")
    if is_hub_name(str(model)):
        return fetch(str(model), note)
    raise ModelError(
        f"no model {str(model)!r}: neither a directory, nor one of the presets ({', '.join(PRESETS)}), "
        "nor a name on the hub (owner/name)"
    )
