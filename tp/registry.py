"""Where models are found: directories, and presets, which pair a target with its draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import ModelError

EMBEDDED = "embedded"
"""The preset that comes with the package."""

_EMBEDDED_DIRECTORY = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Preset:
    """A target and the draft that goes with it, by name."""

    name: str
    target: Path
    draft: Path
    summary: str


PRESETS = {
    EMBEDDED: Preset(
        EMBEDDED,
        _EMBEDDED_DIRECTORY / "target",
        _EMBEDDED_DIRECTORY / "draft",
        "small pair trained by this project on English novels; comes with the package",
    )
}


def find_pair(model: str | Path, draft: str | Path | None = None) -> tuple[Path, Path | None]:
    """The directories of a target and its draft.

    Args:
        model: a preset's name or a directory.
        draft: the same (a preset stands for its draft); `"none"` for no draft; `None` for the preset's own, if `model`
            is one.

    Raises:
        ModelError: neither a preset nor a directory.
    """
    preset = PRESETS.get(str(model))
    target = preset.target if preset else find_directory(model)
    if draft is None:
        return target, preset.draft if preset else None
    if str(draft) == "none":
        return target, None
    draft_preset = PRESETS.get(str(draft))
    return target, draft_preset.draft if draft_preset else find_directory(draft)


def find_directory(model: str | Path) -> Path:
    """`model` as an existing directory.

    Raises:
        ModelError: it is a file or not there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model} is a file; a model is a directory with config.json and safetensors weights")
    raise ModelError(
        f"no model {str(model)!r}: neither a directory nor one of the presets ({', '.join(PRESETS)}); "
        "a model of the hub must be downloaded first (hf download NAME --local-dir DIR), then given as DIR"
    )
