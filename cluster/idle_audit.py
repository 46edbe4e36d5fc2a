"""When the ledgers are audited in production: once after every busy time, so that no request waits for it."""

from __future__ import annotations

import logging

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.scheduler.central import CentralScheduler

logger = logging.getLogger(__name__)


class IdleAudit:
    """Watches for idle moments. Owned by the scheduler loop's thread."""

    def __init__(self, central: CentralScheduler, *, idle_s: float, now_s: float) -> None:
        """`idle_s`: how long there must have been no request."""
        self.num_audits = 0
        self._central = central
        self._idle_s = idle_s
        self._busy_until_s = now_s
        self._is_done = False

    def look(self, now_s: float) -> None:
        """Audit if this is the moment; to be called often. Raises LedgerCorrupted."""
        if self._central.num_unfinished:
            self._busy_until_s, self._is_done = now_s, False
        elif not self._is_done and now_s - self._busy_until_s >= self._idle_s:
            self._is_done = True
            try:
                self._central.check_integrity()
            except LedgerCorrupted:
                logger.exception("the ledger is corrupt")
                raise
            self.num_audits += 1
