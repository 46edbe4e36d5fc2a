"""Trains a draft head for a model, from nothing but the model: writes text, reads states, trains, measures, saves.

    WORK/settings.json                    what the folder is for
    WORK/held_out/*.npz, *.safetensors    texts to measure with, and their states
    WORK/text/NNNNN.npz, finished         what the model wrote
    WORK/states/NNNNN.safetensors         what it thought
    WORK/training.pt                      how far the training is
    OUT/config.json, model.safetensors    the head

Every file is there whole or not at all; a run that was killed goes on where the last file ends. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from blockferry.engine.errors import ConfigError
from blockferry.engine.models.loader import fingerprint
from blockferry.engine.spec_decode.training.acceptance import Acceptance, Drafts, measure_acceptance
from blockferry.engine.spec_decode.training.base import BaseModel
from blockferry.engine.spec_decode.training.corpus import Writing, load_writings, save_writings
from blockferry.engine.spec_decode.training.examples import Examples
from blockferry.engine.spec_decode.training.files import write_bytes
from blockferry.engine.spec_decode.training.generation import write, write_part
from blockferry.engine.spec_decode.training.head_folder import head_config, save_head
from blockferry.engine.spec_decode.training.held_out import QUESTIONS
from blockferry.engine.spec_decode.training.module import DraftModule, Shape
from blockferry.engine.spec_decode.training.projection import initial_weights
from blockferry.engine.spec_decode.training.prompts import ChatFrame, PromptMaker, PromptSettings, TextTokens
from blockferry.engine.spec_decode.training.states import StateReader, States
from blockferry.engine.spec_decode.training.trainer import Step, Trainer, TrainSettings
from blockferry.engine.spec_decode.training.vocabulary import draft_vocabulary
from blockferry.engine.spec_decode.training.writer import Assignment, ModelWriter

NUM_HELD_OUT_TEXTS = 24
WORDS = {"num_tokens": "tokens", "num_draft_tokens": "vocabulary", "num_epochs": "epochs"}  # for settings
TRAINING = "training.pt"
TEXT_PART, STATES_PART, TRAINING_PART = 0.35, 0.2, 0.45  # of the time: the first two at most, training at least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How much, how long, with what."""

    num_tokens: int = 800_000  # that the model is to write
    num_draft_tokens: int = 8192
    limit_s: float = 3300.0
    num_threads: int = 2
    num_rows: int = 64
    max_output_tokens: int = 224
    max_model_len: int = 512
    training: TrainSettings = dataclasses.field(default_factory=TrainSettings)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """`done` of `total` units of a phase; `note`: how well it goes."""

    phase: str
    done: int
    total: int
    note: str = ""


Report = Callable[[TrainProgress], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """What came of it."""

    folder: Path
    num_tokens: int  # that the model wrote for it
    num_steps: int
    seconds: float  # of training
    acceptance: Mapping[str, Acceptance]  # by kind of held-out text

    def to_json(self) -> dict[str, Any]:
        """For people, in the head's config.json and of `--json`."""
        return {
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "training_s": round(self.seconds),
            "acceptance": {kind: one.to_json() for kind, one in self.acceptance.items()},
        }


class Pipeline:
    """One training. One thread calls run()."""

    def __init__(self, model: Path, tokens: TextTokens, settings: PipelineSettings, report: Report) -> None:
        """Raises ModelLoadError for a model that no head can be trained for, ConfigError for too large a vocabulary."""
        self._base = BaseModel.load(model)
        vocab_size = self._base.header.vocab_size
        if settings.num_draft_tokens > vocab_size:
            raise ConfigError("vocabulary", f"{settings.num_draft_tokens} is more than the model's {vocab_size} tokens")
        self._settings = settings
        self._report = report
        prompt_settings = PromptSettings(
            max_output_tokens=settings.max_output_tokens, stop_token_ids=self._base.header.eos_token_ids
        )
        self._maker = PromptMaker(tokens, ChatFrame.of(tokens), prompt_settings, self._base.header.vocab_size)

    def run(self, work: Path, out: Path) -> TrainedHead:
        """Do what `work` does not say is done. Raises ConfigError for a work folder of another training."""
        torch.set_num_threads(self._settings.num_threads)
        started_s = time.monotonic()
        self._claim(work)
        self._write_texts(work)
        self._read_states(work)
        paths = sorted((work / "states").glob("*.safetensors"))
        writings = [one for path in paths for one in load_writings(work / "text" / f"{path.stem}.npz")]
        states = [States.load(path) for path in paths]
        draft_token_ids = draft_vocabulary(
            writings, vocab_size=self._base.header.vocab_size, num_tokens=self._settings.num_draft_tokens
        )
        left_s = self._settings.limit_s - (time.monotonic() - started_s)
        examples = self._examples(writings, states, draft_token_ids)
        trainer = self._train(
            work, examples, draft_token_ids, limit_s=max(left_s, TRAINING_PART * self._settings.limit_s)
        )
        head = TrainedHead(
            folder=out,
            num_tokens=sum(one.num_output_tokens for one in writings),
            num_steps=trainer.num_done,
            seconds=trainer.elapsed_s,
            acceptance=self._measure(work, trainer, draft_token_ids),
        )
        save_head(out, head_config(self._base.header, head.to_json()), trainer.module.weights(), draft_token_ids)
        return head

    def _claim(self, work: Path) -> None:
        """Make sure that a work folder is this training's."""
        settings = dataclasses.asdict(self._settings)
        for name in ("limit_s", "num_threads", "num_rows"):
            settings.pop(name)
        settings = {"model": fingerprint(self._base.path), **settings}
        path = work / "settings.json"
        if path.exists():
            self._refuse_other(work, json.loads(path.read_text(encoding="utf-8")), settings)
        try:
            write_bytes(path, json.dumps(settings, indent=2).encode())
        except OSError as error:
            raise ConfigError("work", f"{work} cannot be written: {error.strerror}; name another folder") from error

    def _refuse_other(self, work: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        flat_there, flat_here = ({**one, **one.get("training", {})} for one in (there, here))
        differing = [
            f"{WORDS.get(name, name)} {flat_there.get(name)}"
            for name in {**flat_here, **flat_there}
            if name != "training" and flat_there.get(name) != flat_here.get(name)
        ]
        if differing:
            raise ConfigError(
                "work",
                f"{work} holds the beginnings of another training, of {', '.join(differing)}; ask for the same to go "
                "on with it, or name another folder",
            )

    def _write_texts(self, work: Path) -> None:
        finished = work / "text" / "finished"
        if finished.exists():
            return
        settings = self._settings
        writer = ModelWriter(
            self._base.path,
            max_model_len=settings.max_model_len,
            num_rows=settings.num_rows,
            num_threads=settings.num_threads,
        )
        for kind, assignments in self._held_out().items():
            path = work / "held_out" / f"{kind}.npz"
            if not path.exists():
                most = sum(one.sampling.max_tokens for one in assignments)
                meter = _Meter(self._report, f"writing held-out {kind}", 0, most)
                save_writings(path, write(writer, assignments, meter.tick))
        deadline_s = time.monotonic() + TEXT_PART * settings.limit_s
        number, num_done = 0, 0
        while num_done < settings.num_tokens and (number == 0 or time.monotonic() < deadline_s):
            path = work / "text" / f"{number:05}.npz"
            if not path.exists():
                meter = _Meter(self._report, "writing", num_done, settings.num_tokens)
                write_part(path, writer, self._maker, seed=settings.training.seed + number, tick=meter.tick)
            num_done += sum(one.num_output_tokens for one in load_writings(path))
            number += 1
        write_bytes(finished, b"")

    def _held_out(self) -> dict[str, list[Assignment]]:
        texts = {"text": self._maker.held_out_texts(NUM_HELD_OUT_TEXTS)}
        if self._maker.is_chat:
            texts["chat"] = [self._maker.greedy_chat(question) for question in QUESTIONS]
        return texts

    def _read_states(self, work: Path) -> None:
        """Of parts in order; those that time does not suffice for are left out of the training, once it has begun."""
        if (work / TRAINING).exists():
            return
        held_out = [(path, path.with_suffix(".safetensors")) for path in sorted((work / "held_out").glob("*.npz"))]
        texts = sorted((work / "text").glob("*.npz"))
        parts = held_out + [(path, work / "states" / f"{path.stem}.safetensors") for path in texts]
        todo = [(path, target) for path, target in parts if not target.exists()]
        if not todo:
            return
        reader = StateReader(self._base, max_len=self._settings.max_model_len)
        total = sum(len(one.token_ids) for path, _ in todo for one in load_writings(path))
        meter = _Meter(self._report, "reading states", 0, total)
        deadline_s = time.monotonic() + STATES_PART * self._settings.limit_s
        for path, target in todo:
            if time.monotonic() > deadline_s and any((work / "states").glob("*.safetensors")):
                return
            reader.read(load_writings(path), meter.tick).save(target)

    def _examples(self, writings: list[Writing], states: list[States], draft_token_ids: torch.Tensor) -> Examples:
        return Examples.of(writings, states, draft_token_ids, self._base.header.vocab_size)

    def _train(self, work: Path, examples: Examples, draft_token_ids: torch.Tensor, *, limit_s: float) -> Trainer:
        settings = self._settings
        cos_sin = self._base.cos_sin(settings.max_model_len + settings.training.num_steps)
        module = DraftModule(Shape.of(self._base), initial_weights(self._base, examples), cos_sin)
        trainer = Trainer(module, self._base.embedding_VE, self._head(draft_token_ids), settings.training)

        def tick(step: Step) -> None:
            note = f"loss {step.loss:.3f}"
            self._report(TrainProgress(phase="training", done=step.number, total=step.num_steps, note=note))

        trainer.run(examples, work / TRAINING, limit_s=limit_s, tick=tick)
        return trainer

    def _measure(self, work: Path, trainer: Trainer, draft_token_ids: torch.Tensor) -> dict[str, Acceptance]:
        drafts = Drafts(
            module=trainer.module,
            embedding_VE=self._base.embedding_VE,
            head_VE=self._head(draft_token_ids),
            token_ids=draft_token_ids,
        )
        found = {}
        for path in sorted((work / "held_out").glob("*.npz")):
            writings = load_writings(path)
            states = States.load(path.with_suffix(".safetensors"))
            found[path.stem] = measure_acceptance(drafts, writings, self._examples(writings, [states], draft_token_ids))
        return found

    def _head(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        return self._base.head_VE[draft_token_ids.long()]


class _Meter:
    """Adds up what a phase has done and reports it."""

    def __init__(self, report: Report, phase: str, done: int, total: int) -> None:
        self._report = report
        self._phase, self._done, self._total = phase, done, total

    def tick(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        self._report(TrainProgress(phase=self._phase, done=self._done, total=max(self._done, self._total)))
