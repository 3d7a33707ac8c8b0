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
from signal import SIGINT
from types import FrameType
from typing import Any


class held_interrupts:
    """Context manager: SIGINT is handled when the outermost block ends.

    The block always runs to its end. After that, a signal that was received is passed to
    the handler that was installed before the block. Python's own handler then raises
    KeyboardInterrupt, with the work of the block done.

    Only handlers written in Python are replaced: an ignored signal stays ignored, and the
    system's default action still ends the process. Python runs handlers on the main thread,
    so a block on another thread changes nothing. Entering and leaving takes about a
    microsecond.

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

    _recorder: "_Recorder | None" = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = getsignal(SIGINT)
        if type(handler) is _Recorder:
            if handler.block() is not None:
                return
            handler = handler.handler
        # Not callable: ignored, the default action, or a handler not written in Python.
        if callable(handler):
            self._recorder = _Recorder(handler, self)
            # A signal received before this call is handled in it, and the block not run.
            signal(SIGINT, self._recorder)

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        # A handler that was installed inside the block stays.
        if getsignal(SIGINT) is recorder:
            signal(SIGINT, recorder.handler)
        if recorder.is_received:
            recorder.handler(SIGINT, recorder.frame)


class _Recorder:
    """Handler that records a signal for the handler that it replaces.

    Args:
        handler: Handler that it replaces.
        block: Block that restores the handler. If the handler of another signal raises as
            the block ends, the block can disappear without having done so.
    """

    __slots__ = ("block", "frame", "handler", "is_received")

    def __init__(
        self, handler: Callable[[int, FrameType | None], Any], block: held_interrupts
    ) -> None:
        self.handler, self.is_received = handler, False
        self.frame: FrameType | None = None
        self.block = weakref.ref(block)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_received, self.frame = True, frame
        if self.block() is None:
            signal(SIGINT, self.handler)
            self.handler(number, frame)
