"""Ctrl-C ends a command without a traceback, and at once: also in a compilation of minutes.

Python calls the handlers of signals in the main thread, between two of its own instructions, which
may be minutes later. It tells a file descriptor at once, to which a thread listens here.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells have it

_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process with one line and status 130."""
    with handled({signal.SIGINT: lambda: end("interrupted")}):
        yield


@contextlib.contextmanager
def handled(actions: dict[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Inside, calls the action of a signal that comes, in a thread; use it in the main thread.

    A signal that the process was started to ignore, as a shell's background jobs ignore Ctrl-C,
    stays ignored.
    """
    actions = {s: act for s, act in actions.items() if signal.getsignal(s) != signal.SIG_IGN}
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)

    def listen() -> None:
        while numbers := inbox.recv(64):
            for number in numbers:
                actions.get(signal.Signals(number), lambda: None)()

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    descriptor = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in actions}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        outbox.close()
        listener.join()
        inbox.close()


def say(line: str) -> None:
    """Prints a line on stderr, whatever the main thread is about to print."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def end(line: str) -> NoReturn:
    """Ends the process here and now, with a line on stderr and status 130."""
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR + b"\n")
    say(line)
    os._exit(INTERRUPTED)
