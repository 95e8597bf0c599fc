"""Lets Flower's SuperLink wait longer for its database; Python imports this module at its start.

The SuperLink answers with an error when the database is locked for five seconds. On a busy machine
that ends the server's app, or a site.
"""

import sys

if any(each.endswith("flower-superlink") for each in sys.orig_argv):
    from flwr.supercore import constant

    assert constant.SQLITE_PRAGMAS[0][0] == "busy_timeout"
    constant.SQLITE_PRAGMAS = (("busy_timeout", "60000"), *constant.SQLITE_PRAGMAS[1:])
