"""The one thread that generates, and the queue before it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from stageprune.serving.transformers.api_error import ApiError, shutting_down
from stageprune.serving.transformers.jobs import End, Interrupt, Interrupted, Job

logger = logging.getLogger(__name__)


class Worker:
    """Runs one job after the other.

    Args:
        run: does a job, and raises `Interrupted` soon after `job.interrupt` was set.
        max_queue: how many jobs may wait while one runs.
    """

    def __init__(self, run: Callable[[Job], None], max_queue: int) -> None:
        self._run = run
        self._capacity = max_queue + 1
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._reserved = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="stageprune-worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether jobs are accepted and done."""
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        """How many requests wait, those whose prompts are still being tokenised included."""
        return len(self._waiting) + self._reserved

    @property
    def running(self) -> int:
        """1 while a job is done, else 0."""
        return int(self._running is not None)

    def reserve(self) -> None:
        """Take a place in the queue before there is a job; `submit` or `release` must follow.

        Raises:
            ApiError: if the queue is full (429), or the server is shutting down (503).
        """
        with self._changed:
            if self._closing:
                raise shutting_down()
            if self.queued + self.running >= self._capacity:
                raise ApiError(
                    429,
                    f"the queue is full: {self._capacity - 1} requests may wait; try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._reserved += 1

    def release(self) -> None:
        """Give a reserved place back."""
        with self._changed:
            self._reserved -= 1

    def submit(self, job: Job) -> None:
        """Put a job into the place that was reserved for it.

        Raises:
            ApiError: if the server is shutting down (503).
        """
        with self._changed:
            self._reserved -= 1
            if self._closing:
                raise shutting_down()
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job that nobody waits for any more; harmless if it has ended."""
        with self._changed:
            job.interrupt = job.interrupt or Interrupt.CANCELLED
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        job.deliver(End(cancelled=True))

    def close(self, grace_s: float) -> None:
        """Accept nothing more, fail what waits (503), and cut the running job after `grace_s` seconds. Returns at once.

        Doing so twice is harmless.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            waiting, running = list(self._waiting), self._running
            self._waiting.clear()
            self._changed.notify()
        for job in waiting:
            job.deliver(End(shutting_down()))
        if running is not None:
            timer = threading.Timer(grace_s, self._cut, (running,))
            timer.daemon = True
            timer.start()

    def join(self, timeout_s: float) -> bool:
        """After `close`: whether the thread has ended, at the latest after `timeout_s` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _cut(self, job: Job) -> None:
        job.interrupt = job.interrupt or Interrupt.SHUTDOWN

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.check()
                self._run(job)
                end = End()
            except Interrupted:
                cancelled = job.interrupt is Interrupt.CANCELLED
                end = End(None if cancelled else shutting_down(), cancelled)
            except Exception as error:
                logger.exception("a request failed")
                end = End(ApiError(500, f"the model failed: {type(error).__name__}", code="internal_error"))
            with self._changed:
                self._running = None
            job.deliver(end)  # after the place is free: the client may come back at once

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if self._closing:
                return None
            self._running = self._waiting.popleft()
            return self._running
