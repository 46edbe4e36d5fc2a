"""An instance of the P/D connector in a process of its own, driven over a pipe."""

import contextlib
import multiprocessing
import os
import signal
import sys

from support.pd_pools import Instance, count_wrong, fill

from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions


def _serve(pipe, instance_id, layouts, transports):
    from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

    instance = Instance(
        instance_id,
        layouts,
        lambda: UcxTransport(UcxOptions(transports=transports)),
        options=PdWorkerOptions(limits=TransferLimits(quiesce_timeout_s=0.5)),
        tp_size=len(layouts),
    )
    verbs = {
        "connect": lambda endpoints: [worker.connect(endpoints) for worker in instance.workers] and None,
        "start": instance.start,
        "cancel": lambda transfer_id: [worker.cancel(transfer_id) for worker in instance.workers] and None,
        "events": lambda _: instance.wait(),
        "fill": lambda args: [fill(pool, layout, *args) for pool, layout in zip(instance.pools, layouts)] and None,
        "count_wrong": lambda args: sum(count_wrong(p, layout, *args) for p, layout in zip(instance.pools, layouts)),
        "fill_group": lambda args: [fill(pool, one, *args[1:]) for pool, one in _of_group(instance, args[0])] and None,
        "count_wrong_in": lambda args: sum(
            count_wrong(pool, one, *args[1:]) for pool, one in _of_group(instance, args[0])
        ),
        "spin": _spin,
        "is_direct": lambda peer: [link.peer().is_direct for link in instance.workers[0]._links[peer]],
    }
    pipe.send(instance.endpoints)
    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) is not None:
            verb, argument = message
            pipe.send(verbs[verb](argument))
    instance.close()


def _of_group(instance, group):
    """(pool, layout) of every rank's part of a cache group."""
    return [
        (pool, one) for pool, groups in zip(instance.pools, instance.layouts) for one in groups if one.group == group
    ]


def _spin(rounds):
    """A thread that never leaves Python: the worst that a model can do to the transfer thread."""
    total = 0
    for i in range(rounds):
        total += i * i
    return total


class InstanceProcess:
    """One process with every rank of an instance."""

    def __init__(self, instance_id, layouts, *, transports, executable=sys.executable):
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, instance_id, layouts, transports), daemon=True)
        context.set_executable(executable)  # for every process from now on, so put it back
        try:
            self._process.start()
        finally:
            context.set_executable(sys.executable)
        far.close()
        self._exit_code = None
        self.endpoints = self._receive()

    def ask(self, verb, argument=None):
        self.tell(verb, argument)
        return self._receive()

    def tell(self, verb, argument=None):
        self._pipe.send((verb, argument))

    def _receive(self):
        if not self._pipe.poll(60):
            raise TimeoutError("the instance does not answer")
        return self._pipe.recv()

    def kill(self):
        self._process.kill()
        self._process.join(10)

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self):
        """Ends the process; its exit code, negative for a signal. Idempotent."""
        if self._exit_code is not None:
            return self._exit_code
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
        self._process.join(15)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(10)
        self._exit_code = self._process.exitcode
        self._process.close()
        self._pipe.close()
        return self._exit_code
