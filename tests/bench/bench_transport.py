"""Time one transport's peer alone, two processes on loopback: scattered pieces against the ceilings of the same run.

    python tests/bench/bench_transport.py [--path tcp|shm] [--pieces 4K,16K,...] [--verbs write,read] [--set NAME=VALUE]

Prints GiB/s, medians of runs that alternate: the transport packing small runs, the same without packing, and the
ceiling (shm: a compiled memcpy of the same runs; tcp: plain sockets, one sending the pieces one by one and one
sending contiguous bytes without ever sleeping), and checksums of both ends, which `checksums: true` adds.
CPU seconds are those of both processes, ceilings' of all plain sockets together. --set passes UCX options by their
names without UCX_.
"""

import argparse
import multiprocessing
import socket
import statistics
import time

import numpy as np

from blockferry.connectors.transport.native_checksum import sum_runs
from blockferry.connectors.transport.native_loops import copy_runs
from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

TLS = {"shm": ("posix", "self"), "tcp": ("tcp", "self")}
GIB = float(1 << 30)
SOCKET_BYTES = 4 << 20


def open_transport(args, pack_below):
    extra = dict(item.split("=", 1) for item in args.set)
    options = {} if pack_below is None else {"pack_below_bytes": pack_below}
    return UcxTransport(UcxOptions(transports=TLS[args.path], extra=extra, **options))


def receive(listener, buffer, mode):
    """Take one plain stream into the buffer."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        connection.setblocking(mode != "spin")
        received = 0
        while received < len(buffer):
            try:
                received += connection.recv_into(buffer[received : received + SOCKET_BYTES])
            except BlockingIOError:
                continue
        connection.setblocking(True)
        connection.sendall(b"!")


def far_main(pipe, args):
    transport = open_transport(args, None)
    region = transport.allocate(args.bytes)
    region.view[:] = 1
    spare = np.ones(args.bytes, np.uint8)
    pipe.send((transport.address, region.key))
    while True:
        while transport.progress():
            pass
        if not pipe.poll(0):
            transport.wait(0.02)
            continue
        verb, argument = pipe.recv()
        if verb == "stop":
            break
        if verb == "receive":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                pipe.send(listener.getsockname()[1])
                receive(listener, memoryview(spare), argument)
        elif verb == "fill":
            region.view[:] = np.random.default_rng(argument).integers(0, 256, args.bytes, dtype=np.uint8)
            pipe.send(None)
        elif verb == "cpu":
            pipe.send(time.process_time())
        else:
            pipe.send(region.view.tobytes())
    transport.close()


class Bench:
    """The near process: two transports, packing and not, towards one far end."""

    def __init__(self, args):
        self.args = args
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=far_main, args=(theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        address, key = self.pipe.recv()
        self.ends = {}
        for name, pack_below in (("packed", args.pack_below), ("unpacked", 0)):
            transport = open_transport(args, pack_below)
            region = transport.allocate(args.bytes)
            region.view[:] = 1
            self.ends[name] = (transport, region, transport.connect(address, local=region, remote_key=key))
        self.spare = np.ones(args.bytes, np.uint8)

    def close(self):
        for transport, _, _ in self.ends.values():
            transport.close()
        self.pipe.send(("stop", None))
        self.process.join(10)

    def runs(self, piece, seed):
        """Local and remote offsets of scattered pieces, and their lengths."""
        rng = np.random.default_rng(seed)
        count = self.args.bytes // piece
        return rng.permutation(count) * piece, rng.permutation(count) * piece, np.full(count, piece)

    def move(self, name, verb, runs):
        """Seconds of one transfer in batches, some of them under way at once."""
        transport, _, peer = self.ends[name]
        local, remote, lengths = runs
        per_batch = max(1, self.args.batch // int(lengths[0]))
        flushes = []
        started_s = time.perf_counter()
        for start in range(0, len(lengths), per_batch):
            batch = slice(start, start + per_batch)
            getattr(peer, verb)(local[batch], remote[batch], lengths[batch])
            flushes.append(peer.flush())
            self.reap(transport, flushes, self.args.in_flight - 1)
        self.reap(transport, flushes, 0)
        return time.perf_counter() - started_s

    def reap(self, transport, flushes, limit):
        while len(flushes) > limit:
            while flushes and flushes[0].poll():
                flushes.pop(0)
            if len(flushes) > limit and not transport.progress():
                transport.wait(0.05)

    def compare(self, verb, runs):
        """Seconds of checking a transfer's checksums, batch by batch: the far end's, then ours."""
        transport, region, peer = self.ends["packed"]
        local, remote, lengths = runs
        per_batch = max(1, self.args.batch // int(lengths[0]))
        started_s = time.perf_counter()
        for start in range(0, len(lengths), per_batch):
            batch = slice(start, start + per_batch)
            checksum = peer.checksum(remote[batch], lengths[batch])
            while checksum.poll() is None:
                if not transport.progress():
                    transport.wait(0.05)
            own = int(sum_runs(region.view.ctypes.data, local[batch], lengths[batch]))
            assert own == checksum.poll(), f"{verb}: the checksums differ"
        return time.perf_counter() - started_s

    def check(self, name, verb, runs):
        """Whether a transfer moved the right bytes."""
        self.pipe.send(("fill", 5))
        self.pipe.recv()
        view = self.ends[name][1].view
        view[:] = np.random.default_rng(6).integers(0, 256, self.args.bytes, dtype=np.uint8)
        before = view.copy()
        self.move(name, verb, runs)
        self.pipe.send(("view", None))
        far = np.frombuffer(self.pipe.recv(), np.uint8)
        pieces = [array.reshape(-1, int(runs[2][0])) for array in (before if verb == "write" else view, far)]
        near_ids, far_ids = runs[0] // runs[2][0], runs[1] // runs[2][0]
        assert (pieces[0][near_ids] == pieces[1][far_ids]).all(), f"{name} {verb}: wrong bytes"

    def ceilings(self, piece, runs):
        """Seconds of what the machine does at best, by name."""
        local, remote, lengths = runs
        data = self.ends["packed"][1].view
        if self.args.path == "shm":
            started_s = time.perf_counter()
            copy_runs(self.spare.ctypes.data, data.ctypes.data, remote, local, lengths)
            return {"memcpy": time.perf_counter() - started_s}
        steps = {"sock": [(o, piece) for o in local.tolist()], "spin": [(0, self.args.bytes)]}
        return {name: self.send(name, data, pieces) for name, pieces in steps.items()}

    def timed(self, cpu, name, move):
        """What move() returns; CPU seconds of both processes go to cpu[name]."""
        before_s = self.cpu_s()
        result = move()
        cpu.setdefault(name, []).append(self.cpu_s() - before_s)
        return result

    def send(self, mode, data, pieces):
        self.pipe.send(("receive", mode))
        with socket.create_connection(("127.0.0.1", self.pipe.recv())) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(mode != "spin")
            started_s = time.perf_counter()
            for offset, length in pieces:
                left = memoryview(data)[offset : offset + length]
                while left:
                    try:
                        left = left[connection.send(left[:SOCKET_BYTES]) :]
                    except BlockingIOError:
                        continue
            connection.setblocking(True)
            connection.recv(1)
            return time.perf_counter() - started_s

    def cpu_s(self):
        """CPU seconds of both processes so far."""
        self.pipe.send(("cpu", None))
        return self.pipe.recv() + time.process_time()

    def run(self, piece, verb):
        runs = self.runs(piece, 1)
        for name in self.ends:
            self.check(name, verb, runs)
        seconds, cpu = {}, {}
        for _ in range(self.args.runs):
            for name in self.ends:
                elapsed_s = self.timed(cpu, name, lambda name=name: self.move(name, verb, runs))
                seconds.setdefault(name, []).append(elapsed_s)
            seconds.setdefault("checksums", []).append(self.timed(cpu, "checksums", lambda: self.compare(verb, runs)))
            for name, elapsed_s in self.timed(cpu, "ceilings", lambda: self.ceilings(piece, runs)).items():
                seconds.setdefault(name, []).append(elapsed_s)
        speeds = {name: self.args.bytes / GIB / statistics.median(values) for name, values in seconds.items()}
        ceiling = max(speed for name, speed in speeds.items() if name not in (*self.ends, "checksums"))
        text = "  ".join(f"{name} {speed:6.2f}" for name, speed in speeds.items())
        ratios = "  ".join(f"{name}/ceiling {speeds[name] / ceiling:.2f}" for name in self.ends)
        costs = "  ".join(f"{name} {statistics.median(cpu[name]) * GIB / self.args.bytes:.2f}" for name in cpu)
        gain = speeds["packed"] / speeds["unpacked"]
        head = f"{self.args.path} {verb:5} {piece >> 10:5} KiB"
        print(f"{head}  {text}  {ratios}  packed/unpacked {gain:.2f}  CPU s/GiB {costs}", flush=True)


def size(text):
    units = {"K": 10, "M": 20}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=tuple(TLS), default="tcp")
    parser.add_argument("--pieces", default="4K,16K,64K,256K,1M")
    parser.add_argument("--verbs", default="write,read")
    parser.add_argument("--bytes", type=size, default=64 << 20)
    parser.add_argument("--batch", type=size, default=8 << 20)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--pack-below", type=size, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    bench = Bench(args)
    try:
        for piece in map(size, args.pieces.split(",")):
            for verb in args.verbs.split(","):
                bench.run(piece, verb)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
