"""The embedded engine: scheduler, paged KV, worker, sampling; torch and transformers."""
