"""The worker's side: routers of a torch model, bound, and the device buffer that they write to."""
