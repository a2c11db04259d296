"""On PYTHONPATH: this process is of an older release of jaxrdma."""

from jaxrdma import control

control.VERSION = "0.0.9"
