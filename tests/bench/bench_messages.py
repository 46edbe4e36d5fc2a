"""Time what the secret costs: one step's messages between scheduler and a worker process, encrypted against plain.

    python tests/bench/bench_messages.py [--rows 1024] [--rounds 300] [--over tcp|ipc]

A round sends the plan of a decode step of so many rows and awaits its result, both encoded and decoded as they are in
service; both kinds alternate in every run. Prints medians of a round in microseconds, and processor seconds of both
ends for a thousand rounds.
"""

import argparse
import multiprocessing
import statistics
import time

import numpy as np
import zmq

from blockferry.cluster import messages
from blockferry.cluster.messages import Tag
from blockferry.cluster.secret import ClusterSecret
from blockferry.cluster.sockets import Binding, bind_router, connect_dealer
from blockferry.engine import wire
from blockferry.engine.wire import BlockDeltas, StepPlan, StepResult

NUM_RUNS = 7


class Plain(ClusterSecret):
    """A secret that opens nothing and closes nothing."""

    def guard(self, socket):
        pass

    def present(self, socket):
        pass


def decode_step(num_rows):
    rows = np.arange(num_rows, dtype=np.int32)
    crossed = rows[: num_rows // 16]  # a sixteenth of the rows begins a new block
    return StepPlan(
        step_id=1,
        deltas=BlockDeltas(group=crossed * 0, row=crossed, column=crossed, block_id=crossed),
        rows=rows,
        num_computed=rows,
        num_scheduled=np.ones(num_rows, np.int32),
        sample=np.ones(num_rows, np.bool_),
    )


def serve(endpoint, identity, num_rounds):
    """Take plans and give results until all rounds are done."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    connect_dealer(socket, endpoint, identity=identity, linger_ms=1000)
    socket.send_multipart(messages.encode(Tag.HELLO, {}))
    for _ in range(num_rounds):
        _, payload = messages.split(socket.recv_multipart())
        plan = wire.plan_from_bytes(payload)
        result = StepResult(step_id=plan.step_id, token_ids=plan.rows)
        socket.send_multipart(messages.encode(Tag.RESULT, result))
    socket.recv_multipart()
    socket.send_multipart(messages.encode(Tag.STATUS_REPLY, time.process_time()))
    context.destroy(linger=1000)


class Pair:
    """One bound socket and the process at its other end."""

    def __init__(self, secret, args):
        self.context = zmq.Context()
        bound = bind_router(self.context, Binding(host="127.0.0.1", secret=secret))
        endpoint = bound.endpoints.remote if args.over == "tcp" else bound.endpoints.local
        self.socket, self.plan = bound.socket, decode_step(args.rows)
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(endpoint, b"rank", NUM_RUNS * args.rounds)
        )
        self.process.start()
        self.socket.recv_multipart()
        self.cpu_s = 0.0

    def run(self, num_rounds):
        """Median microseconds of a round."""
        times, before = [], time.process_time()
        for _ in range(num_rounds):
            began = time.perf_counter()
            self.socket.send_multipart([b"rank", *messages.encode(Tag.PLAN, self.plan)])
            _, payload = messages.split(self.socket.recv_multipart()[1:])
            wire.result_from_bytes(payload)
            times.append(time.perf_counter() - began)
        self.cpu_s += time.process_time() - before
        return statistics.median(times) * 1e6

    def close(self):
        """Processor seconds of both ends."""
        self.socket.send_multipart([b"rank", *messages.encode(Tag.STOP, "")])
        _, payload = messages.split(self.socket.recv_multipart()[1:])
        self.process.join()
        self.context.destroy(linger=0)
        return self.cpu_s + wire.unpack(payload)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--over", choices=["tcp", "ipc"], default="ipc")
    args = parser.parse_args()
    pairs = {"plain": Pair(Plain(text=""), args), "encrypted": Pair(ClusterSecret.make(), args)}
    medians = {name: [] for name in pairs}
    for _ in range(NUM_RUNS):
        for name, pair in pairs.items():
            medians[name].append(pair.run(args.rounds))
    num_bytes = sum(map(len, messages.encode(Tag.PLAN, decode_step(args.rows))))
    print(f"{args.rows} rows over {args.over}, a plan of {num_bytes} bytes")
    for name, pair in pairs.items():
        cpu_s = pair.close() / (NUM_RUNS * args.rounds) * 1000
        found = sorted(medians[name])
        print(f"{name:>10}: {statistics.median(found):7.1f} us a round ({found[0]:.1f} to {found[-1]:.1f}), ", end="")
        print(f"{cpu_s:.3f} CPU s a thousand")


if __name__ == "__main__":
    main()
