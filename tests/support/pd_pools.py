"""Pools and transfers for tests of the P/D connector's worker half: layouts, patterns and an independent check."""

import itertools
import queue

import numpy as np

from blockferry.connectors.base import PoolLayout, RankIdentity, TransferCommand, TransferMode, TransferPart
from blockferry.connectors.layout import strides
from blockferry.connectors.pd_worker import PdWorker

LAYERS = (0, 1, 2, 3)
NUM_HEADS = 4


def make_layout(**changes):
    values = {
        "order": "BHLNC",
        "num_blocks": 32,
        "block_size": 16,
        "layer_ids": LAYERS,
        "head_start": 0,
        "num_heads": NUM_HEADS,
        "content_bytes": 32,
        "dtype": "bfloat16",
    }
    return PoolLayout(**(values | changes))


def shard(*, tp_size=1, pp_size=1, **changes):
    """Layouts of every rank of an instance, tensor-parallel rank fastest."""
    heads, layers = NUM_HEADS // tp_size, len(LAYERS) // pp_size
    return [
        make_layout(
            layer_ids=LAYERS[pp * layers : (pp + 1) * layers], head_start=tp * heads, num_heads=heads, **changes
        )
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]


def token_view(pool, layout):
    """The pool as [block, layer, head, token, content], whatever its order."""
    steps = strides(layout)
    return np.lib.stride_tricks.as_strided(
        pool[layout.offset :],
        (layout.num_blocks, len(layout.layer_ids), layout.num_heads, layout.block_size, layout.content_bytes),
        (*steps, 1),
    )


def content(layer_id, head, token, num_bytes):
    """What token `token` of a sequence has in one layer and head, recognisable anywhere."""
    seed = ((layer_id * 131 + head) * 65_537 + token) * 40_503
    return ((np.arange(num_bytes, dtype=np.uint64) * 2_654_435_761 + seed) >> np.uint64(13)).astype(np.uint8)


def fill(pool, layout, block_ids, num_tokens):
    view = token_view(pool, layout)
    for slot, head, token in itertools.product(
        range(len(layout.layer_ids)), range(layout.num_heads), range(num_tokens)
    ):
        block = block_ids[token // layout.block_size]
        value = content(layout.layer_ids[slot], layout.head_start + head, token, layout.content_bytes)
        view[block, slot, head, token % layout.block_size] = value


def count_wrong(pool, layout, block_ids, num_tokens, *, first_token=0):
    """Tokens of the pool's blocks that differ from the sequence's, from first_token on."""
    view = token_view(pool, layout)
    wrong = 0
    for slot, head, token in itertools.product(
        range(len(layout.layer_ids)), range(layout.num_heads), range(num_tokens)
    ):
        block = block_ids[token // layout.block_size]
        layer_id, global_head = layout.layer_ids[slot], layout.head_start + head
        value = content(layer_id, global_head, first_token + token, layout.content_bytes)
        wrong += (view[block, slot, head, token % layout.block_size] != value).any()
    return int(wrong)


class Instance:
    """The workers of one instance and the events they report. A rank's layouts are one, or a tuple of all groups'."""

    def __init__(self, instance_id, layouts, open_transport, *, tp_size=1, options, fingerprint="m", progress=None):
        self.instance_id, self.layouts = instance_id, layouts
        self.events = queue.Queue()
        self.workers, self.pools, self.endpoints, self.transports = [], [], [], []
        for rank, layout in enumerate(layouts):
            identity = RankIdentity(
                instance_id=instance_id,
                rank=rank,
                tp_rank=rank % tp_size,
                pp_rank=rank // tp_size,
                model_fingerprint=fingerprint,
            )
            transport = open_transport()
            worker = PdWorker(transport, identity, self.events.put, options, progress=progress)
            groups = layout if isinstance(layout, tuple) else (layout,)
            self.pools.append(worker.allocate(max(one.num_bytes for one in groups)))
            self.endpoints.append(worker.endpoint(groups))
            self.workers.append(worker)
            self.transports.append(transport)

    def connect(self, other):
        for worker in self.workers:
            worker.connect(other.endpoints)

    def start(self, command):
        for worker in self.workers:
            worker.start(command)

    def wait(self, num_events=None, timeout_s=20.0):
        return [self.events.get(timeout=timeout_s) for _ in range(num_events or len(self.workers))]

    def close(self):
        for worker in self.workers:
            worker.close()


def part(src_block_ids, dst_block_ids, num_tokens, **changes):
    values = {
        "src_group": 0,
        "dst_group": 0,
        "src_block_ids": np.array(src_block_ids, np.int32),
        "dst_block_ids": np.array(dst_block_ids, np.int32),
        "num_tokens": num_tokens,
    }
    return TransferPart(**(values | changes))


def command(src_block_ids, dst_block_ids, num_tokens, *, first_token=0, **changes):
    """A transfer of one group."""
    return command_of(part(src_block_ids, dst_block_ids, num_tokens, first_token=first_token), **changes)


def command_of(*parts, **changes):
    values = {
        "transfer_id": 1,
        "mode": TransferMode.PUSH,
        "src_instance_id": "p0",
        "dst_instance_id": "d0",
        "parts": parts,
        "deadline_s": 20.0,
    }
    return TransferCommand(**(values | changes))
