"""Which folder a model name means, and what its config.json says. Reads no weights and imports no torch.

Resolving may fetch a known model or ask a model hub; everything else is local and instant.
"""

from __future__ import annotations

import difflib
import socket
from pathlib import Path

from blockferry.cluster.fetch import KNOWN_MODELS, Progress, fetch, is_fetched
from blockferry.engine.config import DType
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.models.config import ModelHeader, read_header, read_json

HUB_HOST = "huggingface.co"
HUB_TIMEOUT_S = 3.0


class ModelNotFetchedError(ConfigError):
    """A model that resolve_model would have to fetch first."""


def is_folder_name(name: str) -> bool:
    """Whether a model is named by a path rather than by a known or hub name."""
    return name.startswith((".", "/", "~")) or Path(name).expanduser().is_dir()


def resolve_model(path: str, name: str, *, base: Path, progress: Progress = lambda _phase: None) -> Path:
    """Folder of a model, fetched or downloaded when it has to be.

    Args:
        path: dotted key for error messages.
        name: a folder (relative ones from `base`), a known model, or ORG/NAME of a model hub.
        base: folder that relative paths start from.
        progress: told the name of each phase as it starts.

    Raises:
        ConfigError: no such folder or model, or the hub cannot be reached.
    """
    if name in KNOWN_MODELS and not Path(name).is_dir():
        try:
            return fetch(name, progress=progress)
        except ModelLoadError as error:
            raise ConfigError(path, str(error)) from None
    if is_folder_name(name):
        return local_folder(path, name, base)
    if name.count("/") == 1 and not name.endswith("/"):
        return _from_hub(path, name, progress)
    hint = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.4)
    guess = f"; did you mean {hint[0]!r}?" if hint else ""
    raise ConfigError(
        path,
        f"{name!r} is neither a folder, a known model ({', '.join(KNOWN_MODELS)}) "
        f"nor an ORG/NAME of a model hub{guess}",
    )


def find_model(path: str, name: str, *, base: Path, progress: Progress = lambda _phase: None) -> Path:
    """As resolve_model, but fetches nothing. Raises ModelNotFetchedError where resolve_model would have to."""
    is_known = name in KNOWN_MODELS and not Path(name).is_dir()
    if is_known and not is_fetched(name):
        raise ModelNotFetchedError(path, f"{name!r} is not in the cache yet; run `blockferry fetch-model {name}`")
    is_on_hub = not is_known and not is_folder_name(name) and name.count("/") == 1
    if is_on_hub:
        raise ModelNotFetchedError(path, f"{name!r} is a name on {HUB_HOST}, which is asked when the deployment starts")
    return resolve_model(path, name, base=base, progress=progress)


def local_folder(path: str, name: str, base: Path) -> Path:
    """A model folder, relative ones from `base`. Raises ConfigError when it is none."""
    folder = Path(name).expanduser()
    folder = folder if folder.is_absolute() or folder.is_dir() else base / folder
    if not folder.is_dir():
        raise ConfigError(path, f"no such model folder: {folder}; give a folder with config.json and safetensors files")
    if not (folder / "config.json").is_file():
        raise ConfigError(path, f"{folder} has no config.json; give a Hugging Face model folder")
    return folder.resolve()


def _from_hub(path: str, name: str, progress: Progress) -> Path:
    import huggingface_hub  # slow to import, and only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        pass  # not in the hub's cache yet: download it
    _require_hub(path, name)
    progress(f"downloading {name} from {HUB_HOST}")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except RepositoryNotFoundError:
        raise ConfigError(path, f"{HUB_HOST} has no model {name!r}, or it is private; check the name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ConfigError(path, f"cannot download {name!r}: {str(error).splitlines()[0]}") from None


def _require_hub(path: str, name: str) -> None:
    try:
        socket.create_connection((HUB_HOST, 443), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        raise ConfigError(
            path,
            f"{name!r} is a name on {HUB_HOST}, which this machine cannot reach; "
            f"give a local folder or a known model ({', '.join(KNOWN_MODELS)})",
        ) from None


def read_checkpoint(path: str, folder: Path) -> ModelHeader:
    """What config.json says. Raises ConfigError for a file that is broken or of an unsupported architecture."""
    try:
        return read_header(folder)
    except ModelLoadError as error:
        raise ConfigError(path, str(error)) from None


def stored_dtype(folder: Path) -> DType:
    """Data type that a checkpoint's weights are stored in; float32 when config.json does not say."""
    values = read_json(folder / "config.json")
    stored = str(values.get("dtype") or values.get("torch_dtype"))
    return DType(stored) if stored in set(DType) else DType.FLOAT32
