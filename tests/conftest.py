"""Fixtures for every level of tests."""

import signal

pytest_plugins = ["tests.support.s3_server"]

# A shell starts what it puts into the background with these two ignored, and every process below would inherit that:
# the tests of Ctrl-C and of forwarded signals would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
