"""The conformance suite of the ledger's seam, for any implementation and any test runner.

Subclass it and give the ledger under test; pytest collects the tests from there::

    class TestMyLedger(LedgerConformance):
        def make_ledger(self, schema, block_size, num_blocks):
            return MyLedger(schema, block_size)
"""

from routebook.ledger.conformance.suite import LedgerConformance

__all__ = ["LedgerConformance"]
