"""How a worker ends: cleanly when its training is done, and also when the launcher that started it is gone."""

import atexit
import contextlib
import os
import signal
import threading
import time

import psutil


def end_with_launcher() -> None:
    """End this process when its launcher is gone, so that a killed launcher leaves no worker behind.

    Both launchers pass SIGTERM on to their workers, but SIGKILL reaches nobody, and the first of
    `deepspeed`'s two processes passes nothing on.
    """
    watched = []
    patterns = ("torchrun", "torch.distributed", "torch/distributed", "deepspeed.launcher.launch")
    for process in psutil.Process().parents()[:2]:
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if any(pattern in command for pattern in patterns):
                watched.append(process)
        if not watched or "deepspeed.launcher.launch" not in command:
            break  # started by hand, or by torchrun alone
        patterns = ("deepspeed",)  # the first of its two launchers

    def alive(process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def watch():
        while all(alive(process) for process in watched):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # lets a script clean up
        time.sleep(5)
        os._exit(128 + signal.SIGTERM)

    if watched:
        threading.Thread(target=watch, daemon=True).start()


def let_threads_finish() -> None:
    """Before the interpreter shuts down, let gloo's threads drop the tensors of the last collectives.

    They need the interpreter for that, and one that asks for it during the shutdown aborts the
    process (SIGABRT, "terminate called without an active exception"; PyTorch issue 190489), also
    after destroy_process_group(). They only wait for this thread to pause: a millisecond does, and
    on a busy machine half a second.
    """
    atexit.unregister(time.sleep)  # once is enough
    atexit.register(time.sleep, 0.5)
