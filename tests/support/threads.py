"""Jobs run at once."""

from __future__ import annotations

import threading


def in_threads(*jobs):
    """Run ``jobs`` at once; what any of them raised."""
    errors = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # a thread's own traceback would end nothing
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def in_time(job, seconds=60):
    """What ``job`` returns or raises; a job that waits for ever is a failure, not a test that never ends."""
    done = []

    def run():
        try:
            done.append((job(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, f"still waiting after {seconds} s"
    result, error = done[0]
    if error is not None:
        raise error
    return result
