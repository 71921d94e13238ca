"""The Wyoming protocol (Home Assistant's) on a port of its own: `--wyoming-port`.

Needs the package `wyoming`, an optional dependency: nothing else imports this package unless the port is set.
"""
