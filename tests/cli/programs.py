"""The command as a program of its own, for `python -c`."""

from __future__ import annotations

# As if started from a terminal: a job in the background, or under nohup, inherits a deaf ear for some signals.
LISTENING = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
RUN = "from routebook.cli.main import main; sys.exit(main(sys.argv[1:]))"
