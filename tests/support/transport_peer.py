"""The far end of a transport under test: a thread of this process, or a process of its own.

Both serve peers the way a transfer thread does: progress while there is work, sleep in wait() otherwise.
"""

import contextlib
import multiprocessing
import os
import signal
import threading

import numpy as np

from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport

NUM_BYTES = 8 << 20


def pattern(seed, num_bytes=NUM_BYTES):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def read_from(transport, region, address, key):
    """Begin to read a peer's whole region in small runs, and do not wait for them."""
    peer = transport.connect(address, local=region, remote_key=key)
    flush = peer.flush()
    while not flush.poll():
        transport.progress()
    offsets = np.arange(0, NUM_BYTES, 4096)
    peer.read(offsets, offsets, np.full(len(offsets), 4096))
    while not region.view.any():
        transport.progress()


def _serve(transport, region, pipe):
    """Answer the test's commands and serve peers until told to stop."""
    while True:
        while transport.progress():
            pass
        if not pipe.poll(0):
            transport.wait(0.02)
            continue
        verb, argument = pipe.recv()
        if verb == "stop":
            break
        if verb == "read_from":
            read_from(transport, region, *argument)
        if verb == "fill":
            region.view[:] = pattern(argument, region.view.nbytes)
        pipe.send(region.view.tobytes() if verb == "view" else os.times().user + os.times().system)


def _process(pipe, options):
    from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

    transport = UcxTransport(UcxOptions(**options))
    region = transport.allocate(NUM_BYTES)
    pipe.send((transport.address, region.key))
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(transport, region, pipe)
    transport.close()


class FarEnd:
    """What both kinds have in common. Close it; kill() and freeze() are the ways it may fail."""

    def __init__(self, pipe):
        self._pipe = pipe
        self.address = self.key = b""

    def ask(self, verb, argument=None):
        self._pipe.send((verb, argument))
        if not self._pipe.poll(20):
            raise TimeoutError(f"the far end does not answer {verb}")
        return self._pipe.recv()

    def fill(self, seed):
        self.ask("fill", seed)
        return pattern(seed)

    def read_from(self, address, key):
        self.ask("read_from", (address, key))

    def view(self):
        return np.frombuffer(self.ask("view"), np.uint8)

    def cpu_s(self):
        return self.ask("times")


class ThreadEnd(FarEnd):
    def __init__(self, fabric: LoopbackFabric):
        near, far = multiprocessing.Pipe()
        super().__init__(near)
        self._fabric = fabric
        self._transport = LoopbackTransport(fabric)
        region = self._transport.allocate(NUM_BYTES)
        self.address, self.key = self._transport.address, region.key
        self._thread = threading.Thread(target=_serve, args=(self._transport, region, far), daemon=True)
        self._thread.start()

    def kill(self):
        self._fabric.sever(self.address)

    def freeze(self):
        self._fabric.stall(self.address)

    def close(self):
        self._pipe.send(("stop", None))
        self._thread.join(5)
        self._transport.close()


class ProcessEnd(FarEnd):
    def __init__(self, transports, **options):
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        super().__init__(near)
        self._process = context.Process(target=_process, args=(far, options | {"transports": transports}), daemon=True)
        self._process.start()
        far.close()
        if not near.poll(60):
            raise TimeoutError("the far end does not start")
        self.address, self.key = near.recv()

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.join(10)

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self):
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(("stop", None))
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._process.close()
        self._pipe.close()
