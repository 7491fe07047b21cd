"""Gives pages to rows, and says whether a row may have more; `scheduler.py` decides who asks first."""

from __future__ import annotations

import numpy as np

from torch_dflash.plan import DecodePlan


class PageAllocator:
    """Page tables of the rows of one batch, and who may have the pages that are free.

    Pages are handed out as rows grow. A row gets more only if afterwards every row could still be finished
    one after another (Dijkstra's banker's algorithm), so rows may wait for each other but never for ever,
    and no row is thrown out and computed again.

    Args:
        plan: its ``row_pages`` and ``pages``.
        most: per row, the positions it may come to hold.
        table: pages that rows hold already, [B, row_pages].
    """

    def __init__(self, plan: DecodePlan, most: list[int], table: np.ndarray | None = None):
        self.page_size = plan.page_size
        shape = plan.batch_size, plan.row_pages
        self.table = np.zeros(shape, np.int32) if table is None else table.astype(np.int32)
        self._most = [min(self._pages(positions), plan.row_pages) for positions in most]
        taken = set(self.table.ravel().tolist())
        self._free = [page for page in range(plan.pages - 1, 0, -1) if page not in taken]

    def reserve(self, row: int, positions: int) -> bool:
        """Let ``row`` write positions below ``positions``, if it can be had: whether it may."""
        held = self._held(row)
        wanted = min(self._pages(positions), self._most[row])
        missing = wanted - held
        if missing <= 0:
            return True
        if missing > len(self._free) or not self._all_can_end(row, missing):
            return False
        for column in range(held, wanted):
            self.table[row, column] = self._free.pop()
        return True

    def renew(self, row: int, most: int) -> None:
        """Let another request have ``row``, which may come to hold ``most`` positions."""
        self.release(row)
        self._most[row] = min(self._pages(most), self.table.shape[1])

    def release(self, row: int) -> None:
        """Take back the pages of a row that has ended."""
        held = self._held(row)
        self._free += self.table[row, :held][::-1].tolist()
        self.table[row] = 0

    def _all_can_end(self, row: int, more: int) -> bool:
        """Whether, with ``more`` pages for ``row``, the rows can still be finished in some order."""
        free = len(self._free) - more
        held = [self._held(b) + (more if b == row else 0) for b in range(len(self._most))]
        left = [(most - has, has) for most, has in zip(self._most, held, strict=True) if has]
        for missing, has in sorted(left):  # whoever lacks least ends first and gives back all it has
            if missing > free:
                return False
            free += has
        return True

    def _held(self, row: int) -> int:
        return int(np.count_nonzero(self.table[row]))

    def _pages(self, positions: int) -> int:
        return -(-positions // self.page_size)


def check_table(table: np.ndarray, pages: int, what: str) -> None:
    """Raise ``ValueError`` unless ``table`` [B, row_pages] is one that a `PageAllocator` could give.

    Every page lies in the pool and stands in the table once, page 0 apart, which says that there is none;
    a row's pages come first. ``what`` names in the message whose table it is.
    """
    fix = "the table was changed; go back to the state as engine.start or engine.advance returned it."
    owner: dict[int, tuple[int, int]] = {}
    for (row, column), number in np.ndenumerate(table):
        page, where = int(number), f"page_table[{row}, {column}]"
        if not 0 <= page < pages:
            raise ValueError(f"{what}: {where} is {page}, the pool has pages 0 to {pages - 1}; {fix}")
        if page and column and not table[row, column - 1]:
            raise ValueError(f"{what}: {where} is {page} after a column without a page; {fix}")
        if page and page in owner:
            first = "page_table[{}, {}]".format(*owner[page])
            raise ValueError(f"{what}: {where} is {page}, and so is {first}; {fix}")
        owner[page] = (row, column)
