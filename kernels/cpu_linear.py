"""Linear layers in bfloat16 on CPUs with AMX, for any number of rows.

oneDNN needs 30 us a call before it computes anything, half of the time that a small layer's weights take to arrive;
here a call costs 5. The weight is kept in the order in which tiles read it, so it streams through memory once:

    weight [F, E]  ->  packed [F/16, E/2, 16, 2]: for 16 outputs, pairs of inputs of each

A sum runs over the inputs in one order whatever the number of rows, so a row's
outputs do not depend on the others.

Legend: T tokens (rows), E in features, F out features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch.nn import functional

from blockferry.kernels import cpu_amx as amx
from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_amx import TILE_INPUTS, TILE_ROWS
from blockferry.kernels.cpu_emit import CACHE_LINE_BYTES, I64, LANES, Element, word
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, compile_kernel
from blockferry.kernels.cpu_vector import add, function, jit, load_f32, load_i64, scratch, store_in_turn_of

ITEM_OUTPUTS = 2 * TILE_ROWS
configure = function(types.void, [types.intp], amx.configure)
release = function(types.void, [types.intp], lambda builder, _: amx.release(builder))
MAX_FEW_ROWS = 64  # with more rows than this, arithmetic takes longer than memory
_GROUP_ROWS = 2 * TILE_ROWS
_PART_ROWS, _CHUNK_OUTPUTS = 128, 256
_NEAR_BYTES = 4096  # so far ahead weights are fetched from the L2 cache
# registers: sums of row tile r and output tile o in 2 * r + o, rows in 4 + r, weights in 6 + o
_INPUT, _WEIGHT = 4, 6


class TiledLinear:
    """One layer: y = x W^T + b. Called by one thread."""

    def __init__(self, launcher: Launcher, weight_FE: torch.Tensor, bias_F: torch.Tensor | None) -> None:
        """Copies the weight. Raises ValueError for one that can_tile() refuses."""
        if not can_tile(weight_FE):
            raise ValueError(f"a {weight_FE.dtype} weight of {tuple(weight_FE.shape)} cannot be tiled; see can_tile()")
        self.num_outputs, self.num_inputs = weight_FE.shape
        self.packed = pack_weight(weight_FE)
        self.bias_F = torch.zeros(self.num_outputs) if bias_F is None else bias_F.float().contiguous()
        self._launcher = launcher
        self._configurations = np.stack([_configure(num_rows) for num_rows in range(_GROUP_ROWS + 1)])
        self._constants = (
            self.packed.data_ptr(),
            self.bias_F.data_ptr(),
            self._configurations.ctypes.data,
            self.num_inputs,
            self.num_outputs,
        )
        self.few_rows: CompiledKernel = launcher.store.get("linear-few_rows", compile_few_rows)
        self._many_rows: CompiledKernel = launcher.store.get("linear-many_rows", compile_many_rows)
        self.num_items = self.num_outputs // ITEM_OUTPUTS  # of few_rows

    def arguments(self, x_TE: torch.Tensor, out_TF: torch.Tensor) -> tuple[int, ...]:
        """Of either kernel, after the number of threads; for rows of x that are dense and out that is contiguous."""
        return (len(x_TE), x_TE.data_ptr(), out_TF.data_ptr(), 2 * x_TE.stride(0), *self._constants)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, F]; x is bfloat16."""
        if x_TE.stride(1) != 1:
            x_TE = x_TE.contiguous()
        num_rows = len(x_TE)
        out_TF = torch.empty((num_rows, self.num_outputs), dtype=torch.bfloat16)
        num_threads = torch.get_num_threads()
        kernel, num_items = self.few_rows, self.num_items
        if num_rows > MAX_FEW_ROWS:
            kernel = self._many_rows
            num_items = -(-num_rows // _PART_ROWS) * -(-self.num_outputs // _CHUNK_OUTPUTS)
        self._launcher.run(kernel, num_threads, num_items, (num_threads, *self.arguments(x_TE, out_TF)))
        return out_TF


def can_tile(weight_FE: torch.Tensor) -> bool:
    """Whether TiledLinear takes the weight on this machine."""
    num_outputs, num_inputs = weight_FE.shape
    is_whole = num_outputs % ITEM_OUTPUTS == 0 and num_inputs % TILE_INPUTS == 0
    return weight_FE.dtype == torch.bfloat16 and is_whole and amx.has_amx()


def pack_weight(weight_FE: torch.Tensor) -> torch.Tensor:
    """[F/16, E/2, 16, 2], contiguous."""
    num_outputs, num_inputs = weight_FE.shape
    # NumPy's memory asks for huge pages, which stream a twentieth faster; torch's does not
    packed = torch.from_numpy(np.empty((num_outputs // 16, num_inputs // 2, 16, 2), np.int16)).view(torch.bfloat16)
    return packed.copy_(weight_FE.reshape(num_outputs // 16, 16, num_inputs // 2, 2).transpose(1, 2))


def linear_oracle(x_TE: torch.Tensor, weight_FE: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """[T, F] in plain torch, summed in float32."""
    bias_F = None if bias_F is None else bias_F.float()
    return functional.linear(x_TE.float(), weight_FE.float(), bias_F).to(x_TE.dtype)


def _configure(num_rows: int) -> Any:
    """Registers for up to 32 rows and 32 outputs."""
    rows = {_WEIGHT: TILE_ROWS, _WEIGHT + 1: TILE_ROWS}
    for tile in range(-(-num_rows // TILE_ROWS)):
        tile_rows = min(TILE_ROWS, num_rows - tile * TILE_ROWS)
        rows |= {_INPUT + tile: tile_rows, 2 * tile: tile_rows, 2 * tile + 1: tile_rows}
    return amx.make_configuration(rows)


def compile_few_rows() -> Any:
    """The kernel of up to 64 rows; an item is 32 outputs of all rows. The weights set the pace."""
    compute_group = make_compute_group(cache_level=2)
    sum_floats = _GROUP_ROWS * ITEM_OUTPUTS

    def compute_item(arguments: int, index: int) -> None:
        num_threads, rows, num_inputs = load_i64(arguments, 2), load_i64(arguments, 3), load_i64(arguments, 10)
        ahead = num_threads * ITEM_OUTPUTS * num_inputs * 2  # what this thread takes next, most likely
        sums = scratch(sum_floats)
        for first in range(0, rows, _GROUP_ROWS):
            compute_group(arguments, first, min(_GROUP_ROWS, rows - first), index * ITEM_OUTPUTS, ahead, sums)

    return compile_kernel(compute_item, enter=_enter, leave=_leave)


def compile_many_rows() -> Any:
    """The kernel of more rows; an item is 256 outputs, whose weights stay in the L2 cache, of 128 rows.

    32 rows at a time stay in the L1 cache while the weights stream past them.
    """
    compute_group = make_compute_group(cache_level=1)
    sum_floats = _GROUP_ROWS * ITEM_OUTPUTS

    def compute_item(arguments: int, index: int) -> None:
        rows, num_outputs = load_i64(arguments, 3), load_i64(arguments, 11)
        num_parts = (rows + _PART_ROWS - 1) // _PART_ROWS
        chunk = index // num_parts
        first_row, first_output = (index - chunk * num_parts) * _PART_ROWS, chunk * _CHUNK_OUTPUTS
        end_row, end_output = min(rows, first_row + _PART_ROWS), min(num_outputs, first_output + _CHUNK_OUTPUTS)
        sums = scratch(sum_floats)
        for first in range(first_row, end_row, _GROUP_ROWS):
            group = min(_GROUP_ROWS, end_row - first)
            for output in range(first_output, end_output, ITEM_OUTPUTS):
                compute_group(arguments, first, group, output, _NEAR_BYTES, sums)

    return compile_kernel(compute_item, enter=_enter, leave=_leave)


def _enter(arguments: int) -> None:
    configure(load_i64(arguments, 9) + 64 * min(_GROUP_ROWS, load_i64(arguments, 3)))


def _leave(arguments: int) -> None:
    release(arguments)


def make_compute_group(*, cache_level: int) -> Any:
    """compute_group(arguments, first row, rows, first output, ahead, sums): 32 outputs of up to 32 rows."""
    one, two = (make_sum_group(tiles, cache_level=cache_level) for tiles in (1, 2))
    store = store_in_turn_of(Element.BFLOAT16)
    tile_bytes, row_bytes = TILE_ROWS * LANES * 4, LANES * 4

    @jit
    def write(out: int, out_stride: int, bias: int, sums: int, rows: int) -> None:
        """Sums plus bias."""
        left, right = load_f32(bias, 0), load_f32(bias, LANES)
        for tile in range(0, rows, TILE_ROWS):
            source = sums + (tile // TILE_ROWS) * 2 * tile_bytes
            for _ in range(min(TILE_ROWS, rows - tile)):
                store(out, 0, add(load_f32(source, 0), left), add(load_f32(source + tile_bytes, 0), right))
                source += row_bytes
                out += out_stride

    @jit
    def compute_group(arguments: int, first: int, rows: int, output: int, ahead: int, sums: int) -> None:
        x, out, x_stride = load_i64(arguments, 4), load_i64(arguments, 5), load_i64(arguments, 6)
        packed, bias, configurations = load_i64(arguments, 7), load_i64(arguments, 8), load_i64(arguments, 9)
        num_inputs, out_stride = load_i64(arguments, 10), 2 * load_i64(arguments, 11)
        usual = min(_GROUP_ROWS, load_i64(arguments, 3))
        inputs, weights = x + first * x_stride, packed + output * num_inputs * 2
        if rows != usual:
            configure(configurations + 64 * rows)
        if rows <= TILE_ROWS:
            one(inputs, x_stride, weights, ahead, num_inputs, sums)
        else:
            two(inputs, x_stride, weights, ahead, num_inputs, sums)
        if rows != usual:
            configure(configurations + 64 * usual)
        write(out + first * out_stride + output * 2, out_stride, bias + output * 4, sums, rows)

    return compute_group


def make_sum_group(num_row_tiles: int, *, cache_level: int) -> Any:
    """sum_group(x, x stride, weights, ahead, E, sums): up to 16 or 32 rows and 32 outputs, tile by tile.

    Asks for the weights that lie `ahead` bytes further on its way, into the cache of that level.
    """

    def emit_step(builder: ir.IRBuilder, args: list[ir.Value], index: ir.Value) -> None:
        """32 inputs of everything."""
        x, x_stride, weights, ahead, size, _ = args
        row_offset = builder.add(x, builder.mul(index, word(2)))
        for tile in range(num_row_tiles):
            address = builder.add(row_offset, builder.mul(x_stride, word(tile * TILE_ROWS)))
            amx.load(builder, _INPUT + tile, address, x_stride)
        for half in range(2):
            # 16 outputs take 32 bytes for each input
            offset = builder.mul(builder.add(index, builder.mul(size, word(half))), word(32))
            address = builder.add(weights, offset)
            for line in range(0, TILE_INPUTS * 32, CACHE_LINE_BYTES):
                line_address = builder.add(address, builder.add(ahead, word(line)))
                emit.prefetch(builder, line_address, cache_level=cache_level)
            amx.load(builder, _WEIGHT + half, address, word(amx.TILE_ROW_BYTES))
            for tile in range(num_row_tiles):
                amx.dot(builder, 2 * tile + half, _INPUT + tile, _WEIGHT + half)

    def generate(builder: ir.IRBuilder, *args: ir.Value) -> None:
        size, sums = args[4:]
        for register in range(2 * num_row_tiles):
            amx.zero(builder, register)
        with cgutils.for_range_slice(builder, word(0), size, word(TILE_INPUTS), intp=I64) as (index, _):
            emit_step(builder, list(args), index)
        for register in range(2 * num_row_tiles):
            amx.store(builder, register, builder.add(sums, word(register * TILE_ROWS * LANES * 4)))

    return function(types.void, [types.intp] * 6, generate)
