"""Tiny checkpoints whose models have modules that draft tokens, and plain torch as the oracle of what those draft.

Modules are made from the shapes of the base's last layer, which attends in every family here, under the names that
checkpoints of the family have. The oracle keeps no caches: it computes a sequence's modules from its beginning, with
transformers' own decoder layer in them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_families import FAMILIES, build, load_reference, one_thread

from blockferry.engine.config import DraftMethod, SpeculationConfig


class Likeness(enum.Enum):
    """How modules relate to their model."""

    NONE = "none"  # everything matters, and nothing that is drafted is ever right
    SOME = "some"  # a token mostly follows from the one before it: of the drafts a part is right


LAST_LAYER = {"llama": 3, "deepseek_v3": 3, "qwen3_next": 3, "qwen3_5": 7}
_STD = 0.16
_QUIET, _LOUD = 0.05, 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MtpCheckpoint:
    """A model and how it is asked to draft."""

    family: str
    path: Path
    head_path: Path | None
    num_modules: int

    def speculation(self, num_tokens: int) -> SpeculationConfig:
        return SpeculationConfig(
            method=DraftMethod.MTP, num_tokens=num_tokens, head_path=self.head_path, is_adaptive=False
        )


def build_mtp(
    family: str,
    folder: Path,
    *,
    num_modules: int = 1,
    shortlist: Sequence[int] | None = None,
    likeness: Likeness = Likeness.NONE,
) -> MtpCheckpoint:
    """Write the family's tiny checkpoint with modules; those of llama into a head folder, with its shortlist."""
    base = build(FAMILIES[family], folder / "tiny_families")
    if likeness is Likeness.SOME:
        base = _soften(base, folder / "tiny_mtp" / f"{family}-base")
    name = f"{family}-{num_modules}-{likeness.value}" + ("" if shortlist is None else f"-{len(shortlist)}")
    target = folder / "tiny_mtp" / name
    is_head = family == "llama"
    checkpoint = MtpCheckpoint(
        family=family,
        path=base if is_head else target,
        head_path=target if is_head else None,
        num_modules=num_modules,
    )
    if (target / "config.json").is_file():
        return checkpoint
    generator = torch.Generator().manual_seed(23)
    tensors = load_file(base / "model.safetensors")
    modules = _modules(family, tensors, num_modules, generator)
    if likeness is Likeness.SOME:
        modules = {name: _softened(name, value, tensors, generator) for name, value in modules.items()}
    config = json.loads((base / "config.json").read_text())
    target.mkdir(parents=True)
    if is_head:
        if shortlist is not None:
            modules["draft_token_ids"] = torch.tensor(list(shortlist), dtype=torch.int32)
        config = {
            "model_type": "llama_mtp",
            "hidden_size": config["hidden_size"],
            "base_num_hidden_layers": config["num_hidden_layers"],
            "base_vocab_size": config["vocab_size"],
        }
        tensors = {}
    else:
        shutil.copytree(base, target, dirs_exist_ok=True)
        config.pop("num_mtp_layers", None)
    save_file({**tensors, **modules}, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_modules}))
    return checkpoint


def _soften(base: Path, target: Path) -> Path:
    """A copy of a checkpoint whose layers say little beside a token's embedding."""
    if not (target / "config.json").is_file():
        tensors = load_file(base / "model.safetensors")
        tensors = {name: value * (_QUIET if _ends_a_branch(name) else 1.0) for name, value in tensors.items()}
        tensors["model.embed_tokens.weight"] *= _LOUD
        target.mkdir(parents=True)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(base / "config.json", target)
    return target


def _softened(
    name: str, value: torch.Tensor, tensors: dict[str, torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """A module's tensor such that it mostly says what such a model says of the next token."""
    if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
        noise = 0.002 * torch.randn(value.shape, generator=generator)
        return noise + 0.1 * torch.eye(len(value), 2 * len(value))
    if name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
        return tensors["model.norm.weight"].clone()
    if name.endswith("enorm.weight"):
        return torch.ones_like(value)
    if name.endswith("pre_fc_norm_embedding.weight"):
        return torch.zeros_like(value)
    return value * (_QUIET / 2 if _ends_a_branch(name) else 1.0)


def _ends_a_branch(name: str) -> bool:
    return any(part in name for part in ("o_proj", "down_proj", "out_proj"))


def _modules(
    family: str, tensors: dict[str, torch.Tensor], num_modules: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    last = LAST_LAYER[family]
    made: dict[str, torch.Tensor] = {}
    for place in range(num_modules):
        target = f"mtp.layers.{place}." if family.startswith("qwen") else f"model.layers.{last + 1 + place}."
        source = f"model.layers.{last}."
        layer = {name.removeprefix(source): value for name, value in tensors.items() if name.startswith(source)}
        for name, value in layer.items():
            made[target + name] = _random(name, value, generator)
        is_first = place == 0
        if family.startswith("qwen"):
            if is_first:
                made |= _ends(("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"), generator)
                for name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"):
                    made[name] -= 1.0  # stored relative to one
        else:
            made |= _ends([target + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")], generator)
    return made


def _ends(names: Sequence[str], generator: torch.Generator) -> dict[str, torch.Tensor]:
    embedding_norm, hidden_norm, projection, last_norm = (f"{name}.weight" for name in names)
    hidden_size = 64
    return {
        **{
            name: 0.7 + 0.6 * torch.rand(hidden_size, generator=generator)
            for name in (embedding_norm, hidden_norm, last_norm)
        },
        projection: _STD * torch.randn(hidden_size, 2 * hidden_size, generator=generator),
    }


def _random(name: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Norms, and what else has one axis, are the source's in another order; matrices are drawn."""
    if value.ndim == 1:
        return value[torch.randperm(len(value), generator=generator)].contiguous()
    std = 0.3 if name.endswith("gate.weight") else _STD
    return (std * torch.randn(value.shape, generator=generator)).to(value.dtype)


# --- the oracle

Run = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, embeddings [T, E], hidden [T, E]) -> output [T, E] before the last norm."""


class DraftOracle:
    """What a checkpoint's modules draft after any sequence."""

    def __init__(self, checkpoint: MtpCheckpoint) -> None:
        self.checkpoint = checkpoint
        folder = checkpoint.head_path or checkpoint.path
        self._model = load_reference(checkpoint.path)
        self._tensors = {
            name: value if name == "draft_token_ids" else value.float()
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self._last_layer: int = self._model.config.num_hidden_layers - 1
        self._layers = [self._layer(place) for place in range(checkpoint.num_modules)]
        self._shortlist = self._tensors.get("draft_token_ids")

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """The tokens drafted to follow token_ids, the last of which the model has not computed."""
        return [int(logits_V.argmax()) for logits_V in self._draft_logits(token_ids, num_drafts)]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_drafts: int) -> torch.Tensor:
        """[num_drafts, V], each module given what the ones before it drafted; -inf outside of a shortlist."""
        return torch.stack(self._draft_logits(token_ids, num_drafts))

    def _draft_logits(self, token_ids: Sequence[int], num_drafts: int) -> list[torch.Tensor]:
        with one_thread():
            known = torch.tensor(list(token_ids))
            hidden_TE = self._model.model(known[None, :-1], use_cache=False).last_hidden_state[0]
            ids_T, handed_on_TE, found = known[1:], hidden_TE, []
            for number in range(num_drafts):
                module = min(number, len(self._layers) - 1)
                if 0 < number < len(self._layers):
                    ids_T, hidden_TE = torch.cat((ids_T[1:], found[-1].argmax()[None])), handed_on_TE
                elif number:  # one position more, with what this module made of the last one
                    ids_T = torch.cat((ids_T, found[-1].argmax()[None]))
                    hidden_TE = torch.cat((hidden_TE, handed_on_TE[-1:]))
                output_TE = self._run(module, ids_T, hidden_TE)
                normed_TE = self._norm("last", module, output_TE)
                handed_on_TE = output_TE if self.checkpoint.family == "llama" else normed_TE
                found.append(self._masked(self._model.lm_head(normed_TE[-1])))
            return found

    def _masked(self, logits_V: torch.Tensor) -> torch.Tensor:
        if self._shortlist is None:
            return logits_V
        masked_V = torch.full_like(logits_V, -torch.inf)
        masked_V[self._shortlist.long()] = logits_V[self._shortlist.long()]
        return masked_V

    def _run(self, module: int, ids_T: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        embedded_TE = self._norm("embedding", module, self._model.get_input_embeddings()(ids_T))
        joined_T2E = torch.cat((embedded_TE, self._norm("hidden", module, hidden_TE)), dim=-1)
        x_TE = joined_T2E @ self._tensors[self._name("projection", module)].T
        num_tokens = len(ids_T)
        positions = torch.arange(num_tokens)[None]
        rope = self._model.model.rotary_emb(x_TE[None], position_ids=positions)
        mask = torch.full((1, 1, num_tokens, num_tokens), -torch.inf).triu(1)
        output = self._layers[module](x_TE[None], position_embeddings=rope, attention_mask=mask, position_ids=positions)
        return (output[0] if isinstance(output, tuple) else output).view(num_tokens, -1)

    def _norm(self, which: str, module: int, x_TE: torch.Tensor) -> torch.Tensor:
        weight_E = self._tensors[self._name(which, module)]
        if self.checkpoint.family.startswith("qwen"):
            weight_E = weight_E + 1.0
        eps = self._model.config.rms_norm_eps
        return weight_E * x_TE * torch.rsqrt(x_TE.pow(2).mean(-1, keepdim=True) + eps)

    def _name(self, which: str, module: int) -> str:
        if self.checkpoint.family.startswith("qwen"):
            name = {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "projection": "fc"}
            return f"mtp.{name.get(which, 'norm')}.weight"
        name = {"embedding": "enorm", "hidden": "hnorm", "projection": "eh_proj", "last": "shared_head.norm"}
        return f"model.layers.{self._last_layer + 1 + module}.{name[which]}.weight"

    def _layer(self, place: int) -> torch.nn.Module:
        """transformers' own layer with the module's weights, read as it reads the base's."""
        last = self._last_layer
        is_qwen = self.checkpoint.family.startswith("qwen")
        source = f"mtp.layers.{place}." if is_qwen else f"model.layers.{last + 1 + place}."
        moved = {
            f"model.layers.{last}.{name.removeprefix(source)}": value
            for name, value in self._tensors.items()
            if name.startswith(source)
        }
        return _reloaded(self.checkpoint.path, moved).model.layers[last]


def _reloaded(path: Path, changed: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The base with other tensors, through a checkpoint of its own, so that names are mapped as ever."""
    base = load_file(path / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(path, folder, dirs_exist_ok=True)
        kept = {name: changed.get(name, value) for name, value in base.items()}
        save_file(kept, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@functools.cache
def oracle_of(checkpoint: MtpCheckpoint) -> DraftOracle:
    """One per checkpoint: it holds several models."""
    return DraftOracle(checkpoint)
