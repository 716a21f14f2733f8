"""Ends a worker when the launcher that started it is gone."""

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
