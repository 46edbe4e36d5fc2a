"""ctypes declarations of libucp: the few calls of UCX that one-sided transfers need. Holds no policy.

The library is the one of the libucx wheel, or the system's where there is no wheel or
the user prefers it (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY, read by libucx itself). It is always taken by its
soname, so that this module and ucxx in one process share one copy of the library. Constants and structures
follow ucp/api/ucp.h of UCX 1.21; UCX keeps its ABI by field masks, so 1.12 and later fit.

Every call releases the GIL: UCX takes locks of its own and may call back.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from blockferry.connectors.base import TransportError

API_MAJOR, API_MINOR = 1, 12

OK = 0
IN_PROGRESS = 1
ERR_BUSY = -15
ERR_LAST = -100

FEATURE_RMA = 1 << 1
FEATURE_WAKEUP = 1 << 4
FEATURE_AM = 1 << 6
PARAM_FIELD_FEATURES = 1 << 0
WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0
THREAD_MODE_SERIALIZED = 1
EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0
EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1
EP_PARAM_FIELD_ERR_HANDLER = 1 << 2
ERR_HANDLING_MODE_PEER = 1
MEM_MAP_FIELD_ADDRESS = 1 << 0
MEM_MAP_FIELD_LENGTH = 1 << 1
MEM_MAP_FIELD_FLAGS = 1 << 2
MEM_MAP_ALLOCATE = 1 << 1
MEM_ATTR_FIELD_ADDRESS = 1 << 0
MEM_ATTR_FIELD_LENGTH = 1 << 1
OP_ATTR_FIELD_DATATYPE = 1 << 3
OP_ATTR_FIELD_FLAGS = 1 << 4
DATATYPE_IOV = 2
EP_CLOSE_FLAG_FORCE = 1 << 0
AM_HANDLER_FIELD_ID = 1 << 0
AM_HANDLER_FIELD_FLAGS = 1 << 1
AM_HANDLER_FIELD_CB = 1 << 2
AM_HANDLER_FIELD_ARG = 1 << 3
AM_FLAG_WHOLE_MSG = 1 << 0
AM_RECV_ATTR_FIELD_REPLY_EP = 1 << 0
AM_SEND_FLAG_REPLY = 1 << 0
AM_SEND_FLAG_EAGER = 1 << 1

ErrorCallback = CFUNCTYPE(None, c_void_p, c_void_p, ctypes.c_int8)
AmCallback = CFUNCTYPE(ctypes.c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)


class Params(Structure):
    """ucp_params_t; the trailing fields stay unset."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(Structure):
    """ucp_worker_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class SockAddr(Structure):
    """ucs_sock_addr_t."""

    _fields_ = (("addr", c_void_p), ("addrlen", c_uint32))


class EpParams(Structure):
    """ucp_ep_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_cb", ErrorCallback),
        ("err_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", SockAddr),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", SockAddr),
    )


class MemMapParams(Structure):
    """ucp_mem_map_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    )


class MemAttr(Structure):
    """ucp_mem_attr_t."""

    _fields_ = (("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("mem_type", c_int))


class RequestParam(Structure):
    """ucp_request_param_t."""

    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class AmHandlerParam(Structure):
    """ucp_am_handler_param_t."""

    _fields_ = (("field_mask", c_uint64), ("id", c_uint), ("flags", c_uint32), ("cb", AmCallback), ("arg", c_void_p))


class AmRecvParam(Structure):
    """ucp_am_recv_param_t."""

    _fields_ = (("recv_attr", c_uint64), ("reply_ep", c_void_p))


_STATUS = ctypes.c_int8  # ucs_status_t is a packed enum
_PROTOTYPES: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "ucp_config_read": ((c_char_p, c_char_p, POINTER(c_void_p)), _STATUS),
    "ucp_config_modify": ((c_void_p, c_char_p, c_char_p), _STATUS),
    "ucp_config_release": ((c_void_p,), None),
    "ucp_init_version": ((c_uint, c_uint, POINTER(Params), c_void_p, POINTER(c_void_p)), _STATUS),
    "ucp_cleanup": ((c_void_p,), None),
    "ucp_worker_create": ((c_void_p, POINTER(WorkerParams), POINTER(c_void_p)), _STATUS),
    "ucp_worker_destroy": ((c_void_p,), None),
    "ucp_worker_get_address": ((c_void_p, POINTER(c_void_p), POINTER(c_size_t)), _STATUS),
    "ucp_worker_release_address": ((c_void_p, c_void_p), None),
    "ucp_worker_get_efd": ((c_void_p, POINTER(c_int)), _STATUS),
    "ucp_worker_arm": ((c_void_p,), _STATUS),
    "ucp_worker_progress": ((c_void_p,), c_uint),
    "ucp_mem_map": ((c_void_p, POINTER(MemMapParams), POINTER(c_void_p)), _STATUS),
    "ucp_mem_unmap": ((c_void_p, c_void_p), _STATUS),
    "ucp_mem_query": ((c_void_p, POINTER(MemAttr)), _STATUS),
    "ucp_rkey_pack": ((c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)), _STATUS),
    "ucp_rkey_buffer_release": ((c_void_p,), None),
    "ucp_ep_create": ((c_void_p, POINTER(EpParams), POINTER(c_void_p)), _STATUS),
    "ucp_ep_close_nbx": ((c_void_p, POINTER(RequestParam)), c_void_p),
    "ucp_ep_rkey_unpack": ((c_void_p, c_char_p, POINTER(c_void_p)), _STATUS),
    "ucp_rkey_ptr": ((c_void_p, c_uint64, POINTER(c_void_p)), _STATUS),
    "ucp_rkey_destroy": ((c_void_p,), None),
    "ucp_put_nbx": ((c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParam)), c_void_p),
    "ucp_get_nbx": ((c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParam)), c_void_p),
    "ucp_worker_set_am_recv_handler": ((c_void_p, POINTER(AmHandlerParam)), _STATUS),
    "ucp_am_send_nbx": (
        (c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, POINTER(RequestParam)),
        c_void_p,
    ),
    "ucp_ep_flush_nbx": ((c_void_p, POINTER(RequestParam)), c_void_p),
    "ucp_request_check_status": ((c_void_p,), _STATUS),
    "ucp_request_free": ((c_void_p,), None),
}


class Ucp:
    """libucp with its prototypes declared: attributes are the C functions by their C names."""

    def __init__(self, library: ctypes.CDLL, support: ctypes.CDLL) -> None:
        for name, (argtypes, restype) in _PROTOTYPES.items():
            function = library[name]
            function.argtypes, function.restype = argtypes, restype
            setattr(self, name, function)
        self._describe = support["ucs_status_string"]
        self._describe.argtypes, self._describe.restype = (_STATUS,), c_char_p
        self._set_global = support["ucs_global_opts_set_value"]
        self._set_global.argtypes, self._set_global.restype = (c_char_p, c_char_p), _STATUS
        self._get_global = support["ucs_global_opts_get_value"]
        self._get_global.argtypes, self._get_global.restype = (c_char_p, c_char_p, c_size_t), _STATUS

    def __getattr__(self, name: str) -> Any:  # only for type checkers: __init__ sets every name
        raise AttributeError(f"libucp function {name} is not declared in ucx_api")

    def describe(self, status: int) -> str:
        """UCX's words for a status code."""
        text: bytes = self._describe(status)
        return text.decode()

    def check(self, status: int, operation: str) -> None:
        """Raises TransportError when `status` is an error."""
        if status < 0:
            raise TransportError(f"{operation}: {self.describe(status)}")

    def handle_messages(self, worker: c_void_p, number: int, handler: int, state: int) -> None:
        """Have active messages of a number, each whole, given to a C function at an address. Raises TransportError."""
        param = AmHandlerParam(
            field_mask=AM_HANDLER_FIELD_ID | AM_HANDLER_FIELD_FLAGS | AM_HANDLER_FIELD_CB | AM_HANDLER_FIELD_ARG,
            id=number,
            flags=AM_FLAG_WHOLE_MSG,
            cb=AmCallback(handler),
            arg=state,
        )
        self.check(self.ucp_worker_set_am_recv_handler(worker, ctypes.byref(param)), "ucp_worker_set_am_recv_handler")

    def hush(self) -> None:
        """Log fatal errors only, unless the user chose a level: UCX logs to stdout, which is the program's."""
        level = ctypes.create_string_buffer(64)
        self.check(self._get_global(b"LOG_LEVEL", level, len(level)), "reading the UCX option LOG_LEVEL")
        if level.value.lower() == b"warn":
            self.check(self._set_global(b"LOG_LEVEL", b"fatal"), "setting the UCX option LOG_LEVEL")

    def address_of(self, name: str) -> int:
        """Machine address of a C function, for compiled callers."""
        address = ctypes.cast(self.__dict__[name], c_void_p).value
        assert address is not None, name
        return address


@functools.cache
def load() -> Ucp:
    """Load libucp once per process. Raises TransportError where it is not installed."""
    if importlib.util.find_spec("libucx") is not None:
        importlib.import_module("libucx").load_library()
    try:
        return Ucp(ctypes.CDLL("libucp.so.0"), ctypes.CDLL("libucs.so.0"))
    except OSError as error:
        raise TransportError(
            f"UCX is not installed ({error}); install the package libucx-cu12 or UCX 1.12 or later"
        ) from error


def pointer_status(pointer: int | None) -> int:
    """Status carried by a ucs_status_ptr_t: OK, an error code, or IN_PROGRESS where it is a request."""
    if not pointer:
        return OK
    return pointer - (1 << 64) if pointer >= (1 << 64) + ERR_LAST else IN_PROGRESS
