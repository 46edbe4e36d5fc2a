"""The `speculation` section of a deployment: its keys, what it cannot be combined with, and the layers that draft.

Starts nothing and reads no weights; what its instances have room for is check.py's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from blockferry.cluster.shipped import shipped_heads
from blockferry.cluster.yaml_reader import Section
from blockferry.engine.config import DraftMethod, InstanceConfig, ModelConfig, SpeculationConfig
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.models.config import DENSE_ARCHITECTURES, ModelHeader
from blockferry.engine.models.draft_head import num_drafting_layers

MAX_NUM_TOKENS = 8
MAX_NGRAM = 32
WHERE = "speculation"


def read_speculation(section: Section, base: Path) -> SpeculationConfig | None:
    """None where the file has no such section; relative folders start at `base`. Raises ConfigError."""
    if not section.written_keys():
        return None
    method = DraftMethod(section.choice("method", "", [*DraftMethod]) or _missing_method(section))
    defaults = SpeculationConfig(method=method)
    _refuse_keys_of_others(section, method)
    head = section.text("head", None)
    max_ngram = section.integer("max_ngram", 0, minimum=1, maximum=MAX_NGRAM)  # 0: not written
    min_ngram = section.integer(
        "min_ngram", min(defaults.min_ngram, max_ngram or MAX_NGRAM), minimum=1, maximum=MAX_NGRAM
    )
    speculation = SpeculationConfig(
        method=method,
        num_tokens=section.integer("num_tokens", defaults.num_tokens, minimum=1, maximum=MAX_NUM_TOKENS),
        head_path=None if head is None else _head_folder(section.at("head"), head, base),
        is_adaptive=section.flag("adaptive", default=defaults.is_adaptive),
        looks_up=section.flag("lookup", default=defaults.looks_up),
        min_ngram=min_ngram,
        max_ngram=max_ngram or max(min_ngram, defaults.max_ngram),
    )
    section.finish()
    if speculation.max_ngram < min_ngram:
        raise ConfigError(
            section.at("max_ngram"),
            f"{speculation.max_ngram} is less than min_ngram={min_ngram}; use {min_ngram} or more",
        )
    return speculation


def _missing_method(section: Section) -> str:
    raise ConfigError(section.at("method"), f"is missing; write one of {', '.join(DraftMethod)}")


def _refuse_keys_of_others(section: Section, method: DraftMethod) -> None:
    looks_up = section.flag("lookup", default=False)
    for key, is_wrong in (("head", section.has("head")), ("lookup", looks_up)):
        if method is DraftMethod.NGRAM and is_wrong:
            raise ConfigError(section.at(key), "is of method mtp; remove it, or use that method")
    for key in ("min_ngram", "max_ngram"):
        if method is DraftMethod.MTP and section.has(key) and not looks_up:
            raise ConfigError(section.at(key), "is of n-grams; write lookup: true as well, or use method ngram")


def _head_folder(key: str, name: str, base: Path) -> Path:
    """A folder, or the shipped one of this name."""
    written = Path(name).expanduser()
    folders = [folder for folder in (base / written, written) if folder.is_dir()]
    shipped = shipped_heads()
    if not folders and name not in shipped:
        hint = difflib.get_close_matches(name, shipped, n=1)
        guess = f"; did you mean {hint[0]!r}?" if hint else ""
        raise ConfigError(
            key,
            f"{name!r} is neither a folder nor a shipped head{guess}; use one of {', '.join(shipped) or 'none'}, or "
            "a folder that train-draft made",
        )
    folder = folders[0] if folders else shipped[name]
    if not (folder / "config.json").is_file():
        raise ConfigError(key, f"{folder} has no config.json; give a folder with config.json and model.safetensors")
    return folder.resolve()


def check_speculation(
    speculation: SpeculationConfig | None, model: ModelConfig, header: ModelHeader, instances: Sequence[InstanceConfig]
) -> None:
    """Raises ConfigError for what cannot work."""
    if speculation is None:
        return
    num_layers_that_draft(speculation, header)
    num_rows_tokens = 1 + speculation.num_tokens
    if num_rows_tokens > model.max_model_len:
        raise _too_many(speculation, f"max_model_len={model.max_model_len}", model.max_model_len)
    for index, instance in enumerate(instances):
        budget = instance.scheduler.max_num_batched_tokens
        if num_rows_tokens > budget:
            raise _too_many(speculation, f"scheduler.max_num_batched_tokens={budget} of instances[{index}]", budget)


def _too_many(speculation: SpeculationConfig, limit: str, budget: int) -> ConfigError:
    return ConfigError(
        f"{WHERE}.num_tokens",
        f"{speculation.num_tokens} drafts and a token are {1 + speculation.num_tokens} tokens of a row, which "
        f"{limit} has no room for; use at most {max(budget - 1, 1)}, or raise that",
    )


def num_layers_that_draft(speculation: SpeculationConfig | None, header: ModelHeader) -> int:
    """Layers with caches of their own. Raises ConfigError where the model has none, or a head is of another model."""
    try:
        return num_drafting_layers(header, speculation)
    except ModelLoadError as error:
        if speculation is not None and speculation.head_path is not None:
            raise ConfigError(f"{WHERE}.head", str(error)) from None
        takes_heads = header.architecture in DENSE_ARCHITECTURES
        known = f"; shipped heads: {', '.join(shipped_heads()) or 'none'}" if takes_heads else ""
        raise ConfigError(f"{WHERE}.method", f"{error}{known}") from None


def words_of(speculation: SpeculationConfig, header: ModelHeader) -> str:
    """What a deployment with it does, in one line."""
    adaptive = "fewer where they are not accepted" if speculation.is_adaptive else "always as many"
    least, most = speculation.min_ngram, speculation.max_ngram
    ngrams = f"what followed the last {most if least == most else f'{most} to {least}'} tokens before (n-grams)"
    if speculation.method is DraftMethod.NGRAM:
        source = ngrams
    else:
        whose = f"the head {speculation.head_path}" if speculation.head_path else "the model's own modules"
        source = f"{whose} ({num_layers_that_draft(speculation, header)} layer(s) of multi-token prediction)"
        source += f", and first by {ngrams}" if speculation.looks_up else ""
    count = "1 token" if speculation.num_tokens == 1 else f"up to {speculation.num_tokens} tokens"
    return f"{count} per request and step, drafted by {source}; {adaptive}"
