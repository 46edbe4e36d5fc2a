"""Transport over UCX: pools that peers write and read one-sidedly.

Owns one UCX context and worker per process, every endpoint and every registered region. UCX chooses the way:

    same host     the peer's pool is mapped into this process (posix shared memory; ucp_rkey_ptr hands out the
                  address). Writes and reads are compiled memcpy loops: nothing of the peer is needed
    other hosts   ucp_put_nbx / ucp_get_nbx over TCP (or RDMA where UCX has it), posted by a compiled loop, one
                  flush. TCP is emulated by messages: the target must progress, which its own transfer thread does.
                  Small runs travel packed (ucx_packing), and the target's thread scatters and gathers (ucx_service)

Methods belong to the one owning thread; only wake() may come from another. No wait is unbounded: close() of a
dead or frozen peer gives up after close_timeout_s. UCX facts: openucx.org, ucp/api/ucp.h.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import os
import select
import threading
import time
from collections.abc import Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from types import MappingProxyType

import numpy as np

from blockferry.connectors.base import ByteArray, Region
from blockferry.connectors.transport import native_loops as loops
from blockferry.connectors.transport import native_packing
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.datagrams import no_empty_datagrams
from blockferry.connectors.transport.pool_secret import PoolSecret
from blockferry.connectors.transport.ucx_greeting import Greeter
from blockferry.connectors.transport.ucx_peer import UcxAccess, UcxPeer, UcxRegion
from blockferry.connectors.transport.ucx_service import NUM_ROWS, PoolKey, UcxService, make_rows

logger = logging.getLogger(__name__)

_FEATURES = api.FEATURE_RMA | api.FEATURE_AM | api.FEATURE_WAKEUP
_DRAIN_ROUNDS = 64
_SPIN_ROUNDS = 100  # 10 us on shared memory, 100 us on TCP: how long wait() looks before it sleeps

# Sizes that lift TCP from 1.4 to 5.9 GiB/s, and error handling that shared memory has off by default.
_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "POSIX_ERROR_HANDLING": "y",
        "KEEPALIVE_INTERVAL": "1s",
        "TCP_SNDBUF": "4M",
        "TCP_RCVBUF": "4M",
        "TCP_TX_SEG_SIZE": "256K",
        "TCP_RX_SEG_SIZE": "256K",
        "TCP_MAX_IOV": "40",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UcxOptions:
    """How UCX is set up. `extra` holds further UCX options by their names without the UCX_ prefix."""

    transports: tuple[str, ...] = ("posix", "tcp", "self")  # UCX_TLS
    net_device: str = ""  # UCX_NET_DEVICES, e.g. "eth0"; "": UCX chooses
    close_timeout_s: float = 2.0
    pack_below_bytes: float = math.inf  # runs shorter than this are packed where a network is crossed; 0: never
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_config(self) -> dict[str, str]:
        """The options by UCX's own names."""
        config = dict(_DEFAULTS) | {"TLS": ",".join(self.transports)}
        if self.net_device:
            config["NET_DEVICES"] = self.net_device
        return config | dict(self.extra)

    @property
    def words(self) -> str:
        """What was asked for, as errors name it."""
        return ", ".join(f"{name}={value}" for name, value in self.to_config().items() if _DEFAULTS.get(name) != value)


class UcxTransport:
    """This process's UCX worker. See Transport for who may call what."""

    name = "ucx"

    def __init__(self, options: UcxOptions = UcxOptions()) -> None:
        """Set UCX up. Raises TransportError when it is missing or an option is refused."""
        self._options = options
        self._ucp = api.load()
        self._ucp.hush()
        loops.warm_up()
        native_packing.warm_up()
        self._context = self._create_context()
        with no_empty_datagrams():
            self._worker = self._create_worker()
        self._secret = PoolSecret.make()
        self._greeter = Greeter(self._ucp, self._worker, self._secret)
        self._handles: list[c_void_p] = []  # of registered memory
        self._rows = make_rows()
        self._service = UcxService(self._ucp, self._worker, self._rows, self._secret)
        self._peers: dict[int, UcxPeer] = {}
        self._next_peer = 1
        self._on_error = api.ErrorCallback(self._peer_failed)  # UCX holds it as long as any endpoint lives
        self._progress = self._ucp.address_of("ucp_worker_progress")
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        event_fd = c_int()
        self._ucp.check(self._ucp.ucp_worker_get_efd(self._worker, byref(event_fd)), "ucp_worker_get_efd")
        self._poll = select.poll()
        self._poll.register(event_fd.value, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._is_closed = False

    # --- memory

    def allocate(self, num_bytes: int) -> UcxRegion:
        """Allocate zeroed memory in a shared segment, which lives as long as this process needs it."""
        params = api.MemMapParams(
            field_mask=api.MEM_MAP_FIELD_LENGTH | api.MEM_MAP_FIELD_FLAGS, length=num_bytes, flags=api.MEM_MAP_ALLOCATE
        )
        view, memory_key = self._register(params, num_bytes)
        if not _is_shared(view.ctypes.data):
            view[:] = 0  # UCX takes it from the heap; a shared segment comes zeroed
            if "posix" in self._options.transports:
                logger.warning(
                    "a pool of %d bytes did not fit /dev/shm and lies in ordinary memory: transfers within this host "
                    "will be several times slower; enlarge /dev/shm (containers: --shm-size) or lower "
                    "cache.memory_bytes",
                    num_bytes,
                )
        return self._add_region(view, memory_key)

    def adopt(self, view: ByteArray) -> UcxRegion:
        """Register memory of the caller, who keeps it alive until close()."""
        view, memory_key = self._register(_adopting(view), view.nbytes)
        return self._add_region(view, memory_key)

    def _register(self, params: api.MemMapParams, num_bytes: int) -> tuple[ByteArray, bytes]:
        """Memory and what peers need to reach it."""
        handle = c_void_p()
        operation = f"registering {num_bytes} bytes"
        self._ucp.check(self._ucp.ucp_mem_map(self._context, byref(params), byref(handle)), operation)
        self._handles.append(handle)
        attributes = api.MemAttr(field_mask=api.MEM_ATTR_FIELD_ADDRESS)
        self._ucp.check(self._ucp.ucp_mem_query(handle, byref(attributes)), operation)
        memory = (ctypes.c_uint8 * num_bytes).from_address(attributes.address)
        packed, size = c_void_p(), c_size_t()
        self._ucp.check(self._ucp.ucp_rkey_pack(self._context, handle, byref(packed), byref(size)), operation)
        memory_key = ctypes.string_at(packed, size.value)
        self._ucp.ucp_rkey_buffer_release(packed)
        return np.ctypeslib.as_array(memory), memory_key

    def _add_region(self, view: ByteArray, memory_key: bytes) -> UcxRegion:
        key = PoolKey(
            base=view.ctypes.data,
            num_bytes=view.nbytes,
            memory_key=memory_key,
            secret=self._secret.key,
            region=self._service.add_region(view),
            num_rows=NUM_ROWS,
        )
        return UcxRegion(view=view, key=key.pack())

    # --- connections

    @property
    def address(self) -> bytes:
        """The worker's address: every interface that peers may try."""
        pointer, size = c_void_p(), c_size_t()
        self._ucp.check(self._ucp.ucp_worker_get_address(self._worker, byref(pointer), byref(size)), "worker address")
        address = ctypes.string_at(pointer, size.value)
        self._ucp.ucp_worker_release_address(self._worker, pointer)
        return address

    def connect(self, address: bytes, *, local: Region, remote_key: bytes) -> UcxPeer:
        """Create an endpoint; it is up when its first flush is, which the right process has then answered.

        Raises TransportError.
        """
        params = api.EpParams(
            field_mask=api.EP_PARAM_FIELD_REMOTE_ADDRESS
            | api.EP_PARAM_FIELD_ERR_HANDLING_MODE
            | api.EP_PARAM_FIELD_ERR_HANDLER,
            address=address,
            err_mode=api.ERR_HANDLING_MODE_PEER,
            err_cb=self._on_error,
            err_arg=self._next_peer,
        )
        endpoint = c_void_p()
        status = self._ucp.ucp_ep_create(self._worker, byref(params), byref(endpoint))
        self._ucp.check(status, f"connect with {self._options.words}")
        access = UcxAccess(
            ucp=self._ucp,
            worker=self._worker,
            greeter=self._greeter,
            service=self._service,
            pack_below_bytes=self._options.pack_below_bytes,
            close=lambda peer: self._close_peers([peer]),
        )
        peer = UcxPeer(access, endpoint=endpoint, local=local, remote_key=remote_key)
        self._peers[self._next_peer] = peer
        self._next_peer += 1
        return peer

    def _close_peers(self, peers: list[UcxPeer]) -> None:
        """Tear endpoints down together, within close_timeout_s. What is not gone by then is left to the process."""
        waiting = {peer: request for peer in peers if (request := peer.begin_close()) is not None}
        gone = [peer for peer in peers if peer not in waiting and peer in self._peers.values()]
        deadline_s = time.monotonic() + self._options.close_timeout_s
        while waiting and time.monotonic() < deadline_s:
            self.progress()
            for peer, request in list(waiting.items()):
                if peer.request_status(request) != api.IN_PROGRESS:
                    self._ucp.ucp_request_free(request)
                    del waiting[peer]
                    gone.append(peer)
        for peer in gone:
            peer.end_close()
        self._peers = {key: peer for key, peer in self._peers.items() if peer not in gone}
        if waiting:
            logger.warning(
                "%d connections did not close within %g s; they are left behind",
                len(waiting),
                self._options.close_timeout_s,
            )

    def _peer_failed(self, key: int | None, _endpoint: int | None, status: int) -> None:
        peer = self._peers.get(key or 0)
        if peer is not None:
            peer.fail(self._ucp.describe(status))

    # --- progress

    def progress(self) -> bool:
        """Advance outstanding work and serve peers; True when something moved."""
        self._service.tick()
        has_moved = loops.drain(self._progress, self._worker.value or 0, _DRAIN_ROUNDS)
        for peer in self._peers.values():
            has_moved |= peer.advance()
        return has_moved

    def wait(self, timeout_s: float) -> None:
        """Look for work a moment, then sleep until UCX has an event, wake() or the timeout."""
        if timeout_s > 0 and loops.spin(self._progress, self._worker.value or 0, _SPIN_ROUNDS):
            return
        status = self._ucp.ucp_worker_arm(self._worker)
        if status == api.ERR_BUSY:
            return
        self._ucp.check(status, "ucp_worker_arm")
        for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._wake_fd:
                os.eventfd_read(fd)

    def wake(self) -> None:
        """End a wait(), or the next one. Thread-safe."""
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every connection, then release memory and UCX. Every view of a region is dead afterwards."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wake_fd)
        self._close_peers(list(self._peers.values()))
        if self._peers:
            return  # destroying the worker under a connection that hangs would hang as well
        self._ucp.ucp_worker_destroy(self._worker)
        for handle in self._handles:
            self._ucp.ucp_mem_unmap(self._context, handle)
        self._ucp.ucp_cleanup(self._context)

    # --- set-up

    def _create_context(self) -> c_void_p:
        config = c_void_p()
        self._ucp.check(self._ucp.ucp_config_read(None, None, byref(config)), "ucp_config_read")
        try:
            for name, value in self._options.to_config().items():
                status = self._ucp.ucp_config_modify(config, name.encode(), value.encode())
                self._ucp.check(status, f"UCX option {name}={value}")
            params = api.Params(field_mask=api.PARAM_FIELD_FEATURES, features=_FEATURES)
            context = c_void_p()
            status = self._ucp.ucp_init_version(api.API_MAJOR, api.API_MINOR, byref(params), config, byref(context))
            self._ucp.check(status, f"starting UCX with {self._options.words}")
        finally:
            self._ucp.ucp_config_release(config)
        return context

    def _create_worker(self) -> c_void_p:
        params = api.WorkerParams(field_mask=api.WORKER_PARAM_FIELD_THREAD_MODE, thread_mode=api.THREAD_MODE_SERIALIZED)
        worker = c_void_p()
        self._ucp.check(self._ucp.ucp_worker_create(self._context, byref(params), byref(worker)), "ucp_worker_create")
        return worker


def _adopting(view: ByteArray) -> api.MemMapParams:
    return api.MemMapParams(
        field_mask=api.MEM_MAP_FIELD_ADDRESS | api.MEM_MAP_FIELD_LENGTH, address=view.ctypes.data, length=view.nbytes
    )


def _is_shared(address: int) -> bool:
    """Whether an address lies in a shared mapping of this process."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, permissions, *_ = line.split(maxsplit=2)
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return permissions.endswith("s")
    return False
