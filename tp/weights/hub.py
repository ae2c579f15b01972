"""Models on the Hugging Face hub: finds them in the hub's cache, or downloads the files that are needed to it.

A model that is completely in the cache is used without asking the network; `hf download NAME` fetches a newer version.
Slow imports are made only where they are needed, so that an unknown name is refused quickly.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..units import gib
from .weight_files import LAYOUTS, SHARD, shard_names, weight_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_CONFIG = "config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SMALL = (_CONFIG, "generation_config.json", *_TOKENIZER, "merges.txt", "special_tokens_map.json", "added_tokens.json")
_SMALL_PATTERN = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja")
_NOT_READ = re.compile(r"(?i)(^|[-.])(I?Q[123]_|IQ|TQ|MXFP|NVFP)")
"""Quantisations of GGUF files that `gguf_header` refuses."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a hub model's name, `owner/name`."""
    return _NAME.fullmatch(name) is not None


def fetch(name: str, note: Callable[[str], None] | None = None) -> Path:
    """The directory with the files of a hub model. Downloads the files if they are not all in the cache.

    The hub's client shows its progress on stderr and reads its own environment variables (`HF_HOME`, `HF_TOKEN`,
    `HF_HUB_OFFLINE`, `HF_ENDPOINT`).

    Args:
        name: `owner/name`.
        note: called with one line of text before a download begins.

    Raises:
        ModelError: the model is not in the cache and cannot be downloaded, or its architecture is not supported. The
            architecture is checked before weights are downloaded.
    """
    cached = find_cached(name)
    if cached:
        return cached
    try:
        return _download(name, note)
    except Exception as error:
        explained = _explained(name, error)
        if explained is None:
            raise
        raise explained from error


def fetch_gguf(name: str, form: str, note: Callable[[str], None] | None = None) -> Path:
    """The GGUF file of a hub model, or its first shard. Downloads the model if it is not in the cache. Its content is
    not checked.

    Args:
        name, note: as for `fetch`.
        form: the quantisation, such as `Q4_K_M`, with which the name of the file ends.

    Raises:
        ModelError: the model cannot be downloaded; there is no file with this quantisation, or several; or the
            quantisation is not supported.
    """
    if _NOT_READ.search(form):
        raise ModelError(f"{form} is a quantisation that is not supported; use another, such as {name}:Q4_K_M")
    try:
        return cached_gguf(name, form) or _download_gguf(name, form, note)
    except ModelError:
        raise
    except Exception as error:
        explained = _explained(name, error)
        if explained is None:
            raise
        raise explained from error


def cached_gguf(name: str, form: str) -> Path | None:
    """The file that `fetch_gguf` finds in the cache; `None` if it is not there with all its shards."""
    from huggingface_hub import constants, try_to_load_from_cache

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    newest = folder / "refs" / "main"
    commit = newest.read_text(encoding="utf-8").strip() if newest.is_file() else ""
    for snapshot in sorted((folder / "snapshots").glob("*"), key=lambda found: (found.name != commit, found.name)):
        there = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]
        shards = _files_in(there, form)
        if len(shards) == 1 and all(file in there for file in shards[0]):
            found = try_to_load_from_cache(name, shards[0][0], revision=snapshot.name)
            return Path(found) if isinstance(found, str) else snapshot / shards[0][0]
    return None


def _download_gguf(name: str, form: str, note: Callable[[str], None] | None) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download

    info = HfApi().model_info(name, files_metadata=True)
    there = [file.rfilename for file in info.siblings or [] if file.rfilename.endswith(".gguf")]
    found = _files_in(there, form)
    if len(found) != 1:
        which = "several GGUF files whose names end" if found else "no GGUF file whose name ends"
        remedy = "a longer end of the name" if found else "the quantisation at the end of a name, such as Q4_K_M"
        listed = ", ".join(sorted(there)[:8]) or "none"
        raise ModelError(
            f"{name} on the hub has {which} with {form!r} (before .gguf); give {remedy}; the repository has: {listed}"
        )
    (files,) = found
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    needed = _check_room(name, info, files, cache)
    if note:
        note(f"downloading {name}, {gib(needed)}, to {cache}")
    fetched = [Path(hf_hub_download(name, file, revision=info.sha)) for file in files]
    return fetched[0]


def _files_in(files: list[str], form: str) -> list[list[str]]:
    """The GGUF files with a quantisation: a list of shards, in order, for each model."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        shard = SHARD.fullmatch(file)
        stem, count = (shard[1], int(shard[3])) if shard else (file.removesuffix(".gguf"), 1)
        is_model = not Path(file).name.startswith("mmproj")  # "mmproj" files are projectors for images
        if is_model and re.fullmatch(rf"(.*[-./])?{re.escape(form)}", stem, re.IGNORECASE) and count < 1000:
            shards = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)] if shard else [file]
            found[stem] = shards
    return list(found.values())


def find_cached(name: str) -> Path | None:
    """The directory of a hub model in the cache; `None` if its configuration, tokenizer and weights are not all
    there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, _CONFIG)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    with suppress(ModelError):
        if weight_files(directory) and any((directory / file).is_file() for file in _TOKENIZER):
            return directory
    return None


def _download(name: str, note: Callable[[str], None] | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    # This request comes first: without a network it fails at once, but a download is tried again for half a minute.
    info = HfApi().model_info(name, files_metadata=True)
    directory = Path(hf_hub_download(name, _CONFIG)).parent
    commit = directory.name
    there = [file.rfilename for file in info.siblings or []]
    layout = next((files for files in LAYOUTS if set(files) & set(there)), None)
    if layout is None:
        raise ModelError(
            f"{name} on the hub has no weights in safetensors or as pytorch_model.bin; choose another model"
        )
    single, index = layout
    small = [file for file in there if file in _SMALL or _SMALL_PATTERN.fullmatch(file)]
    for file in small if single in there else [*small, index]:
        hf_hub_download(name, file, revision=commit)

    from ..model.config import ModelConfig  # checked before gigabytes are downloaded

    ModelConfig.load(directory)
    weights = [single] if single in there else shard_names(directory / index)
    missing = [file for file in weights if not (directory / file).is_file()]
    needed = _check_room(name, info, missing, directory.parents[2])
    if note and missing:
        note(f"downloading {name}, {gib(needed)}, to {directory.parents[2]}")
    for file in missing:
        hf_hub_download(name, file, revision=commit)
    return directory


def _check_room(name: str, info: ModelInfo, files: list[str], cache: Path) -> int:
    """The size of `files` in bytes. Raises `ModelError` if the disk of the cache has no room for them."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    needed = sum(sizes.get(file, 0) for file in files)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise ModelError(f"{name} needs {gib(needed)} more, but {_full_disk(cache, free)}")
    return needed


def _full_disk(cache: Path, free: int) -> str:
    return f"{gib(free)} is free in {cache}; free some, or set HF_HOME to a directory on a larger disk"


def _explained(name: str, error: Exception) -> ModelError | None:
    """Converts an error of the client to a `ModelError` that a user can act on; `None` for an error that is a bug."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{constants.ENDPOINT}/{name}"
    elsewhere = f"or, where there is a network, hf download {name} --local-dir DIR, and give DIR"
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its licence on {page}, log in with hf auth login (or set HF_TOKEN), and run again"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"no model {name!r}: not a directory here, and not on the hub, or private; check the spelling, "
            "or log in with hf auth login if it is private (triforce models lists short names)"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelError(
            f"{name} on the hub lacks a file ({_first_line(error)}); a model has config.json and its weights"
        )
    if status == 401:
        return ModelError(f"the hub does not accept the token it was sent for {name}; log in again with hf auth login")
    if constants.HF_HUB_OFFLINE and isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return ModelError(
            f"no model {name!r}: not a directory here, not complete in the hub's cache ({constants.HF_HUB_CACHE}), and "
            f"HF_HUB_OFFLINE prevents a download; unset that, {elsewhere}"
        )
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
        cache = Path(constants.HF_HUB_CACHE)
        return ModelError(f"the disk is full: {_full_disk(cache, shutil.disk_usage(cache).free)}; then run again")
    # The client passes on errors of its HTTP library, whose module name depends on the client's version.
    transport = type(error).__module__.partition(".")[0].startswith("httpx")
    if isinstance(error, errors.LocalEntryNotFoundError) or (transport and type(error).__name__.startswith("Connect")):
        return ModelError(
            f"no model {name!r}: not a directory here, not in the hub's cache, and {constants.ENDPOINT} cannot be "
            f"reached ({_first_line(error.__cause__ or error)}); run again with a network, {elsewhere}"
        )
    if status is not None:
        return ModelError(f"{constants.ENDPOINT} fails to give {name} (HTTP status {status}); try again later")
    if transport or isinstance(error, OSError):
        return ModelError(
            f"the download of {name} broke off ({_first_line(error)}); run again: files that are complete are kept"
        )
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
