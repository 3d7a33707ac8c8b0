"""Ctrl-C during code that must run to its end.

Python raises KeyboardInterrupt between any two instructions of the main thread. Code that
updates several arrays together runs in :class:`held_interrupts`, which delays the
interrupt to the end of the block.
"""

import threading
import weakref

# The functions that `signal` wraps: its conversions to enums take microseconds.
from _signal import getsignal, signal  # pyright: ignore[reportMissingImports]
from collections.abc import Callable
from signal import SIGINT, SIGTERM
from types import FrameType
from typing import Any

#: Signals that are held back. A received SIGTERM is handled first: its handler may end the
#: process.
HELD = SIGTERM, SIGINT


class held_interrupts:
    """Context manager: SIGINT and SIGTERM are handled when the outermost block ends.

    The block always runs to its end. After that, a signal that was received is passed to
    the handler that was installed before the block. Python's own handler of SIGINT then
    raises KeyboardInterrupt, with the work of the block done.

    Only handlers written in Python are replaced: an ignored signal stays ignored, and the
    system's default action still ends the process. Python runs handlers on the main thread,
    so a block on another thread changes nothing. Entering and leaving takes about two
    microseconds.

    Example:
        >>> import signal
        >>> try:
        ...     with held_interrupts():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done = True
        ... except KeyboardInterrupt:
        ...     print(done)
        True
    """

    _recorders: "tuple[_Recorder, ...]" = ()

    def __enter__(self) -> None:
        thread = threading.main_thread()
        if threading.current_thread() is not thread:
            return
        for number in HELD:
            handler = getsignal(number)
            if type(handler) is _Recorder:
                if handler.is_in_use(thread):
                    continue
                handler = handler.handler
            # Not callable: ignored, the default action, or a handler not written in Python.
            if callable(handler):
                recorder = _Recorder(number, handler, block=self, thread=thread)
                self._recorders += (recorder,)
                # A signal received before this call is handled in it, and the block not
                # run.
                signal(number, recorder)

    def __exit__(self, *error: object) -> None:
        for recorder in self._recorders:
            # A handler that was installed inside the block stays.
            if getsignal(recorder.number) is recorder:
                signal(recorder.number, recorder.handler)
            if recorder.is_received:
                recorder.handler(recorder.number, recorder.frame)


class _Recorder:
    """Handler that records a signal for the handler that it replaces.

    Args:
        number: Number of the signal.
        handler: Handler that it replaces.
        block: Block that restores the handler. If the handler of another signal raises as
            the block ends, the block can disappear without having done so.
        thread: Thread of the block. In a process that was forked by another thread during
            the block, the block never ends.
    """

    __slots__ = ("block", "frame", "handler", "is_received", "number", "thread")

    def __init__(
        self,
        number: int,
        handler: Callable[[int, FrameType | None], Any],
        *,
        block: held_interrupts,
        thread: threading.Thread,
    ) -> None:
        self.number, self.handler, self.thread = number, handler, thread
        self.block = weakref.ref(block)
        self.is_received, self.frame = False, None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_received, self.frame = True, frame
        if not self.is_in_use(threading.main_thread()):
            signal(number, self.handler)
            self.handler(number, frame)

    def is_in_use(self, main_thread: threading.Thread) -> bool:
        """Return whether the block will end and restore the handler."""
        return self.block() is not None and self.thread is main_thread
