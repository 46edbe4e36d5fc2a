"""Messages between scheduler and workers: one StepPlan down, one StepResult up, as msgpack.

Rows and block ids are the only vocabulary. Arrays travel as little-endian bytes; no pickle. A message of
another WIRE_VERSION is refused. Knows nothing of sockets.

    StepPlan, applied by a worker in this order:
      0. wait_stored    this store and all before it must have ended first: the step writes blocks that they read
      1. freed_rows     rows whose sequence ended, was preempted or left: forget them
      2. new_rows       rows that start here, with every token known so far
      3. deltas         block table entries that changed: table[group][row, column] = block_id. Entries of
                        blocks that fell out of reach are not taken back: nothing reads them any more
      4. zero           blocks to clear: new ones whose page may hold what another group left there
      5. copies         blocks to copy, in order, once all are cleared: targets are often new. Nothing of the
                        step is computed yet
      6. rows           compute num_scheduled tokens of each row from num_computed on; where `sample`
                        is set, the last position's logits yield the row's next token, which the worker
                        appends to its own copy of the row. A step without rows only clears and copies:
                        bytes from elsewhere wait for it
      7. num_drafts     of a row's scheduled tokens the last ones are drafts, unknown to the row: each is accepted
                        as long as the model yields the same token at its place, and one more token follows
      8. num_proposals  the worker then proposes drafts that may follow; the scheduler sends back those it wants
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from blockferry.connectors import typed_maps
from blockferry.engine.request import BoolArray, Int32Array, SamplingParams, TokenLogprobs

WIRE_VERSION = 7

T = TypeVar("T")

_EMPTY_I32: Int32Array = np.empty(0, np.int32)
_NO_BLOCKS: NDArray[np.int32] = np.empty((0, 2), np.int32)
_NO_COPIES: NDArray[np.int32] = np.empty((0, 3), np.int32)


_NO_PROPOSALS: NDArray[np.int32] = np.empty((0, 0), np.int32)
NO_DRAFT = -1  # pads proposals; no token has this id


def _no_proposals() -> NDArray[np.int32]:
    return _NO_PROPOSALS


def _empty() -> Int32Array:
    return _EMPTY_I32


def _no_blocks() -> NDArray[np.int32]:
    return _NO_BLOCKS


def _no_copies() -> NDArray[np.int32]:
    return _NO_COPIES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A sequence that starts on a worker: admitted, resumed after preemption, or handed over."""

    row: int
    token_ids: Int32Array  # [num_tokens], prompt and whatever was generated already
    num_prompt_tokens: int
    sampling: SamplingParams  # seed is never None here
    num_encoder_tokens: int = 0  # of the encoder's input, whose keys and values the row's cross attention reads
    encoder_token_ids: Int32Array | None = None  # [num_encoder_tokens], to be encoded first; None: not, or no more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockDeltas:
    """Block table entries that changed since the last plan, in order; four arrays of one length."""

    group: Int32Array
    row: Int32Array
    column: Int32Array
    block_id: Int32Array

    def __len__(self) -> int:
        return len(self.block_id)


NO_DELTAS = BlockDeltas(group=_EMPTY_I32, row=_EMPTY_I32, column=_EMPTY_I32, block_id=_EMPTY_I32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything one instance computes in one step; see the module's drawing."""

    step_id: int
    wait_stored: int = 0  # job_id of a store into a tier; 0: none
    freed_rows: Int32Array = dataclasses.field(default_factory=_empty)
    new_rows: tuple[NewRow, ...] = ()
    deltas: BlockDeltas = NO_DELTAS
    # [n, 2]: group, block_id
    zero: NDArray[np.int32] = dataclasses.field(default_factory=_no_blocks, metadata=typed_maps.TWO_AXES)
    # [n, 3]: group, source, target
    copies: NDArray[np.int32] = dataclasses.field(default_factory=_no_copies, metadata=typed_maps.TWO_AXES)
    rows: Int32Array = dataclasses.field(default_factory=_empty)  # [R], no row twice
    num_computed: Int32Array = dataclasses.field(default_factory=_empty)  # [R] first position computed
    num_scheduled: Int32Array = dataclasses.field(default_factory=_empty)  # [R] >= 1
    sample: BoolArray = dataclasses.field(default_factory=lambda: np.empty(0, np.bool_))  # [R]
    num_drafts: Int32Array = dataclasses.field(default_factory=_empty)  # [R], part of num_scheduled; empty: no drafts
    draft_token_ids: Int32Array = dataclasses.field(default_factory=_empty)  # [sum(num_drafts)], row by row
    num_proposals: int = 0  # drafts to propose for every sampling row's next step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log probabilities of one row: of prompt positions first_position.. or of the sampled token."""

    row: int
    first_position: int  # position of the token that entries[0] describes
    is_prompt: bool
    entries: tuple[TokenLogprobs, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced: one token per sampling row of the plan and accepted draft, in the plan's order."""

    step_id: int
    token_ids: Int32Array  # [S] or [sum(num_tokens)], S = sum(plan.sample)
    num_tokens: Int32Array = dataclasses.field(default_factory=_empty)  # [S]; empty: one each
    # [S, plan.num_proposals], NO_DRAFT where none, and after it
    proposals: NDArray[np.int32] = dataclasses.field(default_factory=_no_proposals, metadata=typed_maps.TWO_AXES)
    logprobs: tuple[RowLogprobs, ...] = ()
    duration_s: float = 0.0
    error: str = ""  # not empty: the step failed on this rank and its tokens mean nothing


class _Codec:
    """msgpack of our dataclasses: a map of field names, arrays as [dtype, shape, bytes]."""

    DTYPES: ClassVar[dict[str, Any]] = {"i4": np.int32, "f4": np.float32, "b1": np.bool_}

    @staticmethod
    def default(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            code = {"int32": "i4", "float32": "f4", "bool": "b1"}[value.dtype.name]
            return {"@": code, "s": list(value.shape), "d": value.tobytes()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot travel on the wire")

    @staticmethod
    def hook(value: dict[str, Any]) -> Any:
        code = value.get("@")
        if code is None:
            return value
        data = value["d"]
        if type(data) is not bytes:  # a bytearray of a number is that many zeros
            raise ValueError(f"an array's data is of type {type(data).__name__}, not bytes")
        # bytearray keeps the array writable without a second copy
        flat = np.frombuffer(bytearray(data), _Codec.DTYPES[code])
        return flat.reshape(value["s"])


def pack(value: Any) -> bytes:
    """Encode a dataclass, map, list, str, bytes, int, float or int32/float32/bool array."""
    packed: bytes = msgpack.packb([WIRE_VERSION, value], default=_Codec.default)
    return packed


def unpack(data: bytes) -> Any:
    """Decode what pack() made: dataclasses come back as maps. Raises ValueError for anything else."""
    try:
        version, value = msgpack.unpackb(data, object_hook=_Codec.hook, strict_map_key=False)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{len(data)} bytes are no message: {error!r}") from None
    if version != WIRE_VERSION:
        raise ValueError(f"wire version {version!r} does not match {WIRE_VERSION}; run one release everywhere")
    return value


def decode(kind: type[T], data: bytes) -> T:
    """Decode one of `kind`: a dataclass, or a plain value. Raises ValueError for anything else."""
    return typed_maps.read(kind, unpack(data))


def plan_from_bytes(data: bytes) -> StepPlan:
    """Decode a StepPlan. Raises ValueError for anything else."""
    return decode(StepPlan, data)


def result_from_bytes(data: bytes) -> StepResult:
    """Decode a StepResult. Raises ValueError for anything else."""
    return decode(StepResult, data)
