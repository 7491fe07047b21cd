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
