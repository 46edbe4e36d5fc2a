"""Make Triton kernels run on CPU tensors in this process, where there is no GPU to run them on."""

import os
from pathlib import Path


def interpret_kernels():
    """Must run before anything imports triton, which decides at import; child processes are not affected."""
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    del os.environ["TRITON_INTERPRET"]
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
